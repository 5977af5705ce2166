"""1-bit Adam: after a warm-up ranks exchange one bit per element. Also contains the code shared with 0/1 Adam."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from annotated_types import Ge, Lt
from typing_extensions import Doc, override

from collectives.base import Collective
from collectives.direct import Direct, owner_rounds
from collectives.options import Count, Options, Positive, PositiveOrZero
from collectives.payloads import Codes, Payload, UnreducedSum
from collectives.recoding import RecodingSum, by_stretch
from collectives.refusals import Refusal
from collectives.schedule.execution import PackedPieces, together
from collectives.schedule.rounds import LayerStretch, Layout, Leaf, leaves, stretches_between
from collectives.transport.base import Transport
from compressors.base import Compressor
from compressors.kernels.quantisation import signs_and_magnitude
from compressors.kernels.selection import sum_of_squares
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.optim.base import FlatOptimizer, Trained, add_flat_, compressor_refusal, dense_refusal, flat_of

Scale = Literal["l1", "l2"]
# (divisor of a step; True for frozen elements, which only weight decay moves, or None if no element is frozen)
Root = tuple[torch.Tensor, torch.Tensor | None]
# Replaces a vector over all parameters with its mean over ranks, in place, uncompressed.
Mean = Callable[[torch.Tensor], None]
# Like `Mean`, but sends one bit per element; frozen elements, where the mask (second argument) is True, count as zero.
BitsMean = Callable[[torch.Tensor, torch.Tensor | None], None]


class OneBitMean(RecodingSum):
    """Averages vectors over ranks in two stages with one bit per element.

    Source: DeepSpeed (runtime/comm/nccl.py).

    Every rank owns a part of the vector, as in `direct`. First, ranks send each part to its owner, as signs with one
    scale per layer. Then owners send the means of their parts to all ranks, in the same form; the rounding error of
    this stage is added to the next mean. The caller must keep the rounding error of the first stage.

    Args:
        transport: connects the ranks.
        numels: number of elements of each layer.
        scale: "l1" for the mean magnitude of a layer's elements, "l2" for the root of their mean square.
    """

    def __init__(self, transport: Transport, numels: Sequence[int], scale: Scale) -> None:
        super().__init__(Direct(), transport)
        self._scale = scale
        key, rank, world_size = tuple(range(len(numels))), transport.rank, transport.world_size
        self._layers = [LayerStretch(layer, 0, numel) for layer, numel in enumerate(numels)]
        self._layout = Layout(tuple(Leaf(numel, alignment=8, addable=False) for numel in numels), key)
        cuts = self._layout.cuts(world_size)
        self._places = [(start, stop, number) for number, (start, stop) in enumerate(cuts)]
        borders = [0, *itertools.accumulate(numels)]
        self._own = stretches_between(key, borders, *cuts[rank]) or [LayerStretch(0, 0, 0)]
        self._to_owners, self._from_owners = owner_rounds(world_size, rank, [dict(enumerate(self._places))])

    def message(self, values: torch.Tensor, frozen: torch.Tensor | None) -> Payload:
        """Return the signs of all layers, and replace `values`, fp32 [elements of all layers], with rounding errors.

        Elements where `frozen`, bool of the same shape, is True become zero.
        """
        return self._encoded(values, self._layers, frozen)

    def write_mean(self, message: Payload, frozen: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the mean of all ranks' messages to `out`; every rank must call this method.

        Each part of the mean is written as encoded by the rank that owns (averages) this part.

        Args:
            message: what `message` returned.
            frozen: as in `message`; equal on all ranks.
            out: fp32 [elements of all layers].

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        pieces, own = PackedPieces(self.transport, message, self._layout), self._places[self.transport.rank]
        pieces.run([self._to_owners])
        mean = out.new_zeros(own[1] - own[0])
        self.add_residuals_to_(mean, self._own)
        UnreducedSum(pieces.terms(own)).add_to_(mean, divisor=self.transport.world_size)
        pieces.held[own] = self._encoded(mean, self._own, None if frozen is None else frozen[slice(*own[:2])])
        self.propose(by_stretch(mean, self._own))
        self.commit()
        pieces.run([self._from_owners])
        out.zero_()
        for place in self._places:
            pieces[place].add_to_(out[slice(*place[:2])])
        if frozen is not None:
            out.masked_fill_(frozen, 0)

    def _encoded(self, total: torch.Tensor, stretches: Sequence[LayerStretch], frozen: torch.Tensor | None) -> Payload:
        """Return the signs of `total` with a scale for each stretch, and subtract the encoded values from `total`.

        Frozen elements are zero in the result and in `total`, and do not count in a scale.
        """
        parts = by_stretch(total, stretches).values()
        counts = [part.numel() for part in parts]
        if frozen is not None:
            total.masked_fill_(frozen, 0)
            counts = [part.numel() - int(part.sum()) for part in frozen.split(counts)]
        payloads = []
        for part, count in zip(parts, counts, strict=True):
            packed = Codes.room_for_codes(part.numel(), 1, part.device)
            scale = signs_and_magnitude(part, packed) / max(1, count)
            if self._scale == "l2":
                scale = math.sqrt(sum_of_squares(part) / max(1, count))
            scales = torch.tensor([scale], dtype=torch.float32, device=part.device)[: part.numel()]
            payloads.append(Codes(part.numel(), "sign", 1, packed, scales))
            payloads[-1].subtract_from_(part)
        if frozen is not None:
            total.masked_fill_(frozen, 0)
        return together(payloads)


def root_of(V: torch.Tensor, eps: float) -> Root:
    """Return (sqrt(V) + eps, but infinity where V is zero; a mask of these elements, or None if there are none).

    Without infinity, the signs that ranks send would move an element whose second moment is zero by lr / eps.

    Args:
        V: the second moment, fp32 [elements of all parameters].
        eps: added to the root.
    """
    divisor, frozen = V.sqrt().add_(eps), V == 0
    return (divisor.masked_fill_(frozen, math.inf), frozen) if bool(frozen.any()) else (divisor, None)


def observe_(G: torch.Tensor, M: torch.Tensor, V: torch.Tensor, beta1: float, beta2: float) -> None:
    """Update both moments, M and V, with the mean gradient G, without bias correction; all fp32, of one shape."""
    M.lerp_(G, 1 - beta1)
    V.mul_(beta2).addcmul_(G, G, value=1 - beta2)


def direction_of(X: Sequence[torch.Tensor], M: torch.Tensor, root: Root, weight_decay: float) -> torch.Tensor:
    """Return M / root + weight_decay X, fp32 [elements of all parameters X]."""
    direction = M / root[0]
    return direction.add_(flat_of(X), alpha=weight_decay) if weight_decay else direction


@torch.no_grad()
def onebit_adam_update(
    X: Sequence[torch.Tensor],
    G: torch.Tensor,
    M: torch.Tensor,
    V: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    mean_: Mean,
    bits_mean_: BitsMean,
    root: Root | None,
) -> Root:
    """Update all parameters once: in the warm-up by Adam; later with M = mean of beta1 M + (1 - beta1) G, sent in bits.

    Args:
        X: the parameters, of any shape, updated in place.
        G: this rank's gradients, laid end to end, fp32 [elements of all parameters]; overwritten.
        M: mean of gradients, fp32 of the same shape, equal on all ranks, updated in place.
        V: mean of squared gradients, fp32 of the same shape, equal on all ranks, updated in place in the warm-up.
        lr: the learning rate.
        beta1: decay rate of M.
        beta2: decay rate of V.
        eps: added to the root of V.
        weight_decay: share of X removed per step, times lr.
        mean_: averages a vector over ranks, uncompressed.
        bits_mean_: averages a vector over ranks, with one bit per element and error feedback.
        root: None in the warm-up; later `root_of(V)`.

    Returns:
        `root_of(V)`, for the next step.
    """
    if root is None:
        mean_(G)
        observe_(G, M, V, beta1, beta2)
        root = root_of(V, eps)
    else:
        M.lerp_(G, 1 - beta1)
        bits_mean_(M, root[1])
    add_flat_(X, direction_of(X, M, root, weight_decay), -lr)
    return root


@dataclasses.dataclass(kw_only=True)
class OneBitOptions(Options):
    """The options that 1-bit Adam and 0/1 Adam share."""

    default_lr: ClassVar[float] = 0.001
    default_collectives: ClassVar[tuple[str, ...]] = ("ring",)  # because its bytes are counted, unlike native's

    beta1: Annotated[float, Ge(0), Lt(1), Doc("decay rate of the mean of gradients")] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), Doc("decay rate of the mean of squared gradients")] = 0.999
    eps: Annotated[Positive, Doc("added to the root of the second moment before dividing by it")] = 1e-8
    weight_decay: Annotated[PositiveOrZero, Doc("share of the weight removed per step, times lr")] = 0.0
    scale: Annotated[
        Scale, Doc("magnitude of a layer's signs: mean magnitude (l1), or root mean square as published (l2)")
    ] = "l1"

    def refusals(self, compressor: Compressor, collective: Collective) -> list[Refusal]:
        """Return the reasons why components do not work with these options, as refusals."""
        return [
            compressor_refusal(self.component_name, compressor),
            dense_refusal(f"{self.component_name} averages whole gradients at first", collective),
        ]


@dataclasses.dataclass(kw_only=True)
class OneBitAdamOptions(OneBitOptions, name="onebit_adam"):
    """1-bit Adam: Adam at first, then ranks average their momentum with one bit per element.

    Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed"
    (arXiv:2102.02888), and DeepSpeed (runtime/fp16/onebit/adam.py).
    Differs: scale=l1 by default, because the published l2 is not a contraction for heavy-tailed momentum; elements
    whose second moment is zero are frozen, while DeepSpeed expects a mask from the user; the vector is cut at whole
    bytes instead of padded; residuals are saved in checkpoints.

    In the first `warmup_steps` steps ranks average whole gradients by the run's collective, as with Adam, but without
    bias correction. After that the second moment does not change. Each rank adds its own gradient to the momentum, and
    ranks average the momentum in two stages: each rank sends the signs of every part to the rank that owns this part,
    and owners send the signs of the mean to all ranks. Both stages use one scale per layer, and error feedback.

    Bytes: in the warm-up, as for messages of 4 m bytes, for m elements. After that, a rank sends two messages to each
    of the n-1 other ranks: first the signs of the receiver's part, then the signs of the mean of its own part. A
    message has 28 + ceil(m' / 8) bytes for each layer, or piece of a layer, of m' elements. In all that is 2 (n-1)/n
    m/8 bytes and headers, 32 times less than a dense ring. If w is the share of warm-up steps, a whole run sends
    1 / (w + (1 - w) / 32) times less: 5.5 times for w = 15 %.
    """

    warmup_steps: Annotated[Count, Doc("number of first steps, with whole gradients; usual: 15 to 25 % of a run")] = 100


class OneBitOptimizer(FlatOptimizer):
    """Base of 1-bit Adam and 0/1 Adam: Adam's moments, means of whole gradients, and `OneBitMean`.

    The state is the state of `OneBitMean` and the vectors in `memory`, fp32 [elements of all parameters]: the moments
    "mean" and "square", and "residual", which is what was not sent. "residual" and the state of `OneBitMean` differ
    between ranks.

    Args:
        model, group, timeout_s, communicator: as in `FlatOptimizer`.
        lr: the learning rate.
        collective: sums whole gradients; a spec or an instance. Single bits are always sent as `OneBitMean` does.
        options: the options of `options_class`.

    Attributes:
        options_class: the options of 1-bit Adam or 0/1 Adam.
    """

    options_class: ClassVar[type[OneBitOptions]]
    _options: OneBitOptions

    def __init__(
        self,
        model: Trained,
        lr: float = OneBitOptions.default_lr,
        *,
        collective: Collective | str = "ring",
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        communicator: CompressedCommunicator | None = None,
        **options: Any,
    ) -> None:
        chosen = self._options = self.options_class.from_text(options)
        super().__init__(model, lr, chosen.refusals, collective, group, timeout_s, communicator)
        self.counts["step"] = 0
        self.memory |= {"mean": self.zeros(), "square": self.zeros()}
        self.forget_residuals()
        self._root: Root | None = None

    @override
    def go_to(self, step: int) -> None:
        """Continue as if `step` steps had been made, to measure times; a second moment of zero becomes one."""
        self.counts["step"] = step
        if not self.memory["square"].any():
            self.memory["square"].fill_(1)
        self._root = None

    @property
    @override
    def residual_nbytes(self) -> int:
        """Return the bytes of memory for what this rank has not sent in either stage."""
        return self.memory["residual"].nbytes + self._bits.nbytes

    def forget_residuals(self) -> None:
        """Set the residuals of both stages (what was not sent yet) to zero."""
        self.memory["residual"] = self.zeros()
        self._bits = OneBitMean(self.transport, self.numels, self._options.scale)

    def average_bits_(self, x: torch.Tensor, frozen: torch.Tensor | None) -> None:
        """Replace a vector with its mean over ranks, sent with one bit per element; every rank must call this method.

        Args:
            x: fp32 [elements of all layers].
            frozen: bool, of the same shape; True for elements that count as zero, and do not count in a scale; None if
                there are none. The mask must be equal on all ranks.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        with self.communicator.exchanging() as report:
            started = time.perf_counter()
            message = self._bits.message(self.memory["residual"].add_(x), frozen)
            report.encode_s = time.perf_counter() - started
            self._bits.write_mean(message, frozen, x)
            report.encoded = self.encoded(leaves(message), report.encode_s)

    def average_whole_(self, gradient: torch.Tensor) -> None:
        """Replace a vector over all parameters with its mean over ranks, sent in fp32."""
        self.communicator.combine_(gradient.split(self.numels))

    def root(self) -> Root:
        """Return `root_of` the second moment."""
        if self._root is None:
            self._root = root_of(self.memory["square"], self._options.eps)
        return self._root

    def descend_by(self, update: Callable[..., Root], gradient: torch.Tensor, lr: float, *, observes: bool) -> None:
        """Make a step with `update`; the step also updates the second moment if `observes` is True.

        `update` is `onebit_adam_update` or `zero_one_adam_update`.
        """
        options, memory = self._options, self.memory
        self._root = update(
            self.parameters,
            gradient,
            memory["mean"],
            memory["square"],
            lr,
            options.beta1,
            options.beta2,
            options.eps,
            options.weight_decay,
            self.average_whole_,
            self.average_bits_,
            None if observes else self.root(),
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"bits": self._bits.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._bits.load_state_dict(state_dict["bits"])
        self._root = None


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam for all parameters; gradients must not be averaged before.

    Args:
        model: the network, the same on all ranks, or its parameters.
        lr: the learning rate.
        collective: sums whole gradients; a spec or an instance. Single bits are always sent as `OneBitMean` does.
        group: process group of the ranks; None for the default group.
        timeout_s: longest wait for any one message, in seconds.
        communicator: replaces `collective`, `group` and `timeout_s`; the caller closes it.
        options: `OneBitAdamOptions`.

    Raises:
        OptionError: an option is unknown or out of range, or the collective does not work with 1-bit Adam.
    """

    options_class = OneBitAdamOptions
    _options: OneBitAdamOptions

    @override
    def descend(self, gradient: torch.Tensor, lr: float) -> None:
        self.counts["step"] += 1
        self.descend_by(onebit_adam_update, gradient, lr, observes=self.counts["step"] <= self._options.warmup_steps)
