"""Reducer: what one rank keeps while it compresses, and the way from its gradients to the mean of what all ranks sent.

Source: error feedback as in Karimireddy et al. 2019 (arXiv:1901.09847): x = g + r, payload = encode(x), r' = x -
payload; momentum correction and momentum factor masking as in Lin et al. 2018 (Deep Gradient Compression,
arXiv:1712.01887), sections 3.1 and 3.2.
Differs: the residual is in gradient units (no learning rate inside), so a schedule does not rescale what waits to be
sent; a collective that adds 16-bit values on their way rounds each sum, and the rank that rounds keeps the difference
in its residual (a server, the host of `placed` and a backend's own all-reduce keep none); the velocity is kept per
layer also where the per-layer policy sends a layer whole, so that taking the optimizer's momentum over changes nothing
for those layers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from collectives.base import Key, PendingSum
from collectives.payloads.base import KeepLost, Payload
from collectives.payloads.bundle import Bundle, members
from collectives.payloads.dense import Dense
from collectives.payloads.sparse import IndexedValues
from collectives.transport.base import Transport
from compressors.base import FP32_BYTES, Compressor, NonFiniteSum
from compressors.ddp.encode_group import BufferPool, EncodeGroup, LayerStore, group_layers
from compressors.ddp.report import Bucket, EncodedLayer
from compressors.layer import Memory, Step, copies

SumPayloads = Callable[[Payload, Key], Payload]
"""(this rank's message, ids of the layers inside) -> the sum over ranks"""
StartSum = Callable[[Payload, Key], PendingSum]
"""the same, under way"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingReduction:
    """A bucket's exchange under way.

    Attributes:
        wait: blocks until nothing is to come from other ranks.
        finish: does so too, and replaces the bucket's gradients; sends nothing; to be called once.
    """

    wait: Callable[[], object]
    finish: Callable[[], None]


DONE = PendingReduction(wait=lambda: None, finish=lambda: None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Encoded:
    """What one unit sends, and what the report says of it; `density_wanted` as in `EncodedLayer`."""

    unit: EncodeGroup
    payload: Payload
    seconds: float
    density_wanted: float | None


def _message(encoded: Sequence[_Encoded]) -> Payload:
    """All units' payloads as one."""
    return encoded[0].payload if len(encoded) == 1 else Bundle([one.payload for one in encoded])


def _account(encoded: Sequence[_Encoded], bucket: Bucket) -> None:
    """Enter into the bucket's report what was sent."""
    for one in encoded:
        bucket.encoded += one.unit.account(one.payload, one.seconds, one.density_wanted)


def keep_in(residual: torch.Tensor) -> KeepLost:
    """Return what adds to a residual, fp32 [numel]: dropped and accepted with it."""

    def keep(start: int, values: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        if positions is None:
            residual[start : start + values.numel()].add_(values)
        else:
            residual[start:].index_add_(0, positions, values)

    return keep


@functools.cache
def _has_own(compressor: type[Compressor], name: str) -> bool:
    """Whether a class has this form of `encode`, and has not derived from one that has it to encode in another way."""
    definer, encoder = (
        next(number for number, cls in enumerate(compressor.__mro__) if method in vars(cls))
        for method in (name, "encode")
    )
    return definer <= encoder and compressor.__mro__[definer] is not Compressor


class Reducer:
    """A compressor at work on one rank: residuals, velocities and the method's own memory, keyed by layer.

    Every call on a bucket only proposes new state: `commit` accepts it, `drop` forgets it.

    Args:
        compressor: with its options.
        momentum: for a compressor that owns it, the share of the last velocity that is kept, in [0, 1).
        nesterov: look ahead along the velocity.

    Attributes:
        memory: what the method keeps.
        last_encoded: what `encode` made at the last committed step, by the ids of the layers in it; where it sends,
            not what: a collective may have overwritten the values since. Payloads that send every element are not kept.
    """

    def __init__(self, compressor: Compressor, *, momentum: float = 0.0, nesterov: bool = False) -> None:
        self.compressor = compressor
        self.memory = Memory()
        self.last_encoded: Mapping[Key, Payload] = {}
        self._momentum = momentum
        self._nesterov = nesterov
        self._residuals = LayerStore()
        self._velocities = LayerStore()
        self._rooms = BufferPool()
        self._encoded: dict[Key, Payload] = {}
        self._scratch = torch.empty(0, dtype=torch.float32)  # kept between steps, for fresh pages cost more than sums

    def reduce(self, bucket: Bucket, sum_payloads: SumPayloads, transport: Transport) -> None:
        """Replace each gradient by the mean over ranks of what was transmitted; every rank must call.

        Fills `bucket.encoded` and `bucket.encode_s`.

        Args:
            bucket: its gradients are overwritten.
            sum_payloads: `BoundCollective.sum`, or what stands for it where a rank is alone.
            transport: for what ranks agree on before they encode.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        self.start(bucket, lambda payload, key: PendingSum.done(sum_payloads(payload, key)), transport).finish()

    def start(self, bucket: Bucket, start_sum: StartSum, transport: Transport) -> PendingReduction:
        """Begin `reduce`: what this rank sends is on its way when it returns, so that the next bucket can be encoded.

        A compressor of several rounds does everything at once. Args and errors as of `reduce`, with
        `BoundCollective.start` for `start_sum`.
        """
        units = self._units(bucket)
        finds_nonfinite = self.compressor.notices_nonfinite and all(map(self._takes_sum, units))
        if not finds_nonfinite and bucket.screen():
            units = self._units(bucket)
        if self.compressor.several_rounds:
            self._reduce_in_rounds(units, bucket, lambda payload, key: start_sum(payload, key).finish())
            return DONE
        if not units:
            return DONE
        # A collective that keeps something per layer needs the ids in the order in which the message holds them.
        key = tuple(layer.id for unit in units for layer in unit.layers)
        try:
            encoded = self._encode_all(units, bucket, transport, screened=not finds_nonfinite)
        except NonFiniteSum:
            if bucket.screen():
                units = self._units(bucket)
            encoded = self._encode_all(units, bucket, transport)
        pending = start_sum(_message(encoded), key)
        bucket.let_go()  # while the message travels
        for unit in units:
            unit.gradients.clear()
        _account(encoded, bucket)

        def finish() -> None:
            self._finish(units, pending.finish(), bucket)
            self._rooms.release(units)

        return PendingReduction(wait=pending.wait, finish=finish)

    def message(self, bucket: Bucket, transport: Transport | None = None) -> Payload | None:
        """Return the first half of `reduce`, for who adds messages elsewhere; None for a bucket without elements.

        Raises:
            TypeError: the method needs all ranks at once, and there is no transport; or it takes several rounds.
        """
        if self.compressor.several_rounds or (self.compressor.needs_all_ranks and transport is None):
            raise TypeError(f"{self.compressor.component_name} needs all ranks while it encodes; call reduce")
        if not (units := self._units(bucket)):
            return None
        encoded = self._encode_all(units, bucket, transport)
        _account(encoded, bucket)
        return _message(encoded)

    def finish_bucket(self, total: Payload, bucket: Bucket) -> None:
        """Do the second half of `reduce`: replace each gradient by what the sum of all messages stands for."""
        self._finish(self._units(bucket), total, bucket)

    def commit(self) -> None:
        """Accept the state proposed since the last `commit` or `drop`."""
        for state in (self._residuals, self._velocities, self.memory):
            state.commit()
        self._rooms.end_step()
        self.last_encoded, self._encoded = self._encoded, {}

    def drop(self) -> None:
        """Forget the proposed state: everything is bit for bit what it was before the step."""
        for state in (self._residuals, self._velocities, self.memory):
            state.drop()
        self._rooms.end_step()
        self._encoded = {}

    def residual_norms(self) -> dict[int, float]:
        """Return the L2 norm of what each layer has not sent yet, by layer id."""
        return {layer_id: float(residual.norm()) for layer_id, residual in self._residuals.by_layer().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, tensors by layer id; it differs between ranks."""
        return {
            "residuals": copies(self._residuals.by_layer()),
            "velocities": copies(self._velocities.by_layer()),
            "memory": self.memory.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace everything by what `state_dict` gave."""
        self._residuals.load(state["residuals"])
        self._velocities.load(state["velocities"])
        self.memory.load_state_dict(state["memory"])

    def _units(self, bucket: Bucket) -> list[EncodeGroup]:
        """Cut the bucket, and open this rank's memory to the compressor."""
        bucket.step = dataclasses.replace(bucket.step, memory=self.memory)
        return group_layers(self.compressor, bucket.layers, bucket.step, bucket.gradients, bucket.updates)

    def _encode_all(
        self, units: Sequence[EncodeGroup], bucket: Bucket, transport: Transport | None, *, screened: bool = True
    ) -> list[_Encoded]:
        """Compensate, agree with the other ranks on what the method shares, and encode.

        Raises:
            NonFiniteSum: the bucket was not screened, and a method that notices it found what is not finite.
        """
        started = time.perf_counter()
        inputs = [
            None
            if self._takes_sum(unit) or self._takes_parts(unit, bucket.step)
            else self._compensated(unit, bucket.step)
            for unit in units
        ]
        bucket.encode_s += time.perf_counter() - started
        if transport is not None:
            given = [(unit.layer, x) for unit, x in zip(units, inputs, strict=True) if x is not None and not unit.dense]
            self.compressor.agree(given, bucket.step, transport)
        return self._encode(units, inputs, bucket, screened=screened)

    def _compensated(self, unit: EncodeGroup, step: Step) -> torch.Tensor:
        """The gradient with momentum, and where a residual is kept, plus what was not sent before."""
        limit = None if unit.dense else self.compressor.clip_limit(step)
        if limit is not None:
            norm = math.sqrt(sum(float(gradient.float().norm()) ** 2 for gradient in unit.gradients))
            if norm > limit:
                unit = dataclasses.replace(unit, gradients=[g * (limit / norm) for g in unit.gradients])
        owns_momentum = self.compressor.owns_momentum
        keeps_residual = self.compressor.keeps_residual and not unit.dense
        if not (owns_momentum or keeps_residual or unit.dense) and len(unit.gradients) == 1:
            return unit.gradients[0].float()
        residual = self._residuals.accepted(unit) if keeps_residual else None
        x = self._residuals.propose(unit) if keeps_residual else self._rooms.acquire(unit)
        if owns_momentum:
            old, velocity = self._velocities.accepted(unit), self._velocities.propose(unit)
            unit.accelerate(old, residual, self._momentum, nesterov=self._nesterov, now=velocity, out=x)
        else:
            unit.add_gradient(residual, out=x)
        return x

    def _takes_sum(self, unit: EncodeGroup) -> bool:
        """Whether the compressor may add the residual itself: nothing is to be known of the sum before it encodes."""
        compressor = self.compressor
        return (
            _has_own(type(compressor), "encode_sum")
            and compressor.keeps_residual
            and not (unit.dense or compressor.owns_momentum or compressor.needs_all_ranks)
            and self._residuals.accepted(unit) is not None
            and unit.is_plain
        )

    def _takes_parts(self, unit: EncodeGroup, step: Step) -> bool:
        """Whether the compressor may encode the gradients where they lie: nothing is added to them before."""
        compressor = self.compressor
        return (
            _has_own(type(compressor), "encode_parts")
            and compressor.clip_limit(step) is None
            and not (unit.dense or compressor.keeps_residual or compressor.owns_momentum or compressor.needs_all_ranks)
            and unit.is_plain
        )

    def _encode_in_place(self, unit: EncodeGroup, step: Step, *, screened: bool) -> Payload | None:
        """Gradients encoded where they lie; a residual is added in the same pass, which leaves the proposed one."""
        if not self.compressor.keeps_residual:
            return self.compressor.encode_parts(unit.gradients, unit.layer, step)
        residual = self._residuals.accepted(unit)
        assert residual is not None
        left = self._residuals.propose(unit)
        try:
            return self.compressor.encode_sum(unit.gradients, residual, left, unit.layer, step)
        except NonFiniteSum:
            if screened:  # finite numbers whose sum overflows are encoded like any others
                return None
            raise

    def _encode(
        self, units: Sequence[EncodeGroup], inputs: Sequence[torch.Tensor | None], bucket: Bucket, *, screened: bool
    ) -> list[_Encoded]:
        """What this rank sends; each input becomes its proposed residual; None: the gradients are encoded in place."""
        compressor, encoded = self.compressor, []
        for unit, x in zip(units, inputs, strict=True):
            started = time.perf_counter()
            payload = self._encode_in_place(unit, bucket.step, screened=screened) if x is None else None
            if payload is None:
                x = self._compensated(unit, bucket.step) if x is None else x
                payload = Dense(x) if unit.dense else compressor.encode(x, unit.layer, bucket.step)
                if compressor.keeps_residual and not unit.dense:
                    compressor.subtract_(x, payload, unit.layer, bucket.step)
            if compressor.keeps_residual and not unit.dense and type(compressor).finish is Compressor.finish:
                payload.keep_lost = keep_in(self._residuals.proposed(unit))
            if not unit.dense:
                if compressor.owns_momentum and isinstance(payload, IndexedValues):
                    self._velocities.proposed(unit).index_fill_(0, payload.positions[payload.values != 0], 0)
                if payload.num_entries < unit.layer.numel:
                    self._encoded[unit.key] = payload
            seconds = time.perf_counter() - started
            bucket.encode_s += seconds
            has_aim = compressor.granularity == "layer" and not isinstance(payload, Dense)
            wanted = compressor.density_for(unit.layer, bucket.step) if has_aim else None
            encoded.append(_Encoded(unit=unit, payload=payload, seconds=seconds, density_wanted=wanted))
        return encoded

    def _finish(self, units: Sequence[EncodeGroup], total: Payload, bucket: Bucket) -> None:
        """Turn the sum of all ranks' messages into each gradient's update."""
        started = time.perf_counter()
        numels = [unit.layer.numel for unit in units]
        if units:
            device, dtype = units[0].device, max((unit.dtype for unit in units), key=lambda dtype: dtype.itemsize)
            if self._scratch.numel() < max(numels) or (self._scratch.device, self._scratch.dtype) != (device, dtype):
                self._scratch = torch.empty(max(numels), dtype=dtype, device=device)
        averages = type(self.compressor).finish is Compressor.finish
        for unit, part in zip(units, members(total, numels), strict=True):
            if (unit.dense or averages) and part.write_to(unit.updates, divisor=bucket.step.world_size):
                continue
            alone = len(unit.updates) == 1
            out = unit.updates[0] if alone else self._scratch[: unit.layer.numel]
            if unit.dense:
                out.zero_()
                part.add_to_(out, divisor=bucket.step.world_size)
            else:
                self.compressor.finish(part, unit.layer, bucket.step, out)
            if not alone:
                unit.scatter_to_updates(out)
        bucket.encode_s += time.perf_counter() - started

    def _reduce_in_rounds(self, units: Sequence[EncodeGroup], bucket: Bucket, sum_payloads: SumPayloads) -> None:
        """`reduce` for a compressor of several rounds: each sends one fp32 tensor and goes on with its mean."""
        started = time.perf_counter()
        waited_s = 0.0

        def average(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal waited_s
            began = time.perf_counter()
            total = sum_payloads(Dense(tensor), tuple(layer.id for layer in bucket.layers))
            waited_s += time.perf_counter() - began
            mean = torch.zeros(tensor.numel(), dtype=torch.float32, device=total.device)
            total.add_to_(mean, divisor=bucket.step.world_size)
            return mean

        inputs = [self._compensated(unit, bucket.step) for unit in units]
        compressed = [(unit.layer, x) for unit, x in zip(units, inputs, strict=True) if not unit.dense]
        rest = [x for unit, x in zip(units, inputs, strict=True) if unit.dense]
        updates = [unit.updates[0] for unit in units if not unit.dense]  # layers by themselves, first
        means = self.compressor.reduce(compressed, rest, bucket.step, average, updates)
        if self.compressor.keeps_residual:
            for (_, x), update in zip(compressed, updates, strict=True):
                x.sub_(update)
        for unit, mean in zip(units[len(updates) :], means, strict=True):
            unit.scatter_to_updates(mean)
        bucket.encode_s += time.perf_counter() - started - waited_s
        numel = sum(unit.layer.numel for unit in units)
        for layer, dense in ((layer, unit.dense) for unit in units for layer in unit.layers):
            num_entries = layer.numel if dense else self.compressor.num_exchanged(layer, bucket.step)
            nbytes, seconds = FP32_BYTES * num_entries, bucket.encode_s * layer.numel / numel
            bucket.encoded.append(
                EncodedLayer(layer=layer, payload="Dense", nbytes=nbytes, num_entries=num_entries, seconds=seconds)
            )
