"""What a compressor is: options, facts that follow from them, and gradient -> payload. Nothing that changes.

What a rank keeps from step to step belongs to the `Reducer` that runs the compressor (`compressors/ddp/reducer.py`).
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from typing_extensions import Doc, override

from collectives.base import Collective
from collectives.options import CountOrZero, Options
from collectives.payloads.base import HEADER_BYTES, Payload
from collectives.payloads.bundle import Bundle
from collectives.payloads.dense import Dense
from collectives.transport.base import Transport
from compressors.layer import Kind, Layer, Step, end_to_end

FP32_BYTES = 4

Granularity = Literal["layer", "bucket"]
Given = Sequence[tuple[Layer, torch.Tensor]]
"""layers, each with what is to be sent of it, fp32 [layer.numel]"""
Average = Callable[[torch.Tensor], torch.Tensor]
"""fp32 [n] of this rank -> its mean over ranks, fp32 [n]; every rank must call"""


class NonFiniteSum(ArithmeticError):
    """Gradient plus residual is not finite somewhere."""


@dataclasses.dataclass(kw_only=True)
class Compressor(Options, abc.ABC):
    """One file, one class, named after the file; dataclass fields are its options.

    Class facts:
        sends: the kind of payload that `encode` makes at full compression, where it is one for all layers and options.
        biased: the decoded payload's expectation is not the gradient, under default options.
        granularity: "layer" encodes each layer by itself, "bucket" the layers of a bucket laid end to end in model
            order.
        several_rounds: ranks exchange several messages per bucket; `reduce` takes the place of `encode`.
        engine_hook: the method is PyTorch's own communication hook; see `compressors/torch_hooks.py`.
        notices_nonfinite: `encode_sum` raises `NonFiniteSum` where gradient plus residual is not finite, so that nobody
            has to look before.
        chooses: encodes nothing itself, but finds out while training which others do; see `compressors/ddp/choosing/`.
    """

    sends: ClassVar[type[Payload]] = Dense
    biased: ClassVar[bool] = True
    granularity: ClassVar[Granularity] = "layer"
    several_rounds: ClassVar[bool] = False
    engine_hook: ClassVar[bool] = False
    notices_nonfinite: ClassVar[bool] = False
    chooses: ClassVar[bool] = False

    @property
    def keeps_residual(self) -> bool:
        """Whether what was not sent is added to the next gradient."""
        return False

    @property
    def owns_momentum(self) -> bool:
        """Whether momentum is applied here, before selection; the optimizer's own must then be off."""
        return False

    @property
    def one_bucket(self) -> bool:
        """Whether the method wants the whole model as one bucket, which gives up overlap with backward."""
        return False

    @property
    def denser_epochs(self) -> int:
        """First epochs of a run of epochs in which more is sent than later."""
        return 0

    @property
    def default_collectives(self) -> tuple[str, ...]:
        """What sums where nobody chooses: the first of these that takes what the compressor emits."""
        return ("native", "allgather")

    @property
    def default_lr_scaling(self) -> str:
        """How the learning rate follows the number of ranks where nobody chooses: "none" or "linear" (times ranks)."""
        return "none"

    @property
    def needs_all_ranks(self) -> bool:
        """Whether ranks wait for each other while they encode (a shared scale, several rounds)."""
        return self.several_rounds

    @property
    def kinds(self) -> frozenset[type[Payload]]:
        """Kinds of payload that `encode` makes at full compression."""
        return frozenset({self.sends})

    @property
    def emits(self) -> frozenset[type[Payload]]:
        """Kinds of payload that are sent under these options (the members of a bundle, not the bundle)."""
        return self.kinds

    def refusal(self, collective: type[Collective] | Collective) -> str | None:
        """Return why this pair is impossible and what would work, one sentence; None where it is possible.

        Args:
            collective: the class, or an instance where its options matter too.
        """
        refuses = collective.refuses if isinstance(collective, type) else collective.refusal
        for kind in sorted(self.emits, key=lambda kind: kind.__name__):
            if reason := refuses(kind):
                return f"{self.component_name} sends {kind.__name__} payloads: {reason}"
        keeps = not isinstance(collective, type) and collective.recodes and collective.keeps_residuals
        if keeps and not (all(kind.elementwise for kind in self.kinds) or self.feedback_stays_bounded):
            return (
                "server:downlink=recode keeps what an answer loses, which grows without end: "
                f"{self.component_name} is no contraction under these options; use downlink=dense or union, "
                "or error_feedback=false"
            )
        return None

    @property
    def feedback_stays_bounded(self) -> bool:
        """Whether what it loses may be kept and added to what it encodes next, as far as is known."""
        bound = self.contraction_bound(Layer(id=0, name="any", shape=(256, 256), kind="linear", numel=256 * 256))
        return bound is None or bound <= 1  # at 1, a threshold's, what waits is sent once it has grown

    def layers_refusal(self, layers: Sequence[Layer]) -> str | None:
        """Return why these options cannot serve a model of these layers, one sentence; None where they can."""
        return None

    def kind_for(self, layer: Layer) -> type[Payload]:
        """Return the kind of payload that `encode` makes for this layer at full compression."""
        return self.sends

    def leaves_dense(self, layer: Layer) -> bool:
        """Whether the per-layer policy sends this layer as it is, in fp32."""
        return False

    def is_dense_at(self, step_index: int) -> bool:
        """Whether the policy sends every layer as it is at this step."""
        return False

    def density_for(self, layer: Layer, step: Step) -> float | None:
        """Return the share of a compressed layer's entries that `encode` means to send, in (0, 1]; None without such.

        Args:
            layer: as in `encode`.
            step: where training is.
        """
        return None

    def clip_limit(self, step: Step) -> float | None:
        """Return the L2 norm to which a compressed layer's own gradient is clipped; None: it is not."""
        return None

    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        """Return the payload to send for `x`; what the method keeps for the next step is proposed to `step.memory`.

        Args:
            x: fp32 [layer.numel], finite; must not be changed, and the payload must not share its memory.
            layer: what `x` belongs to; for granularity "bucket" a flat stand-in for several layers.
            step: where training is.

        Raises:
            TypeError: "powersgd takes several rounds between the ranks; call reduce".
        """
        if (payload := self.encode_parts([x], layer, step)) is not None:
            return payload
        raise TypeError(f"{self.component_name} takes several rounds between the ranks; call reduce")

    def encode_parts(self, gradients: Sequence[torch.Tensor], layer: Layer, step: Step) -> Payload | None:
        """Do what `encode` does without laying the gradients end to end first: a method has one of the two.

        Args:
            gradients: fp32 and contiguous; laid end to end they are the `x` of `encode`.
            layer: as in `encode`.
            step: where training is.
        """
        return None

    def encode_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, layer: Layer, step: Step
    ) -> Payload | None:
        """Do in one pass what the sum of gradient and residual, `encode` and `subtract_` do in three; None: it cannot.

        Args:
            gradients: fp32 and contiguous; laid end to end they are [layer.numel].
            residual: fp32 [layer.numel].
            left: fp32 [layer.numel], overwritten with what is not sent; shares no memory with the others.
            layer: as in `encode`.
            step: where training is.

        Raises:
            NonFiniteSum: a method that `notices_nonfinite` found one.
        """
        return None

    def reduce(
        self,
        compressed: Given,
        rest: Sequence[torch.Tensor],
        step: Step,
        average: Average,
        updates: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Write the updates of compressed layers: for methods of several rounds; every rank must call.

        Args:
            compressed: the layers that the policy does not leave dense.
            rest: what the policy sends as it is, fp32 and 1-D.
            step: where training is.
            average: sends a tensor in one message.
            updates: of the compressed layers, floating, 1-D and contiguous; overwritten.

        Returns:
            The updates of `rest`, fp32.
        """
        raise TypeError(f"{self.component_name} takes one round; call encode")

    def num_exchanged(self, layer: Layer, step: Step) -> int:
        """Return how many fp32 numbers `reduce` sends for a compressed layer at this step, over all rounds."""
        raise TypeError(f"{self.component_name} takes one round; ask its payload")

    def agree(self, given: Given, step: Step, transport: Transport) -> None:
        """Agree with the other ranks on what `encode` needs from all of them; every rank must call.

        Args:
            given: what `encode` will get.
            step: where training is; its memory takes what was agreed on.
            transport: to the other ranks.
        """

    def subtract_(self, x: torch.Tensor, payload: Payload, layer: Layer, step: Step) -> None:
        """Take what this rank's payload stands for off `x`, fp32 [layer.numel], in place."""
        payload.subtract_from_(x)

    def finish(self, total: Payload, layer: Layer, step: Step, out: torch.Tensor) -> None:
        """Turn the sum over ranks into the update: the mean.

        Args:
            total: the sum, the same bits on every rank.
            layer: as in `encode`.
            step: where training is.
            out: floating [layer.numel], overwritten; shares no memory with `total`.
        """
        out.zero_()
        total.add_to_(out, divisor=step.world_size)

    @abc.abstractmethod
    def expected_nbytes(self, layer: Layer) -> int | None:
        """Packed bytes of `encode`'s payload at full compression, a closed form; None where it depends on the data."""

    def expected_bucket_nbytes(self, layers: Sequence[Layer]) -> int | None:
        """Packed bytes of a bucket's message at full compression; None where they depend on the data."""
        dense = sum(layer.numel for layer in layers if self.leaves_dense(layer))
        units = [layer for layer in layers if layer.numel and not self.leaves_dense(layer)]
        if self.granularity == "bucket" and units:
            units = [end_to_end(units)]
        lengths = []
        for unit in units:
            nbytes = self.expected_nbytes(unit)
            if nbytes is None:
                return None
            lengths.append(nbytes)
        lengths += [HEADER_BYTES + FP32_BYTES * dense] * bool(dense)
        return lengths[0] if len(lengths) == 1 else Bundle.packed_nbytes(lengths) if lengths else 0

    def contraction_bound(self, layer: Layer) -> float | None:
        """Return the proved c in |x - C(x)|^2 <= c |x|^2 at full compression; None where there is none.

        It holds for every `x` whose values stay within the normal range of the type they travel in; in expectation for
        methods that draw at random. Below 1 it is a contraction, without which error feedback may diverge; at 1 nothing
        of an `x` may arrive.

        Args:
            layer: as in `encode`.
        """
        return None

    def warnings(self) -> list[str]:
        """What a user should know before a run with these options, one sentence each."""
        return []


@dataclasses.dataclass(kw_only=True)
class LossyCompressor(Compressor):
    """A compressor that may keep what it did not send, and leave chosen layers alone."""

    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = False
    min_numel: Annotated[CountOrZero, Doc("layers of at most this many elements are sent in fp32")] = 0
    skip: Annotated[
        tuple[Kind, ...], Doc("kinds of layers sent in fp32, joined by +: conv, linear, norm, bias, other")
    ] = ()
    dense_ends: Annotated[bool, Doc("send the first and the last layer of the model in fp32")] = False

    @property
    @override
    def keeps_residual(self) -> bool:
        return self.error_feedback

    def min_numel_for(self, layer: Layer) -> int:
        """Return the size up to which this layer is sent in fp32."""
        return self.min_numel

    @override
    def leaves_dense(self, layer: Layer) -> bool:
        return (
            layer.numel <= self.min_numel_for(layer)
            or layer.kind in self.skip
            or (self.dense_ends and layer.position in (0.0, 1.0))
        )

    @property
    @override
    def emits(self) -> frozenset[type[Payload]]:
        leaves_some = bool(self.min_numel or self.skip or self.dense_ends)
        return super().emits | ({Dense} if leaves_some else set())
