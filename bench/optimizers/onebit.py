"""1-bit Adam and 0/1 Adam: once the second moment is known, ranks exchange one bit per element."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Lt
from torch import nn
from typing_extensions import Doc, override

from bench.optimizers.flat import FlatOptimizer, OwnPayloads
from collectives.base import Collective
from collectives.direct import owner_rounds
from collectives.options import Count, Incompatible, Positive, PositiveOrZero, incompatibility
from collectives.payloads import Codes, Dense, Payload, UnreducedSum
from collectives.schedule.execution import PackedPieces, together
from collectives.schedule.rounds import Layout, Leaf, leaves
from compressors.base import Compressor
from compressors.kernels.quantisation import signs_and_magnitude
from compressors.kernels.selection import sum_of_squares
from gradwire.exchange.communicator import CompressedCommunicator

Scale = Literal["l1", "l2"]


class OneBitMean:
    """Average vectors over ranks in two stages with one bit per element, and keep what each stage did not send.

    Source: DeepSpeed (runtime/comm/nccl.py).

    Every rank owns a part of the vector. First, ranks send each part, as signs with one scale per layer, to its owner.
    Then, owners send the means of their parts in the same form to all ranks. A rank adds what it did not send to what
    it sends next: "residual", of the whole vector, in the first stage, and "owner_residual", of its own part, in the
    second.

    Args:
        optimizer: the optimizer, whose `memory` holds the residuals.
        scale: "l1" for the mean magnitude of a layer's elements, "l2" for the root of their mean square.
    """

    def __init__(self, optimizer: FlatOptimizer, scale: Scale) -> None:
        self._optimizer = optimizer
        self._transport = optimizer.transport
        self._scale = scale
        rank, world_size = self._transport.rank, self._transport.world_size
        self._layout = Layout(tuple(Leaf(numel, alignment=8, addable=False) for numel in optimizer.numels))
        cuts = self._layout.cuts(world_size)
        self._places = [(start, stop, number) for number, (start, stop) in enumerate(cuts)]
        self._own = self._places[rank]
        self._to_owners, self._from_owners = owner_rounds(world_size, rank, [dict(enumerate(self._places))])
        self.forget()

    def forget(self) -> None:
        """Set what was not sent to zero."""
        residual = self._optimizer.zeros()
        self._optimizer.memory |= {"residual": residual, "owner_residual": residual[slice(*self._own[:2])].clone()}

    def average_(self, x: torch.Tensor, frozen: torch.Tensor | None) -> None:
        """Replace a vector with its mean over ranks, as far as it was sent; every rank must call this method.

        Args:
            x: fp32 [elements of all layers].
            frozen: bool, of the same shape; True for elements that count as zero, and are not part of a scale; None if
                there are none. It must be equal on all ranks.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        memory, own = self._optimizer.memory, self._own
        with self._optimizer.exchanging() as report:
            started = time.perf_counter()
            message = self._encode(memory["residual"].add_(x), self._optimizer.numels, frozen)
            report.encode_s = time.perf_counter() - started
            pieces = PackedPieces(self._transport, message, self._layout)
            pieces.run([self._to_owners])
            total, own_frozen = memory["owner_residual"], None if frozen is None else frozen[slice(*own[:2])]
            UnreducedSum(pieces.terms(own)).add_to_(total, divisor=self._transport.world_size)
            pieces.held[own] = self._encode(total, [part.numel for part in leaves(pieces[own])], own_frozen)
            pieces.run([self._from_owners])
            x.zero_()
            for place in self._places:
                pieces[place].add_to_(x[slice(*place[:2])])
            if frozen is not None:
                x.masked_fill_(frozen, 0)
            report.encoded = self._optimizer.encoded(leaves(message), report.encode_s)

    def _encode(self, values: torch.Tensor, numels: Sequence[int], frozen: torch.Tensor | None) -> Payload:
        """Return the signs of `values`, fp32 (mutated), with a scale for each part, and subtract them from `values`."""
        counts = numels
        if frozen is not None:
            values.masked_fill_(frozen, 0)
            counts = [part.numel() - int(part.sum()) for part in frozen.split(numels)]
        payloads = []
        for part, count in zip(values.split(numels), counts, strict=True):
            packed = Codes.room_for_codes(part.numel(), 1, part.device)
            scale = signs_and_magnitude(part, packed) / max(1, count)
            if self._scale == "l2":
                scale = math.sqrt(sum_of_squares(part) / max(1, count))
            scales = torch.tensor([scale], dtype=torch.float32, device=part.device)[: part.numel()]
            payloads.append(Codes(part.numel(), "sign", 1, packed, scales))
            payloads[-1].subtract_from_(part)
        if frozen is not None:
            values.masked_fill_(frozen, 0)
        return together(payloads)


class OneBitOptimizer(FlatOptimizer):
    """Base of both optimizers: Adam's moments without bias correction, whole means of gradients, and `OneBitMean`.

    Elements whose second moment is zero are moved by weight decay alone: their signs would move them by lr / eps.

    Args:
        parameters, lr, channel: as in `FlatOptimizer`.
        options: the options of 1-bit Adam or 0/1 Adam.

    Attributes:
        average_bits_: replaces a vector with its mean over ranks; the arguments are those of `OneBitMean.average_`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        channel: CompressedCommunicator | None,
        options: OneBitOptions,
    ) -> None:
        super().__init__(parameters, lr, channel)
        self.options = options
        self.counts["step"] = 0
        self.memory |= {"mean": self.zeros(), "square": self.zeros()}
        self._bits = OneBitMean(self, options.scale)
        self.average_bits_ = self._bits.average_
        self._divisor: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def go_to(self, step: int) -> None:
        """Go on as if `step` steps were done, to measure times; a second moment of zero becomes one."""
        self.counts["step"] = step
        if not self.memory["square"].any():
            self.memory["square"].fill_(1)
        self._divisor = None

    @property
    def residual_nbytes(self) -> int:
        """Return the bytes of what both stages did not send."""
        return self.memory["residual"].nbytes + self.memory["owner_residual"].nbytes

    def average_whole_(self, gradient: torch.Tensor) -> None:
        """Replace a vector over all parameters with its mean over ranks, sent in fp32."""
        if self.channel is not None:
            self.channel.combine_(gradient.split(self.numels))

    def observe(self, gradient: torch.Tensor) -> None:
        """Update both moments with the mean gradient."""
        self.memory["mean"].lerp_(gradient, 1 - self.options.beta1)
        self.memory["square"].mul_(self.options.beta2).addcmul_(gradient, gradient, value=1 - self.options.beta2)
        self._divisor = None

    def divisor(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what divides a step, and which elements are frozen (only weight decay moves them).

        Returns:
            (root of the second moment + eps, infinite where the second moment is zero; True for these elements, None if
            there are none), both over all parameters.
        """
        if self._divisor is None:
            square = self.memory["square"]
            divisor, frozen = square.sqrt().add_(self.options.eps), square == 0
            any_frozen = bool(frozen.any())
            self._divisor = (
                divisor.masked_fill_(frozen, math.inf) if any_frozen else divisor,
                frozen if any_frozen else None,
            )
        return self._divisor

    def direction(self) -> torch.Tensor:
        """Return what a step subtracts from the parameters, per unit of the learning rate, as a new vector."""
        direction = self.memory["mean"] / self.divisor()[0]
        if self.options.weight_decay:
            direction.add_(self.weights(), alpha=self.options.weight_decay)
        return direction

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._divisor = None


class OneBitMomentum(OneBitOptimizer):
    """Run 1-bit Adam as a torch optimizer."""

    options: OneBitAdam

    @override
    def descend(self, gradient: torch.Tensor, lr: float) -> None:
        self.counts["step"] += 1
        if self.counts["step"] <= self.options.warmup_steps:
            self.average_whole_(gradient)
            self.observe(gradient)
        else:
            mean = self.memory["mean"].lerp_(gradient, 1 - self.options.beta1)
            self.average_bits_(mean, self.divisor()[1])
        self.add_to_weights(self.direction(), -lr)


class ZeroOneSteps(OneBitOptimizer):
    """Run 0/1 Adam as a torch optimizer.

    In the second phase ranks have different parameters between two exchanges: "anchor", the parameters after the last
    exchange, which all ranks share, plus "drift", this rank's own steps since then.
    """

    options: ZeroOneAdam

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        channel: CompressedCommunicator | None,
        options: ZeroOneAdam,
    ) -> None:
        super().__init__(parameters, lr, channel, options)
        self.counts["lr_sum"] = 0.0  # of the steps since the last exchange

    @override
    def descend(self, gradient: torch.Tensor, lr: float) -> None:
        self.counts["step"] += 1
        if self.counts["step"] <= self.options.var_freeze_step:
            self._descend_together(gradient, lr)
        else:
            if "anchor" not in self.memory:
                self.memory |= {"anchor": self.weights(), "drift": self.zeros()}
                self._bits.forget()
            self._descend_apart(gradient, lr)

    def show_shared(self) -> None:
        """Set the parameters to those after the last exchange, which are equal on all ranks."""
        if "anchor" in self.memory:
            self.set_weights(self.memory["anchor"])

    def show_own(self) -> None:
        """Set the parameters to this rank's own, with its steps since the last exchange."""
        if "anchor" in self.memory:
            self.set_weights(self.memory["anchor"] + self.memory["drift"])

    def _descend_together(self, gradient: torch.Tensor, lr: float) -> None:
        if self.options.updates_moment(int(self.counts["step"])):
            self.average_whole_(gradient)
            self.observe(gradient)
        else:
            self.average_bits_(gradient, self.divisor()[1])
            self.memory["mean"].lerp_(gradient, 1 - self.options.beta1)
        self.add_to_weights(self.direction(), -lr)

    def _descend_apart(self, gradient: torch.Tensor, lr: float) -> None:
        mean, anchor, drift = (self.memory[name] for name in ("mean", "anchor", "drift"))
        divisor, frozen = self.divisor()
        mean.lerp_(gradient, 1 - self.options.beta1)
        drift.sub_(self.direction(), alpha=lr)
        self.counts["lr_sum"] += lr
        if self.options.exchanges_steps(int(self.counts["step"])) and self.counts["lr_sum"]:
            sent = drift * divisor
            self.average_bits_(sent, frozen)
            torch.div(sent, -self.counts["lr_sum"], out=mean)
            anchor.addcdiv_(sent, divisor)
            if frozen is not None:  # weight decay alone moves these, and equally on all ranks
                anchor.add_(drift.masked_fill(~frozen, 0))
            drift.zero_()
            self.counts["lr_sum"] = 0.0
        self.show_own()


@dataclasses.dataclass(kw_only=True)
class OneBitOptions(OwnPayloads):
    """The options that 1-bit Adam and 0/1 Adam share."""

    default_lr: ClassVar[float] = 0.001
    default_collectives: ClassVar[tuple[str, ...]] = ("ring",)  # whose bytes are counted, unlike those of native

    beta1: Annotated[float, Ge(0), Lt(1), Doc("decay rate of the mean of gradients")] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), Doc("decay rate of the mean of squared gradients")] = 0.999
    eps: Annotated[Positive, Doc("added to the root of the second moment before dividing by it")] = 1e-8
    weight_decay: Annotated[PositiveOrZero, Doc("share of the weight removed per step, times lr")] = 0.0
    scale: Annotated[
        Scale, Doc("magnitude of a layer's signs: mean magnitude (l1), or root mean square as published (l2)")
    ] = "l1"

    @override
    def check_compatible(self, compressor: Compressor, collective: Collective) -> None:
        super().check_compatible(compressor, collective)
        if reason := incompatibility(collective.check_compatible, Dense):
            raise Incompatible(f"{self.component_name} averages whole gradients at first (Dense payloads): {reason}")


@dataclasses.dataclass(kw_only=True)
class OneBitAdam(OneBitOptions, name="onebit_adam"):
    """1-bit Adam: Adam at first, then ranks average their momentum with one bit per element.

    Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed"
    (arXiv:2102.02888), and DeepSpeed (runtime/fp16/onebit/adam.py).
    Differs: scale=l1 by default, because the published l2 is no contraction for heavy-tailed momentum; elements whose
    second moment is zero are frozen, which DeepSpeed leaves to a mask of the user; the vector is cut at whole bytes
    instead of padded; residuals are saved in checkpoints.

    In the first `warmup_steps` steps ranks average whole gradients by the run's collective, as with Adam, but without
    bias correction. Then the second moment stays as it is. Each rank adds its own gradient to the momentum, and ranks
    average the momentum in two stages: each sends the signs of a part to the rank that owns it, and owners send the
    signs of the mean to all. Both stages have a scale per layer, and error feedback.

    Bytes: in the warm-up, those of 4 m for m elements. Then, to each of n-1 ranks, the bundle of the receiver's part
    and later that of the sender's own part, with 28 + ceil(m' / 8) for each layer (or share of one) of m' elements
    there: 2 (n-1)/n m/8 and headers, 32 times less than a dense ring. For a share w of warm-up steps a whole run sends
    1 / (w + (1 - w) / 32) times less, which is 5.5 times for 15 %.
    """

    warmup_steps: Annotated[Count, Doc("first steps, with whole gradients; 15 to 25 % of a run are usual")] = 100

    @override
    def warnings(self) -> list[str]:
        return [
            f"onebit_adam sends whole gradients in its first {self.warmup_steps} steps (warmup_steps); 15 to 25 % of "
            "a run's steps are usual, which limits the compression of the whole run to 4 to 6 times"
        ]

    @override
    def build_flat(
        self, parameters: Iterable[nn.Parameter], lr: float, channel: CompressedCommunicator | None
    ) -> FlatOptimizer:
        return OneBitMomentum(parameters, lr, channel, self)


@dataclasses.dataclass(kw_only=True)
class ZeroOneAdam(OneBitOptions, name="zero_one_adam"):
    """0/1 Adam: one bit per element from the start, a second moment that is updated ever less often, then local steps.

    Source: Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam" (arXiv:2202.06009),
    and DeepSpeed (runtime/fp16/onebit/zoadam.py), whose names the options have.
    Differs: as `onebit_adam`; and a rank that adopts a mean returns to the parameters of the last exchange, instead of
    subtracting its own steps, so that all ranks have the same bits.

    Until step `var_freeze_step`, ranks average gradients: whole ones at every `interval`-th step, which then update the
    second moment, with one bit per element at all other steps. The interval starts at 1 and doubles after every
    `var_update_scaler` updates.

    After that the second moment stays as it is, and every rank makes steps of its own. At every `interval`-th step,
    ranks average their steps since the last exchange with one bit per element, and derive the momentum from the mean.
    This interval starts at 1 and doubles after every `local_step_scaler` steps, up to `local_step_clipper`. In between,
    evaluations use the parameters of the last exchange.

    Bytes: per step those of `onebit_adam`, with whole gradients or with one bit per element; 0 for steps without
    exchange.
    """

    steps_alone: ClassVar[bool] = True

    var_freeze_step: Annotated[Count, Doc("last step that may update the second moment")] = 1000
    var_update_scaler: Annotated[Count, Doc("updates of the second moment until their interval doubles")] = 16
    local_step_scaler: Annotated[Count, Doc("steps after var_freeze_step until the exchanges' interval doubles")] = (
        32678
    )
    local_step_clipper: Annotated[Count, Doc("longest interval between exchanges, in steps")] = 16

    @override
    def build_flat(
        self, parameters: Iterable[nn.Parameter], lr: float, channel: CompressedCommunicator | None
    ) -> FlatOptimizer:
        return ZeroOneSteps(parameters, lr, channel, self)

    def updates_moment(self, step: int) -> bool:
        """Return True if a step up to `var_freeze_step`, counted from 1, updates the second moment."""
        last, interval = 0, 1
        while (
            end := (last // interval + self.var_update_scaler) * interval
        ) < step:  # the last update at this interval
            last, interval = end, 2 * interval
        return step % interval == 0

    def exchanges_steps(self, step: int) -> bool:
        """Return True if ranks average their steps after a step beyond `var_freeze_step`, counted from 1."""
        times_doubled = (step - self.var_freeze_step - 1) // self.local_step_scaler
        return step % min(self.local_step_clipper, 1 << min(times_doubled, 62)) == 0
