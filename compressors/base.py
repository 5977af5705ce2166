"""The contract of a compressor, which turns gradients into payloads and holds nothing but its options.

`PerLayer` encodes, `MultiRound` exchanges several messages per bucket, and `TorchHook` is one of PyTorch's own
communication hooks; `OwnHook` in `compressors/ddp/hook.py` brings a hook of this project. What a rank keeps from step
to step belongs to the `Reducer` that runs the compressor (`compressors/ddp/reducer.py`).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args

import torch
from typing_extensions import Doc, override

from collectives.base import Collective, without_residuals
from collectives.options import CountOrZero, Incompatible, OptionError, Options
from collectives.payloads import Codes, Dense, Payload
from collectives.payloads.batch import Batch
from collectives.payloads.sparse import IndexedValues
from collectives.transport.base import Transport
from compressors.layer import Layer, LayerKind, Step

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FP32_BYTES = 4

Granularity = Literal["layer", "bucket"]
# Layers, each with the tensor to send for it, fp32 [layer.numel].
Given = Sequence[tuple[Layer, torch.Tensor]]
# Maps a tensor of this rank, fp32 [n], to its mean over all ranks, fp32 [n]; every rank must call the function.
Average = Callable[[torch.Tensor], torch.Tensor]
DDPHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
F = TypeVar("F", bound=Callable[..., object])


class NonFiniteSum(ArithmeticError):
    """The sum of gradient and residual holds a NaN or an infinity."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts about a compressor that follow from its options; the defaults suit most compressors.

    Attributes:
        emits: all payload types that are sent (the members of a bundle, not the bundle).
        keeps_residual: True if the part of a gradient that was not sent is added to the next gradient (error feedback).
        feedback_diverges: True if error feedback is known to diverge, even if `contraction_bound` returns a bound.
        owns_momentum: True if the compressor applies the momentum, before it selects what to send; the optimizer's own
            momentum must then be off.
        clip_norm: a compressed layer's gradient is clipped to this L2 norm / sqrt(world_size) before the residual is
            added; 0 if it is not clipped.
        one_bucket: True if the whole model must be one bucket of DDP, which prevents overlap with backward.
        needs_all_ranks: True if ranks exchange numbers, and so wait for each other, before they can encode.
        dense_steps: number of first optimizer steps in which all layers are sent uncompressed.
        denser_epochs: number of first epochs in which more entries are sent than later.
        period: number of steps after which the work of the steps repeats.
        default_collectives: names of collectives, best first: if the user names none, the first one that can sum the
            payloads is used.
        default_lr_scaling: "none", or "linear" to multiply the learning rate by the number of ranks.
    """

    emits: frozenset[type[Payload]]
    keeps_residual: bool = False
    feedback_diverges: bool = False
    owns_momentum: bool = False
    clip_norm: float = 0.0
    one_bucket: bool = False
    needs_all_ranks: bool = False
    dense_steps: int = 0
    denser_epochs: int = 0
    period: int = 1
    default_collectives: tuple[str, ...] = ("native", "allgather")
    default_lr_scaling: str = "none"


@dataclasses.dataclass(kw_only=True)
class Compressor(Options, abc.ABC):
    """Base class of all compressors. Subclass `PerLayer`, `MultiRound` or `TorchHook` instead of this class.

    The dataclass fields of a subclass are its options. Users select a subclass by its class argument `name`, or by the
    name of its file if it has none (`GroupTopK` in `group_topk.py`).

    Attributes:
        sends: class of the payloads after any warm-up, if it is the same for all layers and options.
        biased: True if, with default options, the expectation of the decoded payload differs from the gradient.
        granularity: "layer" treats each layer by itself; "bucket" treats the concatenated layers of a bucket, in model
            order.
    """

    sends: ClassVar[type[Payload]] = Dense
    biased: ClassVar[bool] = True
    granularity: ClassVar[Granularity] = "layer"

    @functools.cached_property
    def traits(self) -> Traits:
        """Return the facts that follow from the options.

        A class variable or an option with the name of a trait sets that trait. A subclass whose traits follow from
        several options replaces them in `super().traits`.
        """
        names = {field.name for field in dataclasses.fields(Traits)}
        named = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return Traits(emits=frozenset({self.sends}), **named)

    def check_compatible(self, collective: Collective, layers: Sequence[Layer] = ()) -> None:
        """Check that the collective can sum what this compressor sends, and that these options suit the layers.

        Raises:
            Incompatible: the collective cannot, or the options do not; the message names what would work.
        """
        emits = self.traits.emits
        for kind in sorted(emits, key=lambda kind: kind.__name__):
            try:
                collective.check_compatible(kind)
            except Incompatible as error:
                raise Incompatible(f"{self.component_name} sends {kind.__name__} payloads: {error}") from None
        if collective.recodes and not collective.decodes and Codes not in emits:
            raise Incompatible(
                f"{collective.component_name}: requantise=true encodes sums of codes again, and compressor "
                f"{self.component_name} sends no codes; leave it out"
            )
        if not (collective.recodes and collective.keeps_residuals) or all(kind.elementwise for kind in emits):
            return
        if not self._keeps_errors_small():
            advice = without_residuals(collective)
            if self._gains_from_feedback():
                advice = f"{self.component_name}:error_feedback=true or {advice}"
            raise Incompatible(
                f"{collective.component_name} keeps the errors of the sums that it encodes, which would grow without "
                f"limit: {self.component_name} is no contraction with these options; use {advice}"
            )

    def _keeps_errors_small(self) -> bool:
        # the errors of encoded sums, which are added to the next sums
        bound = self.contraction_bound(Layer(id=0, name="any", shape=(256, 256), kind="linear", numel=256 * 256))
        if self.traits.feedback_diverges or bound is None:
            return not self.traits.feedback_diverges
        # With bound 1, entries that reach a threshold are sent whole, but codes may send less than each sum adds.
        return bound < 1 or (bound == 1 and Codes not in self.traits.emits)

    def _gains_from_feedback(self) -> bool:
        if getattr(self, "error_feedback", True):
            return False
        try:
            return dataclasses.replace(self, **{"error_feedback": True})._keeps_errors_small()
        except OptionError:  # other options exclude it
            return False

    def leaves_dense(self, layer: Layer) -> bool:
        """Return True if the options say that this layer is sent uncompressed, in fp32."""
        return False

    @abc.abstractmethod
    def expected_nbytes(self, layer: Layer) -> int | None:
        """Return the bytes sent for a compressed layer after any warm-up, or None if they depend on the data."""

    def contraction_bound(self, layer: Layer) -> float | None:
        """Return a proved c with |x - C(x)|^2 <= c |x|^2 for compressor C after any warm-up, or None if there is none.

        It holds for every `x` within the normal range of the value type on the wire; for random methods it holds in
        expectation. With c < 1 the compressor is a contraction; otherwise error feedback may diverge. With c = 1 there
        may be an `x` of which nothing is sent.
        """
        return None

    def warnings(self) -> list[str]:
        """Return warnings for the user about a run with these options, one sentence each; often none."""
        return []


@dataclasses.dataclass(kw_only=True)
class PerLayer(Compressor):
    """Base of the compressors that encode each layer, or the concatenated layers of a bucket, into one payload.

    A subclass defines `sends`, `encode` and `expected_nbytes`. The other methods have defaults.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Reset the inherited `encode_sum` of a subclass that defines `encode` only, because it would not match."""
        super().__init_subclass__(**kwargs)
        if "encode" in vars(cls) and "encode_sum" not in vars(cls):
            cls.encode_sum = PerLayer.encode_sum  # type: ignore[method-assign]

    @abc.abstractmethod
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        """Return the payload for `x`, and propose to `step.memory` what the method needs at the next step.

        Args:
            x: fp32 [layer.numel], finite. It must not be changed, and the payload must not share its memory.
            layer: the layer of `x`; for granularity "bucket", one flat layer that stands for several.
            step: the current step.
        """

    def encode_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, layer: Layer, step: Step
    ) -> Payload | None:
        """Add gradient and residual, encode the sum and subtract the payload, in one pass over memory.

        Args:
            gradients: fp32, contiguous; concatenated they are [layer.numel]. One, unless granularity is "bucket".
            residual: fp32 [layer.numel].
            left: fp32 [layer.numel], overwritten with the part that is not sent; shares no memory with the others.
            layer: the layer; for granularity "bucket", one flat layer that stands for several.
            step: the current step.

        Returns:
            The payload, or None if there is no such pass; the caller then takes the three steps one by one.

        Raises:
            NonFiniteSum: the sum holds NaN or infinity (raised only by methods marked with `finds_nonfinite`).
        """
        return None

    def finish(self, total: Payload, layer: Layer, step: Step, out: torch.Tensor) -> None:
        """Decode the sum over ranks, and write the update of the layer to `out`: by default the mean.

        Args:
            total: the sum of all ranks' payloads, bit-identical on all ranks.
            layer: the layer; for granularity "bucket", one flat layer that stands for several.
            step: the current step.
            out: the update, floating [layer.numel], overwritten; shares no memory with `total`.
        """
        out.zero_()
        total.add_to_(out, divisor=step.world_size)


def finds_nonfinite(encode_sum: F) -> F:
    """Mark an `encode_sum` that raises `NonFiniteSum`, so that the caller need not check the gradients first."""
    encode_sum.finds_nonfinite = True  # type: ignore[attr-defined]
    return encode_sum


@dataclasses.dataclass(kw_only=True)
class MultiRound(Compressor):
    """Base of the compressors that exchange several messages per bucket, each to average one tensor over ranks."""

    needs_all_ranks: ClassVar[bool] = True

    @abc.abstractmethod
    def reduce(
        self,
        compressed: Given,
        rest: Sequence[torch.Tensor],
        step: Step,
        average: Average,
        updates: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Exchange the gradients of a bucket and write its updates; every rank must call this method.

        Args:
            compressed: the layers to compress, each with its gradient (plus residual), fp32 [layer.numel].
            rest: gradients that are sent uncompressed, fp32, 1-D.
            step: the current step.
            average: averages a tensor over all ranks, in one message.
            updates: the updates of the compressed layers, floating, 1-D, contiguous; overwritten.

        Returns:
            The updates of `rest`, fp32.
        """

    @abc.abstractmethod
    def num_exchanged(self, layer: Layer, step: Step) -> int:
        """Return the number of fp32 values that `reduce` sends for a compressed layer, in all messages together."""

    def expected_bucket_nbytes(self, layers: Sequence[Layer]) -> int | None:
        """Return the bytes sent for a bucket after any warm-up, or None if they depend on the data."""
        return None


@dataclasses.dataclass(kw_only=True)
class TorchHook(Compressor):
    """Base of the compressors that are one of PyTorch's own communication hooks for DDP.

    Bytes are computed from a formula, because the backend does not report what it sends.

    Attributes:
        value_nbytes: bytes of each number that is sent for a compressed layer.
    """

    value_nbytes: ClassVar[int] = FP32_BYTES

    @override
    def check_compatible(self, collective: Collective, layers: Sequence[Layer] = ()) -> None:
        if collective.component_name != "native":
            raise Incompatible(
                f"{self.component_name} is PyTorch's own communication hook and talks to the backend itself; "
                "use collective native"
            )

    @abc.abstractmethod
    def hook(self, process_group: ProcessGroup) -> tuple[object, DDPHook]:
        """Return (state, hook) for `DistributedDataParallel.register_comm_hook`; every rank must call this method."""

    def forget(self, state: Any) -> None:
        """Clear the tensors in the hook's state that a gradient with NaN or infinity may have spoiled."""

    def state_of(self, state: Any) -> dict[str, Any]:
        """Return the part of the hook's state to save in a checkpoint; empty for hooks without state."""
        return {}

    def restore(self, state: Any, saved: dict[str, Any]) -> None:
        """Load `saved`, which `state_of` returned, into the hook's state."""


@dataclasses.dataclass(kw_only=True)
class LayerPolicy(Compressor):
    """Options of most compressors: error feedback, and layers to send uncompressed."""

    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = False
    min_numel: Annotated[CountOrZero, Doc("layers of at most this many elements are sent in fp32")] = 0
    skip: Annotated[
        tuple[LayerKind, ...], Doc(f"kinds of layers sent in fp32, joined by +: {', '.join(get_args(LayerKind))}")
    ] = ()
    dense_ends: Annotated[bool, Doc("send the first and the last layer of the model in fp32")] = False

    @functools.cached_property
    @override
    def traits(self) -> Traits:
        emits = super().traits.emits | ({Dense} if self.min_numel or self.skip or self.dense_ends else set())
        return dataclasses.replace(super().traits, keeps_residual=self.error_feedback, emits=emits)

    @override
    def leaves_dense(self, layer: Layer) -> bool:
        return layer.numel <= self.min_numel or self._always_dense(layer)

    def _always_dense(self, layer: Layer) -> bool:
        return layer.kind in self.skip or (self.dense_ends and layer.position in (0.0, 1.0))


@dataclasses.dataclass(kw_only=True)
class LossyCompressor(LayerPolicy, PerLayer):
    """The usual base class: encodes per layer, with options for error feedback and for layers to send uncompressed."""


@dataclasses.dataclass(kw_only=True)
class PartsEncoder(LossyCompressor):
    """Base of the compressors that encode a bucket's gradients where they lie, without concatenating them first."""

    granularity: ClassVar[Granularity] = "bucket"

    @abc.abstractmethod
    def encode_parts(self, gradients: Sequence[torch.Tensor], layer: Layer, step: Step) -> Payload:
        """Return the payload of several gradients; concatenated, the gradients are the `x` of `encode`.

        Args:
            gradients: fp32, 1-D, contiguous; they must not be changed.
            layer: one flat layer that stands for all layers of the bucket.
            step: the current step.
        """

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        return self.encode_parts([x], layer, step)


class LayersEncoder(abc.ABC):
    """Mixin of the compressors that encode all layers of a bucket in one native call, each into its own payload."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Reset the inherited `encodes_layers` of a subclass that defines `encode` only, because it would not match."""
        super().__init_subclass__(**kwargs)
        if "encode" in vars(cls) and "encode_layers" not in vars(cls):
            cls.encodes_layers = False  # type: ignore[assignment, method-assign]

    @property
    @abc.abstractmethod
    def encodes_layers(self) -> bool:
        """Return True if `encode_layers` can be called, on CPUs, instead of `encode` and `encode_sum`."""

    @abc.abstractmethod
    def encode_layers(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor | None,
        layers: Sequence[Layer],
        step: Step,
    ) -> Batch:
        """Return the payloads of all layers, bit for bit as `encode` makes them, and what they do not send.

        Args:
            gradients: fp32, contiguous, one per layer; empty if `left` holds what to encode.
            residual: fp32 [numel of all layers], to be added to the gradients; None if there is nothing to add.
            left: fp32 [numel of all layers], overwritten with what is not sent; None if no residual is kept.
            layers: the layers.
            step: the current step.

        Raises:
            NonFiniteSum: gradients + residual holds NaN or infinity (raised only if `finds_nonfinite` marks
                `encode_sum`).
        """


@dataclasses.dataclass(kw_only=True)
class SharedScale(LossyCompressor):
    """Base of the methods that can send integer levels with one scale per layer for all ranks.

    Attributes:
        combine: the operation that makes the shared scale from the scales of all ranks.
    """

    combine: ClassVar[Literal["max", "mean"]]

    def kind_for(self, layer: Layer) -> type[Payload]:
        """Return the class of the payload that `encode` returns for this layer after any warm-up."""
        return Dense if self.shares_scale(layer) else Codes

    def shares_scale(self, layer: Layer) -> bool:
        """Return True if this layer is sent as levels with a shared scale; by default if any layer is."""
        return self.traits.needs_all_ranks

    @abc.abstractmethod
    def local_scale(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's scale for `x`, fp32 [1]; 0 if there is nothing to send."""

    def rounded_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """Return scales that all ranks share, fp32 of any shape, rounded as the method needs; by default unchanged."""
        return scale

    def agree(self, given: Given, step: Step, transport: Transport) -> None:
        """Agree with the other ranks on the scales for `encode`, and write the scales to `step.memory.scales`.

        Every rank must call this method.

        Args:
            given: the layers and tensors that `encode` will get.
            step: the current step.
            transport: connection to the other ranks.
        """
        own = {layer.id: float(self.local_scale(x)) for layer, x in given if self.shares_scale(layer)}
        if not own:
            return
        scales = transport.all_reduce_scalars([*own.values()], "max" if self.combine == "max" else "sum")
        if self.combine == "mean":
            scales = [total / step.world_size for total in scales]
        rounded = self.rounded_scale(torch.tensor(scales, dtype=torch.float32))
        step.memory.scales.update(zip(own, rounded.tolist(), strict=True))

    def subtract_(self, x: torch.Tensor, payload: Payload, layer: Layer, step: Step) -> None:
        """Subtract this rank's decoded payload from `x`, fp32 [layer.numel], in place."""
        if isinstance(payload, Dense) and self.shares_scale(layer):
            x.sub_(payload.values, alpha=step.memory.scales[layer.id])
        else:
            payload.subtract_from_(x)

    @override
    def finish(self, total: Payload, layer: Layer, step: Step, out: torch.Tensor) -> None:
        super().finish(total, layer, step, out)
        if self.shares_scale(layer):
            out.mul_(step.memory.scales[layer.id])


@dataclasses.dataclass(kw_only=True)
class Sparsifier(LossyCompressor):
    """Base of the methods that send some entries and keep the others in the residual.

    Raises:
        OptionError: momentum_correction without error_feedback.
    """

    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = True
    dense_steps: Annotated[CountOrZero, Doc("first optimizer steps in which everything is sent, in fp32")] = 0
    momentum_correction: Annotated[
        bool,
        Doc("apply the optimizer's momentum before selection, cleared where sent (the optimizer's own is then off)"),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum_correction and not self.error_feedback:
            raise OptionError(f"{self.component_name}: momentum_correction=true needs error_feedback=true")

    @functools.cached_property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            owns_momentum=self.momentum_correction,
            emits=super().traits.emits | ({Dense} if self.dense_steps else set()),
        )

    @override
    def expected_nbytes(self, layer: Layer) -> int | None:
        return None  # as many entries as reach a threshold

    def density_for(self, layer: Layer, step: Step) -> float | None:
        """Return the share of a compressed layer's entries that `encode` aims to send, in (0, 1].

        Return None if the method has no such share.
        """
        return None

    @abc.abstractmethod
    def _sparse_values(self, numel: int, indices: torch.Tensor, values: torch.Tensor, step: Step) -> IndexedValues:
        """Return the payload of entries `values`, fp32 [k], at ascending positions.

        Entries that are zero on the wire are left out.
        """

    def _sparse(self, x: torch.Tensor, indices: torch.Tensor, step: Step) -> IndexedValues:
        return self._sparse_values(x.numel(), indices, x.index_select(0, indices), step)
