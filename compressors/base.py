"""The contract of a compressor, which turns gradients into payloads and holds nothing but its options.

`PerLayer` encodes, `MultiRound` exchanges several messages per bucket, and `TorchHook` is one of PyTorch's own
communication hooks; `OwnHook` in `compressors/ddp/hook.py` brings a hook of this project. What a rank keeps from step
to step belongs to the `Reducer` that runs the compressor (`compressors/ddp/reducer.py`).
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from typing_extensions import Doc, override

from collectives.base import Collective
from collectives.options import CountOrZero, Incompatible, Options
from collectives.payloads.base import HEADER_BYTES, Payload
from collectives.payloads.bundle import Bundle
from collectives.payloads.dense import Dense
from collectives.transport.base import Transport
from compressors.layer import Layer, LayerKind, Step, end_to_end

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FP32_BYTES = 4

Granularity = Literal["layer", "bucket"]
# Layers, each with the tensor to send for it, fp32 [layer.numel].
Given = Sequence[tuple[Layer, torch.Tensor]]
# Maps fp32 [n] of this rank to its mean over all ranks, fp32 [n]; every rank must call it.
Average = Callable[[torch.Tensor], torch.Tensor]
DDPHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


class NonFiniteSum(ArithmeticError):
    """The sum of gradient and residual holds a NaN or an infinity."""


@dataclasses.dataclass(kw_only=True)
class Compressor(Options, abc.ABC):
    """Base class of all compressors. Subclass `PerLayer`, `MultiRound` or `TorchHook` instead of this class.

    The dataclass fields of a subclass are its options. It is registered under its class argument `name`, or under its
    file's name where the two agree (`TopK` in `topk.py`).

    Attributes:
        sends: type of the payloads at full compression, if it is the same for all layers and options.
        biased: under default options, the expectation of the decoded payload differs from the gradient.
        granularity: "layer" treats each layer by itself; "bucket" treats the concatenated layers of a bucket, in model
            order.
    """

    sends: ClassVar[type[Payload]] = Dense
    biased: ClassVar[bool] = True
    granularity: ClassVar[Granularity] = "layer"

    @property
    def keeps_residual(self) -> bool:
        """Return True if the part that was not sent is added to the next gradient."""
        return False

    @property
    def owns_momentum(self) -> bool:
        """Return True if momentum is applied before selection; the optimizer's own momentum must then be off."""
        return False

    @property
    def one_bucket(self) -> bool:
        """Return True if the whole model must be one bucket, which prevents overlap with backward."""
        return False

    @property
    def needs_all_ranks(self) -> bool:
        """Return True if ranks wait for each other before they can encode."""
        return False

    @property
    def denser_epochs(self) -> int:
        """Return the number of epochs at the start of a run in which more is sent than later."""
        return 0

    @property
    def default_collectives(self) -> tuple[str, ...]:
        """Return the collectives to try if the user gives none; the first one that takes the payloads is used."""
        return ("native", "allgather")

    @property
    def default_lr_scaling(self) -> str:
        """Return the default learning-rate scaling: "none", or "linear" to multiply by the number of ranks."""
        return "none"

    @property
    def emits(self) -> frozenset[type[Payload]]:
        """Return all payload types sent under these options (the members of a bundle, not the bundle)."""
        return frozenset({self.sends})

    def check_compatible(self, collective: Collective) -> None:
        """Check that the collective can sum what this compressor sends.

        Raises:
            Incompatible: it cannot; the message names what would work.
        """
        for kind in sorted(self.emits, key=lambda kind: kind.__name__):
            try:
                collective.check_compatible(kind)
            except Incompatible as error:
                raise Incompatible(f"{self.component_name} sends {kind.__name__} payloads: {error}") from None
        keeps = collective.recodes and collective.keeps_residuals
        if keeps and not (all(kind.elementwise for kind in self.emits) or self.feedback_stays_bounded):
            raise Incompatible(
                "server:downlink=recode keeps the error of its answers, which would grow without limit: "
                f"{self.component_name} is no contraction under these options; use downlink=dense or union, "
                "or error_feedback=false"
            )

    def check_layers(self, layers: Sequence[Layer]) -> None:
        """Check that these options work for a model of these layers.

        Raises:
            Incompatible: they do not; the message says what to change.
        """

    def leaves_dense(self, layer: Layer) -> bool:
        """Return True if the per-layer policy sends this layer uncompressed, in fp32."""
        return False

    def is_dense_at(self, step_index: int) -> bool:
        """Return True if all layers are sent uncompressed at this step."""
        return False

    @abc.abstractmethod
    def expected_nbytes(self, layer: Layer) -> int | None:
        """Return the bytes sent for a compressed layer at full compression, or None if they depend on the data."""

    def expected_bucket_nbytes(self, layers: Sequence[Layer]) -> int | None:
        """Return the bytes sent for a bucket at full compression, or None if they depend on the data."""
        return None

    def contraction_bound(self, layer: Layer) -> float | None:
        """Return a proved c with |x - C(x)|^2 <= c |x|^2 at full compression, or None if there is none.

        It holds for every `x` within the normal range of the value type on the wire; for random methods it holds in
        expectation. With c < 1 the compressor is a contraction; otherwise error feedback may diverge. With c = 1 there
        may be an `x` of which nothing is sent.
        """
        return None

    @property
    def feedback_stays_bounded(self) -> bool:
        """Return False if error feedback is known to diverge with this compressor."""
        bound = self.contraction_bound(Layer(id=0, name="any", shape=(256, 256), kind="linear", numel=256 * 256))
        return bound is None or bound <= 1  # a threshold has bound 1: its residual is sent once it has grown

    def warnings(self) -> list[str]:
        """Return what a user should know before a run with these options, one sentence each."""
        return []


@dataclasses.dataclass(kw_only=True)
class PerLayer(Compressor):
    """Encode each layer, or the concatenated layers of a bucket, into one payload.

    A subclass defines `sends`, `encode` and `expected_nbytes`. The other methods have defaults.

    Attributes:
        notices_nonfinite: `encode_sum` raises `NonFiniteSum`, so the caller need not check its input.
        averages: the update is the mean over ranks; set to False in a subclass that defines `finish`.
    """

    notices_nonfinite: ClassVar[bool] = False
    averages: ClassVar[bool] = True
    _parts_behind_encode: ClassVar[Callable[..., Payload | None] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Drop the faster forms of a base class's `encode` if a subclass encodes in its own way."""
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "encode" in own and "encode_parts" not in own and cls.encode_parts is not PerLayer.encode_parts:
            cls._parts_behind_encode = cls.encode_parts  # `super().encode` may need it
            cls.encode_parts = PerLayer.encode_parts  # type: ignore[method-assign]
        if "encode" in own and "encode_sum" not in own:
            cls.encode_sum, cls.notices_nonfinite = PerLayer.encode_sum, False  # type: ignore[method-assign]
        if "finish" in own:
            cls.averages = False

    def kind_for(self, layer: Layer) -> type[Payload]:
        """Return the type of `encode`'s payload for this layer at full compression."""
        return self.sends

    def density_for(self, layer: Layer, step: Step) -> float | None:
        """Return the share of a compressed layer's entries that `encode` aims to send, in (0, 1].

        None if the method has no such share.
        """
        return None

    def clip_limit(self, step: Step) -> float | None:
        """Return the L2 norm to which a compressed layer's gradient is clipped before the residual is added.

        None if it is not clipped.
        """
        return None

    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        """Return the payload for `x`, and propose to `step.memory` what the method needs at the next step.

        The default calls `encode_parts`; a subclass defines one of the two.

        Args:
            x: fp32 [layer.numel], finite. It must not be changed, and the payload must not share its memory.
            layer: the layer of `x`; for granularity "bucket", one flat layer that stands for several.
            step: the current step.
        """
        encode_parts = self._parts_behind_encode or self.encode_parts
        payload = encode_parts([x], layer, step)
        if payload is None:
            raise TypeError(f"{self.component_name} defines neither encode nor encode_parts")
        return payload

    def encode_parts(self, gradients: Sequence[torch.Tensor], layer: Layer, step: Step) -> Payload | None:
        """Encode several gradients without concatenating them first; None if there is no such form.

        Args:
            gradients: fp32, contiguous; concatenated they are the `x` of `encode`.
            layer: as in `encode`.
            step: the current step.
        """
        return None

    def encode_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, layer: Layer, step: Step
    ) -> Payload | None:
        """Add gradient and residual, encode the sum and subtract the payload, in one pass over memory.

        Args:
            gradients: fp32, contiguous; concatenated they are [layer.numel].
            residual: fp32 [layer.numel].
            left: fp32 [layer.numel], overwritten with the part that is not sent; shares no memory with the others.
            layer: as in `encode`.
            step: the current step.

        Returns:
            The payload, or None if there is no such pass; the caller then takes the three steps one by one.

        Raises:
            NonFiniteSum: the sum is not finite (only methods with `notices_nonfinite`).
        """
        return None

    def agree(self, given: Given, step: Step, transport: Transport) -> None:
        """Agree with the other ranks on values that `encode` needs, such as shared scales; every rank must call.

        Args:
            given: the layers and tensors that `encode` will get.
            step: the current step; the agreed values are written to its memory.
            transport: connection to the other ranks.
        """

    def subtract_(self, x: torch.Tensor, payload: Payload, layer: Layer, step: Step) -> None:
        """Subtract this rank's decoded payload from `x`, fp32 [layer.numel], in place."""
        payload.subtract_from_(x)

    def finish(self, total: Payload, layer: Layer, step: Step, out: torch.Tensor) -> None:
        """Turn the sum over ranks into the update; by default the mean.

        Args:
            total: the sum, bit-identical on all ranks.
            layer: as in `encode`.
            step: the current step.
            out: floating [layer.numel], overwritten; shares no memory with `total`.
        """
        out.zero_()
        total.add_to_(out, divisor=step.world_size)

    @override
    def expected_bucket_nbytes(self, layers: Sequence[Layer]) -> int | None:
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


@dataclasses.dataclass(kw_only=True)
class MultiRound(Compressor):
    """Exchange several messages per bucket, each of them the mean of one tensor over ranks."""

    @property
    @override
    def needs_all_ranks(self) -> bool:
        return True

    @abc.abstractmethod
    def reduce(
        self,
        compressed: Given,
        rest: Sequence[torch.Tensor],
        step: Step,
        average: Average,
        updates: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Exchange a bucket and write its updates; every rank must call.

        Args:
            compressed: the layers to compress.
            rest: gradients that are sent uncompressed, fp32, 1-D.
            step: the current step.
            average: averages a tensor over all ranks, in one message.
            updates: the updates of the compressed layers, floating, 1-D, contiguous; overwritten.

        Returns:
            The updates of `rest`, fp32.
        """

    @abc.abstractmethod
    def num_exchanged(self, layer: Layer, step: Step) -> int:
        """Return the number of fp32 values that `reduce` sends for a compressed layer, summed over all rounds."""


@dataclasses.dataclass(kw_only=True)
class TorchHook(Compressor):
    """Register one of PyTorch's own communication hooks.

    Bytes are computed from a formula, because the backend does not report what it sends.
    """

    @override
    def check_compatible(self, collective: Collective) -> None:
        if collective.component_name != "native":
            raise Incompatible(
                f"{self.component_name} is PyTorch's own communication hook and talks to the backend itself; "
                "use collective native"
            )

    @override
    def expected_bucket_nbytes(self, layers: Sequence[Layer]) -> int | None:
        """Return the sum over layers: tensors that the backend all-reduces have no headers."""
        return sum(self.expected_nbytes(layer) or 0 for layer in layers)

    @abc.abstractmethod
    def hook(self, process_group: ProcessGroup) -> tuple[object, DDPHook]:
        """Return state and hook for `DistributedDataParallel.register_comm_hook`; every rank must call."""

    def num_entries(self, layer: Layer) -> int:
        """Return how many numbers are sent for a layer at full compression."""
        return layer.numel

    def forget(self, state: Any) -> None:
        """Clear the tensors in the hook's state that a gradient with NaN or infinity may have spoiled."""

    def state_of(self, state: Any) -> dict[str, Any]:
        """Return the part of the hook's state to save in a checkpoint; empty for hooks without state."""
        return {}

    def restore(self, state: Any, saved: dict[str, Any]) -> None:
        """Load what `state_of` returned into the hook's state."""


@dataclasses.dataclass(kw_only=True)
class LayerPolicy(Compressor):
    """The options of a compressor with error feedback that can send chosen layers uncompressed."""

    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = False
    min_numel: Annotated[CountOrZero, Doc("layers of at most this many elements are sent in fp32")] = 0
    skip: Annotated[
        tuple[LayerKind, ...], Doc("kinds of layers sent in fp32, joined by +: conv, linear, norm, bias, other")
    ] = ()
    dense_ends: Annotated[bool, Doc("send the first and the last layer of the model in fp32")] = False

    @property
    @override
    def keeps_residual(self) -> bool:
        return self.error_feedback

    def min_numel_for(self, layer: Layer) -> int:
        """Return the number of elements up to which this layer is sent in fp32."""
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


@dataclasses.dataclass(kw_only=True)
class LossyCompressor(LayerPolicy, PerLayer):
    """The usual base class: encode per layer, with the options of `LayerPolicy`."""
