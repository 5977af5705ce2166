"""The contract of a compressor, which turns gradients into payloads and holds nothing but its options.

`PerLayer` encodes, `MultiRound` exchanges several messages per bucket, and `TorchHook` is one of PyTorch's own
communication hooks; `OwnHook` in `gradwire/ddp/hook.py` brings a hook of this project. What a rank keeps from step
to step belongs to the `Reducer` that runs the compressor (`gradwire/exchange/reducer.py`).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import torch
from typing_extensions import Doc, override

from collectives.allreduce import Native
from collectives.base import Collective, without_residuals
from collectives.kernels.loop import Parts
from collectives.options import CountOrZero, Incompatible, OptionError, Options, incompatibility
from collectives.payloads import Codes, Dense, Payload
from compressors.layer import Layer, LayerKind, Step, end_to_end
from compressors.parts.buckets import bundled, summed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FP32_BYTES = 4
Granularity = Literal["layer", "bucket"]
# The options of most compressors, which `Compressor` and the reducer follow where a compressor declares them.
ErrorFeedback = Annotated[bool, Doc("add what was not sent to the next gradient")]
MinNumel = Annotated[CountOrZero, Doc("layers of at most this many elements are sent in fp32")]
Skip = Annotated[
    tuple[LayerKind, ...], Doc(f"kinds of layers sent in fp32, joined by +: {', '.join(get_args(LayerKind))}")
]
DenseEnds = Annotated[bool, Doc("send the first and the last layer of the model in fp32")]
# Layers, each with the tensor to send for it, fp32 [layer.numel].
Given = Sequence[tuple[Layer, torch.Tensor]]
# Maps a tensor of this rank, fp32 [n], to its mean over all ranks, fp32 [n]; every rank must call the function.
Average = Callable[[torch.Tensor], torch.Tensor]
DDPHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


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
        averages: True if the update is the mean of what ranks sent, so that a rounding error in a sum is an error of
            the gradient. A method that overrides `finish` sets it to False.
        keeps_fp64: True if gradients of every type are taken, and fp64 is sent as such; others get fp32.
        min_numel: layers of at most this many elements are sent uncompressed.
        skip: kinds of layers that are sent uncompressed.
        dense_ends: True if the first and the last layer are sent uncompressed.
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
    averages: bool = True
    keeps_fp64: bool = False
    min_numel: int = 0
    skip: tuple[LayerKind, ...] = ()
    dense_ends: bool = False

    def leaves_dense(self, layer: Layer) -> bool:
        """Return True if these facts say that a layer is sent uncompressed."""
        is_end = layer.position in (0.0, 1.0)
        return layer.numel <= self.min_numel or layer.kind in self.skip or (self.dense_ends and is_end)

    def dtype_for(self, gradient: torch.Tensor) -> torch.dtype:
        """Return the type in which a gradient is encoded and decoded."""
        return torch.promote_types(gradient.dtype, torch.float32) if self.keeps_fp64 else torch.float32


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

        A class variable or an option with the name of a trait sets that trait; error_feedback and momentum_correction
        set `keeps_residual` and `owns_momentum`. A subclass whose traits follow from several options replaces them in
        `super().traits`.
        """
        names = {field.name for field in dataclasses.fields(Traits)}
        named = {name: getattr(self, name) for name in names if hasattr(self, name)}
        options = vars(self)
        sends_some_dense = any(options.get(name) for name in ("min_numel", "skip", "dense_ends", "dense_steps"))
        return Traits(
            emits=frozenset({self.sends, Dense} if sends_some_dense else {self.sends}),
            keeps_residual=options.get("error_feedback", False),
            owns_momentum=options.get("momentum_correction", False),
            **named,
        )

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
            return dataclasses.replace(self, **{"error_feedback": True})._keeps_errors_small()  # type: ignore[arg-type]
        except OptionError:  # other options exclude it
            return False

    def leaves_dense(self, layer: Layer) -> bool:
        """Return True if the options say that this layer is sent uncompressed, in fp32."""
        return self.traits.leaves_dense(layer)

    @abc.abstractmethod
    def expected_nbytes(self, layer: Layer) -> int | None:
        """Return the bytes sent for a compressed layer after any warm-up, or None if they depend on the data."""

    def contraction_bound(self, layer: Layer) -> float | None:
        """Return a proved c with |x - C(x)|^2 <= c |x|^2 for compressor C after any warm-up, or None if there is none.

        It holds within the normal range of the value type on the wire, for random methods in expectation. With c < 1
        the compressor is a contraction; otherwise error feedback may diverge, and nothing may be sent of some `x`.
        """
        return None

    def warnings(self) -> list[str]:
        """Return warnings for the user about a run with these options, one sentence each; often none."""
        return []


def check_is_called(cls: type, part: str, whole: str, loop: Callable[..., object]) -> None:
    """Check that a class which defines the method `part`, for one layer, does not inherit a `whole` that ignores it.

    Raises:
        TypeError: it does; `loop` is the `whole` that calls `part` for each layer.
    """
    if part in vars(cls) and whole not in vars(cls) and getattr(cls, whole) is not loop:
        raise TypeError(
            f"{cls.__name__} defines {part}, which the {whole} that it inherits does not call; define {whole} as well, "
            f"for example as {whole} = {loop.__qualname__}"
        )


@dataclasses.dataclass(kw_only=True)
class PerLayer(Compressor):
    """Base of the compressors that encode each layer, or the concatenated layers of a bucket, into one payload.

    A subclass defines `sends`, `encode` and `expected_nbytes`. The other methods have defaults.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check that a subclass which defines `encode` does not inherit an `encode_bucket` that never calls it."""
        super().__init_subclass__(**kwargs)
        check_is_called(cls, "encode", "encode_bucket", PerLayer.encode_bucket)

    @abc.abstractmethod
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        """Return the payload for `x`, and propose to `step.memory` what the method needs at the next step.

        Args:
            x: fp32 [layer.numel], finite. It must not be changed, and the payload must not share its memory.
            layer: the layer of `x`; for granularity "bucket", one flat layer that stands for several.
            step: the current step.
        """

    def encode_bucket(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor | None,
        layers: Sequence[Layer],
        step: Step,
        *,
        screen: bool = False,
    ) -> Payload:
        """Encode all layers of a bucket into one payload, and write into `left` what the payload does not send.

        By default this adds, encodes and subtracts layer by layer. A method that needs fewer passes over memory
        overrides the whole, and gives the same bits.

        Args:
            gradients: fp32 and contiguous, one per layer. They are not changed, unless they are parts of `left`.
            residual: fp32 [numel of all layers], to be added to the gradients; None if there is nothing to add, and
                then the gradients are the parts of `left`, if there is one.
            left: fp32 [numel of all layers], overwritten; None if the residual is not kept.
            layers: the layers, at least one.
            step: the current step.
            screen: raise an error if gradients + residual hold NaN or infinity, instead of encoding them.

        Raises:
            NonFinite: `screen` is True and they do; `left` is then undefined.
        """
        xs = summed(gradients, residual, left, layers, screen=screen)
        if self.granularity == "bucket" and len(layers) > 1:
            parts = [*xs]
            whole = step.memory.buffers.acquire(layers, torch.float32, parts[0].device) if left is None else left
            if left is None:
                torch.cat(parts, out=whole)
            xs, layers = iter([whole]), [end_to_end(layers)]
        payloads = []
        for x, layer in zip(xs, layers, strict=True):
            payload = self.encode(x, layer, step)
            if left is not None:
                self._subtract(x, payload, layer, step)
            payloads.append(payload)
        return bundled(payloads)

    def _subtract(self, x: torch.Tensor, payload: Payload, layer: Layer, step: Step) -> None:
        """Subtract this rank's decoded payload from `x`, fp32 [layer.numel], in place."""
        payload.subtract_from_(x)

    def finish(self, total: Payload, layer: Layer, step: Step, updates: Sequence[torch.Tensor]) -> None:
        """Decode the sum over ranks, and write the updates: by default the mean.

        Args:
            total: the sum of all ranks' payloads of `layer`, bit-identical on all ranks.
            layer: the layer; for granularity "bucket", one flat layer that stands for several.
            step: the current step.
            updates: the update of the layer, or one of each of the several; floating, 1-D, overwritten; they share no
                memory with `total`.
        """
        if total.write_to(updates, divisor=step.world_size):
            return
        out = updates[0]
        if len(updates) > 1:
            out = step.memory.buffers.scratch(layer.numel, self.traits.dtype_for(out), out.device)
        out.zero_()
        total.add_to_(out, divisor=step.world_size)
        if len(updates) > 1:
            for update, part in zip(updates, out.split([len(update) for update in updates]), strict=True):
                update.copy_(part)

    def density_for(self, layer: Layer, step: Step) -> float | None:
        """Return the share of a layer's entries that `encode` aims to send, in (0, 1]; None if there is no such aim."""
        return None


@dataclasses.dataclass(kw_only=True)
class MultiRound(Compressor):
    """Base of the compressors that exchange several messages per bucket, each to average one tensor over ranks."""

    needs_all_ranks: ClassVar[bool] = True

    error_feedback: ErrorFeedback = False
    min_numel: MinNumel = 0
    skip: Skip = ()
    dense_ends: DenseEnds = False

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


def first_compatible(compressor: Compressor, collectives: Sequence[Collective]) -> Collective:
    """Return the first of these collectives that can sum what the compressor sends; the last one if none can."""
    fitting = (each for each in collectives if not incompatibility(compressor.check_compatible, each))
    return next(fitting, collectives[-1])


@dataclasses.dataclass(kw_only=True)
class DdpHook(Compressor):
    """Base of the compressors that are a communication hook of DDP themselves, and so work nowhere else."""

    @override
    def obstacle_to_resizing(self) -> str:
        return f"{self.component_name} keeps its state in a hook of DDP"


@dataclasses.dataclass(kw_only=True)
class TorchHook(DdpHook):
    """Base of the compressors that are one of PyTorch's own communication hooks for DDP.

    Bytes are computed from a formula, because the backend does not report what it sends.

    Attributes:
        value_nbytes: bytes of each number that is sent for a compressed layer.
    """

    value_nbytes: ClassVar[int] = FP32_BYTES

    @override
    def check_compatible(self, collective: Collective, layers: Sequence[Layer] = ()) -> None:
        if not isinstance(collective, Native):
            raise Incompatible(
                f"{self.component_name} is PyTorch's own communication hook and talks to the backend itself; "
                "use collective native"
            )

    @abc.abstractmethod
    def hook(self, process_group: ProcessGroup) -> tuple[object, DDPHook]:
        """Return (state, hook) for `DistributedDataParallel.register_comm_hook`; every rank must call this method."""

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return self.value_nbytes * layer.numel

    def forget(self, state: Any) -> None:
        """Clear the tensors in the hook's state that a gradient with NaN or infinity may have spoiled."""

    def state_of(self, state: Any) -> dict[str, Any]:
        """Return the part of the hook's state to save in a checkpoint; empty for hooks without state."""
        return {}

    def restore(self, state: Any, saved: dict[str, Any]) -> None:
        """Load `saved`, which `state_of` returned, into the hook's state."""


@dataclasses.dataclass(kw_only=True)
class LossyCompressor(PerLayer):
    """The usual base class: encodes per layer, with options for error feedback and for layers to send uncompressed."""

    error_feedback: ErrorFeedback = False
    min_numel: MinNumel = 0
    skip: Skip = ()
    dense_ends: DenseEnds = False


@dataclasses.dataclass(kw_only=True)
class PartsEncoder(PerLayer):
    """Base of the compressors that encode a bucket's gradients where they lie, without concatenating them first."""

    granularity: ClassVar[Granularity] = "bucket"

    error_feedback: ErrorFeedback = False
    min_numel: MinNumel = 0
    skip: Skip = ()
    dense_ends: DenseEnds = False

    @abc.abstractmethod
    def encode_parts(self, x: Parts, layer: Layer, step: Step) -> Payload:
        """Return the payload of `x`, which stands for one flat tensor, fp32 [layer.numel]."""

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        return self.encode_parts(Parts([x]), layer, step)

    @override
    def encode_bucket(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor | None,
        layers: Sequence[Layer],
        step: Step,
        *,
        screen: bool = False,
    ) -> Payload:
        if left is not None:
            return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)
        x = Parts([*summed(gradients, None, None, layers, screen=screen)])
        return self.encode_parts(x, end_to_end(layers), step)
