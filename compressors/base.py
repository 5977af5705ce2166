"""What a compressor is: gradient -> payload, with error feedback and the per-layer policy, once for all methods.

Source: error feedback as in Karimireddy et al. 2019 (arXiv:1901.09847): x = g + r, payload = encode(x), r' = x -
payload. Differs: the residual is in gradient units (no learning rate inside), so a schedule does not rescale what
waits to be sent.
"""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from typing_extensions import Doc

from collectives.base import Collective
from collectives.options import Options
from collectives.payloads.base import HEADER_BYTES, Payload
from collectives.payloads.bundle import Bundle, members
from collectives.payloads.dense import Dense
from compressors.layer import Bucket, Kind, Layer, Step
from compressors.state import Key, LayerStore, Store
from compressors.unit import Granularity, Unit, cut, units_of

FP32_BYTES = 4


@dataclasses.dataclass(kw_only=True)
class Compressor(Options, abc.ABC):
    """One file, one class, named after the file; dataclass fields are its options.

    Class facts:
        sends: the kind of payload that `encode` makes at full compression, where it is one for all layers and options.
        biased: the decoded payload's expectation is not the gradient.
        contraction: |x - C(x)|^2 <= (1 - d) |x|^2 for some d > 0, without which error feedback diverges.
        fixed_size: the payload's bytes follow from the layer's shape alone.
        shared_randomness: all ranks must draw the same numbers at one step.
        granularity: "layer" encodes each layer by itself, "bucket" the layers of a bucket laid end to end in model
            order.
        engine_hook: the method is PyTorch's own communication hook; see `compressors/families/torch_comm_hook.py`.
    """

    sends: ClassVar[type[Payload]] = Dense
    biased: ClassVar[bool] = True
    contraction: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = True
    shared_randomness: ClassVar[bool] = False
    granularity: ClassVar[Granularity] = "layer"
    engine_hook: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._residuals = LayerStore()
        self._scratch = torch.empty(0)
        self._encoded: dict[Key, Payload] = {}
        self._last_encoded: dict[Key, Payload] = {}

    @property
    def keeps_residual(self) -> bool:
        """Whether what was not sent is added to the next gradient."""
        return False

    @property
    def owns_momentum(self) -> bool:
        """Whether momentum is applied here, before selection; the optimizer's own must then be off."""
        return False

    def take_over_momentum(self, coefficient: float, *, nesterov: bool = False) -> None:
        """Apply the optimizer's momentum here; only for compressors with `owns_momentum`.

        Args:
            coefficient: share of the last velocity that is kept, in [0, 1).
            nesterov: look ahead along the velocity.
        """
        raise TypeError(f"{self.component_name} applies no momentum")

    @property
    def one_bucket(self) -> bool:
        """Whether the method wants the whole model as one bucket, which gives up overlap with backward."""
        return False

    @property
    def default_collectives(self) -> tuple[str, ...]:
        """What sums where nobody chooses: the first of these that takes what the compressor emits."""
        return ("native", "allgather")

    @property
    def emits(self) -> frozenset[type[Payload]]:
        """Kinds of payload that `reduce` sends under these options (the members of a bundle, not the bundle)."""
        return self.kinds

    @property
    def kinds(self) -> frozenset[type[Payload]]:
        """Kinds of payload that `encode` makes at full compression."""
        return frozenset({self.sends})

    def kind_for(self, layer: Layer) -> type[Payload]:
        """The kind of payload that `encode` makes for this layer at full compression."""
        return self.sends

    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        """The payload to send for `x`; methods that take several rounds override `reduce` instead.

        Args:
            x: fp32 [layer.numel], finite; must not be changed, and the payload must not share its memory.
            layer: what `x` belongs to; for granularity "bucket" a flat stand-in for several layers.
            step: where training is.

        Raises:
            TypeError: "powersgd takes several rounds between the ranks; call reduce".
        """
        raise TypeError(f"{self.component_name} takes several rounds between the ranks; call reduce")

    def density_for(self, layer: Layer, step: Step) -> float | None:
        """Share of a compressed layer's entries that `encode` means to send, in (0, 1]; None for methods without one.

        Args:
            layer: as in `encode`.
            step: where training is.
        """
        return None

    def finish(self, total: Payload, layer: Layer, step: Step, out: torch.Tensor) -> None:
        """Turn the sum over ranks into the update: the mean, the one place that divides.

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
        lengths = []
        for unit in cut([layer for layer in layers if layer.numel], self.granularity, self.leaves_dense):
            nbytes = HEADER_BYTES + FP32_BYTES * unit.numel if unit.dense else self.expected_nbytes(unit.layer)
            if nbytes is None:
                return None
            lengths.append(nbytes)
        return lengths[0] if len(lengths) == 1 else Bundle.packed_nbytes(lengths) if lengths else 0

    def contraction_bound(self, layer: Layer) -> float | None:
        """The proved c in |x - C(x)|^2 <= c |x|^2 at full compression; None where there is none.

        It holds for every `x` whose values stay within the normal range of the type they travel in; in expectation for
        methods that draw at random. Below 1 it is a contraction; at 1 nothing of an `x` may arrive.

        Args:
            layer: as in `encode`.
        """
        return None

    def leaves_dense(self, layer: Layer) -> bool:
        """Whether the per-layer policy sends this layer as it is, in fp32."""
        return False

    def warnings(self) -> list[str]:
        """What a user should know before a run with these options, one sentence each."""
        return []

    def reduce(self, bucket: Bucket, collective: Collective) -> None:
        """Replace each gradient of the bucket by the mean over ranks of what was transmitted; every rank must call.

        New state is only proposed: `commit` accepts it, `drop` forgets it. Fills `bucket.sent` and `bucket.encode_s`.
        """
        units = units_of(bucket, self.granularity, self.leaves_dense)
        if units:
            message = self._encode_units(units, bucket, collective)
            # A collective that keeps something per layer needs the ids in the order in which the message holds them.
            key = tuple(layer.id for unit in units for layer in unit.layers)
            self._finish_units(units, collective.sum(message, key), bucket)

    @property
    def needs_all_ranks(self) -> bool:
        """Whether ranks wait for each other while they encode (a shared scale, several rounds)."""
        return type(self).reduce is not Compressor.reduce

    def message(self, bucket: Bucket) -> Payload | None:
        """The first half of `reduce`, for who adds messages elsewhere; None for a bucket without elements.

        Raises:
            TypeError: the method needs all ranks at once.
        """
        if self.needs_all_ranks:
            raise TypeError(f"{self.component_name} needs all ranks while it encodes; call reduce")
        units = units_of(bucket, self.granularity, self.leaves_dense)
        return self._encode_units(units, bucket, None) if units else None

    def finish_bucket(self, total: Payload, bucket: Bucket) -> None:
        """The second half of `reduce`: replace each gradient by what the sum of all messages stands for."""
        self._finish_units(units_of(bucket, self.granularity, self.leaves_dense), total, bucket)

    def commit(self) -> None:
        """Accept the state proposed since the last `commit` or `drop`."""
        for store in self._stores().values():
            store.commit()
        self._last_encoded, self._encoded = self._encoded, {}

    def drop(self) -> None:
        """Forget the proposed state: everything is bit for bit what it was before the step."""
        for store in self._stores().values():
            store.drop()
        self._encoded = {}

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """What `encode` made at the last committed step, by the ids of the layers in it; where it sends, not what.

        A collective may have overwritten the values since. Payloads that send every element are not kept.
        """
        return self._last_encoded

    def residual_norms(self) -> dict[int, float]:
        """L2 norm of each layer's residual, by layer id."""
        return {layer_id: float(residual.norm()) for layer_id, residual in self._residuals.by_layer().items()}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, tensors by layer id. Differs between ranks."""
        return {
            name: {layer_id: tensor.clone() for layer_id, tensor in store.by_layer().items()}
            for name, store in self._stores().items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        for name, store in self._stores().items():
            store.load(state[name])

    def _stores(self) -> dict[str, Store]:
        """Every store of per-layer tensors, by the name it has in `state_dict`."""
        return {"residuals": self._residuals}

    def _agree(self, units: list[Unit], inputs: list[torch.Tensor], step: Step, collective: Collective) -> None:
        """Agree with the other ranks on what `encode` needs from all of them, e.g. a shared scale; every rank calls."""

    def _encode_units(self, units: list[Unit], bucket: Bucket, collective: Collective | None) -> Payload:
        """This rank's message; without a collective where nothing is to be agreed on."""
        started = time.perf_counter()
        inputs = [self._uncompressed(unit) if unit.dense else self._compensate(unit, bucket.step) for unit in units]
        prepared = time.perf_counter()
        if collective is not None:
            self._agree(units, inputs, bucket.step, collective)
        agreed = time.perf_counter()
        payloads = [self._encode_unit(unit, x, bucket) for unit, x in zip(units, inputs, strict=True)]
        message = payloads[0] if len(payloads) == 1 else Bundle(payloads)
        bucket.encode_s += (prepared - started) + (time.perf_counter() - agreed)
        return message

    def _finish_units(self, units: list[Unit], total: Payload, bucket: Bucket) -> None:
        started = time.perf_counter()
        for unit, part in zip(units, members(total, [unit.numel for unit in units]), strict=True):
            self._finish_unit(unit, part, bucket.step)
        bucket.encode_s += time.perf_counter() - started

    def _encode_unit(self, unit: Unit, x: torch.Tensor, bucket: Bucket) -> Payload:
        started = time.perf_counter()
        if unit.dense:
            payload: Payload = Dense(x)
        else:
            payload = self.encode(x, unit.layer, bucket.step)
            self._settle(unit, x, payload)
            if payload.num_entries < unit.numel:
                self._encoded[unit.key] = payload
        seconds = time.perf_counter() - started
        has_aim = self.granularity == "layer" and not isinstance(payload, Dense)
        bucket.sent.extend(
            unit.account(payload, seconds, self.density_for(unit.layer, bucket.step) if has_aim else None)
        )
        return payload

    def _uncompressed(self, unit: Unit) -> torch.Tensor:
        """What a dense unit sends: a copy of its gradient, fp32 [unit.numel]."""
        x = torch.empty(unit.numel, device=unit.gradients[0].device)
        unit.add_gradient(None, out=x)
        return x

    def _compensate(self, unit: Unit, step: Step) -> torch.Tensor:
        """What `encode` is given, fp32 [unit.numel]: the gradient, plus the residual where one is kept."""
        if not self.keeps_residual:
            return unit.flat()
        x = self._residuals.propose(unit)
        unit.add_gradient(self._residuals.accepted(unit), out=x)
        return x

    def _settle(self, unit: Unit, x: torch.Tensor, payload: Payload) -> None:
        """Turn the compensated gradient, which is the proposed residual's memory, into the proposed residual."""
        if self.keeps_residual:
            payload.subtract_from_(x)

    def _finish_unit(self, unit: Unit, total: Payload, step: Step) -> None:
        alone = len(unit.gradients) == 1
        out = unit.gradients[0] if alone else self._scratch_for(unit)
        if unit.dense:
            Compressor.finish(self, total, unit.layer, step, out)
        else:
            self.finish(total, unit.layer, step, out)
        if not alone:
            unit.scatter_to_gradients(out)

    def _scratch_for(self, unit: Unit) -> torch.Tensor:
        """fp32 [unit.numel], contents undefined; the same memory at every call, for fresh pages cost more than sums."""
        device = unit.gradients[0].device
        if self._scratch.numel() < unit.numel or self._scratch.device != device:
            self._scratch = torch.empty(unit.numel, device=device)
        return self._scratch[: unit.numel]


@dataclasses.dataclass(kw_only=True)
class LossyCompressor(Compressor):
    """A compressor that may keep what it did not send, and leave chosen layers alone."""

    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = False
    min_numel: Annotated[int, Ge(0), Doc("layers of at most this many elements are sent in fp32")] = 0
    skip: Annotated[
        tuple[Kind, ...], Doc("kinds of layers sent in fp32, joined by +: conv, linear, norm, bias, other")
    ] = ()
    dense_ends: Annotated[bool, Doc("send the first and the last layer of the model in fp32")] = False

    @property
    def keeps_residual(self) -> bool:
        """As the option says."""
        return self.error_feedback

    def leaves_dense(self, layer: Layer) -> bool:
        """As `min_numel`, `skip` and `dense_ends` say."""
        return (
            layer.numel <= self.min_numel
            or layer.kind in self.skip
            or (self.dense_ends and layer.position in (0.0, 1.0))
        )

    @property
    def emits(self) -> frozenset[type[Payload]]:
        """The method's own kinds, and `Dense` where the per-layer policy may leave a layer as it is."""
        leaves_some = bool(self.min_numel or self.skip or self.dense_ends)
        return super().emits | ({Dense} if leaves_some else set())
