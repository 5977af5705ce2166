"""The base classes of compressors, which turn gradients into payloads and keep nothing but their options.

`PerLayer` encodes layers, `MultiRound` exchanges several messages per bucket, and `TorchHook` is one of PyTorch's own
communication hooks. `OwnHook` in `gradwire/ddp/hook.py` is for compressors with a hook of this project. What a rank
keeps between steps belongs to the `Reducer` that runs the compressor (`gradwire/exchange/reducer.py`).
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
from collectives.options import CountOrZero, Incompatible, OptionError, Options, incompatibility
from collectives.payloads import Codes, Dense, Payload
from compressors.layer import Layer, LayerKind, Step, end_to_end
from compressors.parts.buckets import bundled, summed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FP32_BYTES = 4
Granularity = Literal["layer", "bucket"]
# Options of most compressors; `Compressor` and the reducer read them if a compressor declares them.
ErrorFeedback = Annotated[bool, Doc("add what was not sent to the next gradient")]
MinNumel = Annotated[CountOrZero, Doc("layers of at most this many elements are sent in fp32")]
Skip = Annotated[
    tuple[LayerKind, ...], Doc(f"kinds of layers sent in fp32, joined by +: {', '.join(get_args(LayerKind))}")
]
DenseEnds = Annotated[bool, Doc("send the first and the last layer of the model in fp32")]
# Pairs of a layer and the tensor to send for it, fp32 [layer.numel].
Given = Sequence[tuple[Layer, torch.Tensor]]
# Maps a tensor of this rank, fp32 [n], to its mean over all ranks, fp32 [n]; every rank must call the function.
Average = Callable[[torch.Tensor], torch.Tensor]
DDPHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts about a compressor that follow from its options; the defaults suit most compressors.

    Attributes:
        emits: all classes of payloads that the compressor sends (the classes of a bundle's members, not `Bundle`).
        keeps_residual: True if the part of a gradient that was not sent is added to the next gradient (error feedback).
        feedback_diverges: True if error feedback is known to diverge, even if `contraction_bound` returns a bound.
        owns_momentum: True if the compressor applies the momentum before it selects what to send; the optimizer's own
            momentum must then be off.
        clip_norm: a compressed layer's gradient is clipped to this L2 norm / sqrt(world_size) before the residual is
            added; 0 if it is not clipped.
        one_bucket: True if the whole model must be one bucket of DDP, which prevents overlap with backward.
        needs_all_ranks: True if ranks must exchange numbers, and so wait for each other, before they can encode.
        dense_steps: number of optimizer steps at the start in which all layers are sent uncompressed.
        denser_epochs: number of epochs at the start in which more entries are sent than later.
        period: number of steps after which the work per step repeats, such as 2 if odd and even steps differ.
        default_collectives: names of collectives, best first. If the user names no collective, the first of these that
            can sum the payloads is used.
        default_lr_scaling: "none", or "linear" to multiply the learning rate by the number of ranks.
        averages: True if the update is the mean of what the ranks sent, so that a rounding error in a sum is an error
            of the gradient. A method that overrides `finish` sets it to False.
        keeps_fp64: True if the compressor sends fp64 gradients as fp64; False if it gets all gradients as fp32.
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
        """Return True if `min_numel`, `skip` or `dense_ends` says that this layer is sent uncompressed."""
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
        granularity: "layer" if each layer is encoded by itself; "bucket" if the layers of a bucket are concatenated, in
            model order, and encoded as one tensor.
    """

    sends: ClassVar[type[Payload]] = Dense
    biased: ClassVar[bool] = True
    granularity: ClassVar[Granularity] = "layer"

    @functools.cached_property
    def traits(self) -> Traits:
        """Return the facts that follow from the options.

        A trait is taken from the class variable or the option with the same name, if there is one. The options
        error_feedback and momentum_correction set the traits `keeps_residual` and `owns_momentum`. If a subclass
        computes traits from several options, it overrides this property and replaces them in `super().traits`.
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
        """Check that the collective can sum what this compressor sends, and that the compressor's options suit layers.

        Raises:
            Incompatible: the check fails; the message names what would work.
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
        # whether the errors of encoded sums stay small although they are added to the next sums
        bound = self.contraction_bound(Layer(id=0, name="any", shape=(256, 256), kind="linear", numel=256 * 256))
        if self.traits.feedback_diverges or bound is None:
            return not self.traits.feedback_diverges
        # With bound 1, entries that reach a threshold are sent in full, but codes may send less than each sum adds.
        return bound < 1 or (bound == 1 and Codes not in self.traits.emits)

    def _gains_from_feedback(self) -> bool:
        if getattr(self, "error_feedback", True):
            return False
        try:
            return dataclasses.replace(self, **{"error_feedback": True})._keeps_errors_small()  # type: ignore[arg-type]
        except OptionError:  # error feedback is not possible with the other options
            return False

    def leaves_dense(self, layer: Layer) -> bool:
        """Return True if the options say that this layer is sent uncompressed, in fp32."""
        return self.traits.leaves_dense(layer)

    @abc.abstractmethod
    def expected_nbytes(self, layer: Layer) -> int | None:
        """Return the bytes sent for a compressed layer after any warm-up; None if the bytes depend on the data."""

    def contraction_bound(self, layer: Layer) -> float | None:
        """Return a proved c with |x - C(x)|^2 <= c |x|^2 for all x, where C is this compressor after any warm-up.

        Return None if there is no such c. The bound holds within the normal range of the value type on the wire; for
        random methods it holds in expectation. If c < 1, the compressor is a contraction. Otherwise error feedback may
        diverge, and for some `x` nothing may be sent.
        """
        return None

    def warnings(self) -> list[str]:
        """Return warnings for the user about a run with these options, one sentence each; often an empty list."""
        return []


def check_is_called(cls: type, part: str, whole: str, loop: Callable[..., object]) -> None:
    """Check that a class that defines a method for one layer does not inherit a bucket method that never calls it.

    Args:
        cls: the class.
        part: name of the method for one layer, such as ``encode``.
        whole: name of the method for all layers of a bucket, such as ``encode_bucket``.
        loop: the bucket method that calls `part` for each layer; the class may inherit it.

    Raises:
        TypeError: the class defines `part`, but inherits a `whole` other than `loop`.
    """
    if part in vars(cls) and whole not in vars(cls) and getattr(cls, whole) is not loop:
        raise TypeError(
            f"{cls.__name__} defines {part}, which the {whole} that it inherits does not call; define {whole} as well, "
            f"for example as {whole} = {loop.__qualname__}"
        )


@dataclasses.dataclass(kw_only=True)
class PerLayer(Compressor):
    """Base of the compressors that encode each layer, or all layers of a bucket as one tensor, into one payload.

    A subclass defines `sends`, `encode` and `expected_nbytes`. The other methods have defaults.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check that a subclass that defines `encode` does not inherit an `encode_bucket` that never calls `encode`."""
        super().__init_subclass__(**kwargs)
        check_is_called(cls, "encode", "encode_bucket", PerLayer.encode_bucket)

    @abc.abstractmethod
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        """Return the payload for `x`; store the state that the next step needs with `step.memory.propose`.

        Args:
            x: fp32 [layer.numel], finite. It must not be changed, and the payload must not share its memory.
            layer: the layer of `x`; with granularity "bucket", a flat layer that stands for all layers of the bucket.
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

        By default, each layer is added, encoded and subtracted on its own. A method that needs fewer passes over memory
        overrides this whole method, with results that are equal bit for bit.

        Args:
            gradients: fp32 and contiguous, one per layer. They are not changed, unless they are parts of `left`.
            residual: fp32 [numel of all layers], to be added to the gradients. None if there is nothing to add; then,
                if `left` is not None, the gradients are the parts of `left`.
            left: fp32 [numel of all layers], overwritten; None if the residual is not kept.
            layers: the layers, at least one.
            step: the current step.
            screen: True to raise an error if gradients + residual contain NaN or infinity, instead of encoding them.

        Raises:
            NonFinite: `screen` is True, and gradients + residual contain NaN or infinity; `left` is then undefined.
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
        """Decode the sum over ranks, and write the updates: by default the mean over ranks.

        Args:
            total: the sum of all ranks' payloads of `layer`, bit-identical on all ranks.
            layer: the layer; with granularity "bucket", a flat layer that stands for all layers of the bucket.
            step: the current step.
            updates: one update for each layer that `layer` stands for; floating, 1-D, overwritten. They share no memory
                with `total`.
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
        """Return the share of a layer's entries that `encode` aims to send, in (0, 1]; None if it aims at no share."""
        return None


@dataclasses.dataclass(kw_only=True)
class MultiRound(Compressor):
    """Base of the compressors that exchange several messages per bucket, each of which averages a tensor over ranks."""

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
        """Return the bytes sent for a bucket after any warm-up; None if the bytes depend on the data."""
        return None


def first_compatible(compressor: Compressor, collectives: Sequence[Collective]) -> Collective:
    """Return the first of these collectives that can sum what the compressor sends; if none can, return the last."""
    fitting = (each for each in collectives if not incompatibility(compressor.check_compatible, each))
    return next(fitting, collectives[-1])


@dataclasses.dataclass(kw_only=True)
class DdpHook(Compressor):
    """Base of the compressors that are themselves a communication hook of DDP, and so work only inside DDP."""

    @override
    def obstacle_to_resizing(self) -> str:
        return f"{self.component_name} keeps its state in a hook of DDP"


@dataclasses.dataclass(kw_only=True)
class TorchHook(DdpHook):
    """Base of the compressors that wrap one of PyTorch's own communication hooks for DDP.

    Bytes are computed from a formula, because the backend does not report what it sends.

    Attributes:
        value_nbytes: bytes of each number that the hook sends for a compressed layer.
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
        """Clear the tensors in the hook's state that a gradient with NaN or infinity may have made non-finite."""

    def state_of(self, state: Any) -> dict[str, Any]:
        """Return the part of the hook's state that a checkpoint must save; {} for hooks without state."""
        return {}

    def restore(self, state: Any, saved: dict[str, Any]) -> None:
        """Load `saved`, which `state_of` returned, into the hook's state."""


@dataclasses.dataclass(kw_only=True)
class LossyCompressor(PerLayer):
    """The usual base class: encodes each layer, with options for error feedback and for layers to send uncompressed."""

    error_feedback: ErrorFeedback = False
    min_numel: MinNumel = 0
    skip: Skip = ()
    dense_ends: DenseEnds = False
