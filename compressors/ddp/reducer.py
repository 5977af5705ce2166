"""The reducer: error feedback, momentum correction, encoding, and the mean over ranks of a bucket's gradients.

Source: error feedback as in Karimireddy et al. 2019 (arXiv:1901.09847): x = g + r, payload = encode(x), r' = x -
payload; momentum correction and momentum factor masking as in Lin et al. 2018 (Deep Gradient Compression,
arXiv:1712.01887), sections 3.1 and 3.2.
Differs: the residual is in units of the gradient (it does not contain the learning rate), so a learning-rate schedule
does not rescale it. A collective that adds 16-bit values on their way rounds each sum; the rank that rounds adds the
rounding error to its residual (a server, the host of `placed` and a backend's own all-reduce do not). Momentum is also
applied to layers that are sent uncompressed, so that these train as with the optimizer's own momentum.
"""

import abc
import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from collectives.base import Key, PendingSum
from collectives.kernels.library import kernels_in_use
from collectives.payloads import Bundle, Dense, Payload, members
from collectives.payloads.base import KeepLost
from collectives.payloads.batch import Batch
from collectives.payloads.sparse import IndexedValues
from collectives.transport.base import Transport
from compressors.base import (
    FP32_BYTES,
    Compressor,
    LayersEncoder,
    MultiRound,
    NonFiniteSum,
    PartsEncoder,
    PerLayer,
    SharedScale,
    Sparsifier,
)
from compressors.ddp.encode_group import BufferPool, EncodeGroup, LayerStore, group_layers
from compressors.ddp.report import Bucket, EncodedLayer
from compressors.kernels.residuals import accelerate, accelerate_parts, add
from compressors.layer import Layer, Memory, Step, copies, memory_nbytes

# (this rank's message, ids of the layers inside) -> the sum over ranks
SumPayloads = Callable[[Payload, Key], Payload]
# the same, but returns while the messages are under way
StartSum = Callable[[Payload, Key], PendingSum]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingReduction:
    """The exchange of a bucket whose messages are under way.

    Attributes:
        wait: blocks until all messages from other ranks have arrived.
        finish: waits, then writes the bucket's updates; sends nothing; call it once.
    """

    wait: Callable[[], object]
    finish: Callable[[], None]


DONE = PendingReduction(wait=lambda: None, finish=lambda: None)

# a group, its payload, and the seconds in which it was encoded
Encoded = tuple[EncodeGroup, Payload, float]


def _message(encoded: Sequence[Encoded]) -> Payload:
    payloads = [payload for _, payload, _ in encoded]
    return payloads[0] if len(payloads) == 1 else Bundle(payloads)


def keep_in(residual: torch.Tensor) -> KeepLost:
    """Return a function that adds rounding errors to a proposed residual, fp32 [numel]."""

    def keep(start: int, values: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        if positions is None:
            residual[start : start + values.numel()].add_(values)
        else:
            residual[start:].index_add_(0, positions, values)

    return keep


class Reducer(abc.ABC):
    """Compress gradients on one rank; keep residuals, momentum buffers and the compressor's own memory, by layer.

    `reducer_for` makes the right one for a compressor.

    Every call on a bucket only proposes new state: `commit` accepts it, `drop` discards it.

    Args:
        compressor: the compressor, with its options.
        momentum: momentum coefficient in [0, 1), used if the compressor applies the momentum itself.
        nesterov: apply Nesterov momentum.

    Attributes:
        memory: the compressor's own memory.
        last_encoded: the payloads of the last committed step, by the ids of the layers inside. Only their positions
            are valid, because a collective may have overwritten the values. Payloads of all elements are not kept.
    """

    def __init__(self, compressor: Compressor, *, momentum: float = 0.0, nesterov: bool = False) -> None:
        self.compressor = compressor
        self.memory = Memory()
        self.last_encoded: Mapping[Key, Payload] = {}
        self._momentum, self._nesterov = momentum, nesterov
        self._residuals, self._velocities = LayerStore(), LayerStore()
        self._buffers = BufferPool()
        self._encoded: dict[Key, Payload] = {}

    def reduce(self, bucket: Bucket, sum_payloads: SumPayloads, transport: Transport) -> None:
        """Replace each gradient with the mean over ranks of what the compressor transmitted.

        Every rank must call this method. It fills `bucket.encoded` and `bucket.encode_s`.

        Args:
            bucket: the bucket; its updates are written, and its gradients may be overwritten.
            sum_payloads: `BoundCollective.sum`, or a substitute that does not communicate.
            transport: used by compressors whose ranks agree on something before they encode.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        self.start(bucket, lambda payload, key: PendingSum.done(sum_payloads(payload, key)), transport).finish()

    @abc.abstractmethod
    def start(self, bucket: Bucket, start_sum: StartSum, transport: Transport) -> PendingReduction:
        """Begin to replace each gradient of a bucket with the mean over ranks of what the compressor transmitted.

        Return once this rank's message is being sent, so that the next bucket can be encoded. The other arguments and
        the errors are those of `reduce`; `start_sum` is `BoundCollective.start`.
        """

    def commit(self) -> None:
        """Accept the residuals and other state that calls proposed since the last `commit` or `drop`."""
        for state in (self._residuals, self._velocities, self.memory):
            state.commit()
        self._buffers.end_step()
        self.last_encoded, self._encoded = self._encoded, {}

    def drop(self) -> None:
        """Discard the residuals and other state that calls proposed: everything is bit for bit as before the step."""
        for state in (self._residuals, self._velocities, self.memory):
            state.drop()
        self._buffers.end_step()
        self._encoded = {}

    def scale_residuals_(self, factor: float, layers: Sequence[Layer]) -> None:
        """Multiply the residuals of these layers by a factor, between two steps."""
        residuals = self._residuals.by_layer()
        for layer in layers:
            if layer.id in residuals:
                residuals[layer.id].mul_(factor)

    def residual_norms(self) -> dict[int, float]:
        """Return, by layer id, the L2 norm of each layer's residual (the part of gradients that was not sent yet)."""
        return {layer_id: float(residual.norm()) for layer_id, residual in self._residuals.by_layer().items()}

    @property
    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the tensors that this reducer holds, by purpose."""
        payloads = [*self.last_encoded.values(), *self._encoded.values()]
        parts = (part for payload in payloads for part in vars(payload).values())
        return {
            "residual": self._residuals.accepted_nbytes,
            "proposed": self._residuals.proposed_nbytes,
            "momentum": self._velocities.accepted_nbytes + self._velocities.proposed_nbytes,
            "memory": self.memory.nbytes,
            "buffers": self._buffers.nbytes,
            "payloads": memory_nbytes(part for part in parts if isinstance(part, torch.Tensor)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, with tensors by layer id; "velocities" are the momentum buffers."""
        return {
            "residuals": copies(self._residuals.by_layer()),
            "velocities": copies(self._velocities.by_layer()),
            "memory": self.memory.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the whole state with one that `state_dict` returned."""
        self._residuals.load(state["residuals"])
        self._velocities.load(state["velocities"])
        self.memory.load_state_dict(state["memory"])

    def _groups(self, bucket: Bucket, *, together: bool = False) -> list[EncodeGroup]:
        bucket.step = dataclasses.replace(bucket.step, memory=self.memory)
        of_layers = bucket.layers, bucket.step, bucket.gradients, bucket.updates
        return group_layers(self.compressor, *of_layers, together=together)

    def _compensated(self, group: EncodeGroup, step: Step) -> torch.Tensor:
        """Return the tensor to send: the gradient, with momentum and residual if the compressor has them."""
        traits, gradients = self.compressor.traits, group.gradients
        keeps_residual = traits.keeps_residual and not group.dense
        if traits.clip_norm and not group.dense:
            limit = traits.clip_norm / math.sqrt(step.world_size)
            norm = math.sqrt(sum(float(gradient.float().norm()) ** 2 for gradient in gradients))
            gradients = [gradient * (limit / norm) for gradient in gradients] if norm > limit else gradients
        if not (traits.owns_momentum or keeps_residual or group.dense) and len(gradients) == 1:
            return gradients[0].float()
        residual = self._residuals.accepted(group) if keeps_residual else None
        x = self._residuals.propose(group) if keeps_residual else self._buffers.acquire(group)
        velocity = self._velocities.accepted(group) if traits.owns_momentum else None
        following = self._velocities.propose(group) if traits.owns_momentum else None
        if (
            velocity is not None
            and residual is not None
            and following is not None
            and group.is_plain
            and accelerate_parts(
                gradients, velocity, residual, self._momentum, nesterov=self._nesterov, now=following, out=x
            )
        ):
            return x
        for gradient, old, unsent, now, out in zip(
            gradients, *map(group.split, (velocity, residual, following, x)), strict=True
        ):
            if now is not None:
                accelerate(gradient, old, unsent, self._momentum, nesterov=self._nesterov, now=now, out=out)
            elif unsent is None:
                out.copy_(gradient)
            else:
                add(gradient, unsent, out=out)
        return x


class PerLayerReducer(Reducer):
    """Sum the gradients of a bucket over all ranks: encode, exchange and decode one payload per group of layers.

    A group is one layer, or all layers of the bucket for compressors that treat them as one vector.
    """

    compressor: PerLayer

    def __init__(self, compressor: PerLayer, *, momentum: float = 0.0, nesterov: bool = False) -> None:
        super().__init__(compressor, momentum=momentum, nesterov=nesterov)
        self._scratch = torch.empty(0, dtype=torch.float32)  # reused, as new pages cost more than sums
        self._averages = type(compressor).finish is PerLayer.finish
        self._scaled = compressor if isinstance(compressor, SharedScale) else None
        traits = compressor.traits
        may_add = traits.keeps_residual and not (traits.owns_momentum or traits.needs_all_ranks)
        self._encode_sum = (
            compressor.encode_sum if may_add and type(compressor).encode_sum is not PerLayer.encode_sum else None
        )
        self._layers_encoder = (
            compressor if isinstance(compressor, LayersEncoder) and compressor.encodes_layers else None
        )
        self._encode_parts = None
        if isinstance(compressor, PartsEncoder) and type(compressor).encode is PartsEncoder.encode:
            adds_something = traits.keeps_residual or traits.owns_momentum or traits.clip_norm
            self._encode_parts = None if adds_something else compressor.encode_parts

    @property
    @override
    def nbytes(self) -> dict[str, int]:
        of_all = super().nbytes
        return of_all | {"buffers": of_all["buffers"] + self._scratch.nbytes}

    @override
    def start(self, bucket: Bucket, start_sum: StartSum, transport: Transport) -> PendingReduction:
        groups = self._groups_to_encode(bucket)
        if not groups:
            return DONE
        encoded: list[Encoded] = []
        finds_nonfinite = getattr(self._encode_sum, "finds_nonfinite", False)
        if finds_nonfinite and all(self._residual_to_add(group) is not None for group in groups):
            with contextlib.suppress(NonFiniteSum):
                encoded = self._encode_all(groups, bucket, transport, screened=False)
        if not encoded:
            if bucket.screen():
                groups = self._groups_to_encode(bucket)
            encoded = self._encode_all(groups, bucket, transport)
        # Collectives that keep state per layer need the ids in the order in which the layers lie in the message.
        pending = start_sum(_message(encoded), tuple(layer.id for group in groups for layer in group.layers))
        bucket.gradients = bucket.updates  # backward can reuse their memory while the message travels
        for group, payload, seconds in encoded:
            group.gradients.clear()
            bucket.encoded += self._layers(group, payload, seconds, bucket.step)

        def finish() -> None:
            of_layers = self._groups(bucket) if any(map(self._is_batch, groups)) else groups
            self._finish(of_layers, pending.finish(), bucket)
            self._buffers.release(groups)

        return PendingReduction(wait=pending.wait, finish=finish)

    def message(self, bucket: Bucket, transport: Transport | None = None) -> Payload | None:
        """Do the first half of `reduce`: return the message to be summed, or None if the bucket has no elements.

        Raises:
            TypeError: the compressor needs all ranks, and there is no transport.
        """
        if self.compressor.traits.needs_all_ranks and transport is None:
            raise TypeError(f"{self.compressor.component_name} needs all ranks while it encodes; call reduce")
        if not (groups := self._groups_to_encode(bucket)):
            return None
        encoded = self._encode_all(groups, bucket, transport)
        for group, payload, seconds in encoded:
            bucket.encoded += self._layers(group, payload, seconds, bucket.step)
        return _message(encoded)

    def free_buffers(self) -> None:
        """Free the memory of messages that `message` returned; call it once they were sent."""
        self._buffers.end_step()

    def finish_bucket(self, total: Payload, bucket: Bucket) -> None:
        """Do the second half of `reduce`: write the updates that follow from the sum of all messages."""
        self._finish(self._groups(bucket), total, bucket)

    def _groups_to_encode(self, bucket: Bucket) -> list[EncodeGroup]:
        """Return the groups of a bucket; if `encode_layers` can serve, its compressed layers are in one group."""
        may = self._layers_encoder is not None and kernels_in_use() == "native"
        return self._groups(bucket, together=may and all(tensor.is_cpu for tensor in bucket.updates))

    def _encode_all(
        self, groups: Sequence[EncodeGroup], bucket: Bucket, transport: Transport | None, *, screened: bool = True
    ) -> list[Encoded]:
        """Encode each group; if ranks share scales, agree on the scales with the other ranks first.

        Raises:
            NonFiniteSum: `screened` is False, and the compressor found a value that is not finite.
        """
        inputs: list[torch.Tensor | None] = [None] * len(groups)
        if self._scaled is not None and self._scaled.traits.needs_all_ranks:
            assert transport is not None
            started = time.perf_counter()
            sent = [self._compensated(group, bucket.step) for group in groups]
            bucket.encode_s += time.perf_counter() - started
            given = [(group.layer, x) for group, x in zip(groups, sent, strict=True) if not group.dense]
            self._scaled.agree(given, bucket.step, transport)
            inputs = [*sent]
        return [self._encode(group, x, bucket, screened=screened) for group, x in zip(groups, inputs, strict=True)]

    def _residual_to_add(self, group: EncodeGroup) -> torch.Tensor | None:
        """Return the residual that `encode_sum` adds to this group's gradients; None if `encode_sum` cannot be used."""
        if self._encode_sum is None or group.dense or not group.is_plain:
            return None
        return self._residuals.accepted(group)

    def _is_batch(self, group: EncodeGroup) -> bool:
        # of several layers, each of which becomes a payload of its own
        return self.compressor.granularity == "layer" and len(group.layers) > 1 and not group.dense

    def _encode_together(self, group: EncodeGroup, step: Step, *, screened: bool) -> Payload:
        """Encode all layers of a group in one call; what is not sent becomes the group's proposed residual."""
        assert self._layers_encoder is not None
        encode = self._layers_encoder.encode_layers
        if not self.compressor.traits.keeps_residual:
            gradients = group.gradients if group.is_plain else group.split(self._compensated(group, step))
            return encode(gradients, None, None, group.layers, step)
        residual = self._residual_to_add(group)
        if residual is not None:
            try:
                return encode(group.gradients, residual, self._residuals.propose(group), group.layers, step)
            except NonFiniteSum:
                if not screened:
                    raise
        return encode([], None, self._compensated(group, step), group.layers, step)

    def _encode_in_place(self, group: EncodeGroup, step: Step, *, screened: bool) -> Payload | None:
        """Encode the gradients in place; one pass also adds the residual and writes the proposed residual.

        Return None if that is not possible here, or if the sum of gradient and residual overflows although the
        gradient is finite.
        """
        if self._encode_parts is not None and not group.dense and group.is_plain:
            return self._encode_parts(group.gradients, group.layer, step)
        residual = self._residual_to_add(group)
        if self._encode_sum is None or residual is None:
            return None
        try:
            return self._encode_sum(group.gradients, residual, self._residuals.propose(group), group.layer, step)
        except NonFiniteSum:
            if screened:  # all gradients are finite, so the sum overflowed: the caller encodes it as usual
                return None
            raise

    def _encode(self, group: EncodeGroup, x: torch.Tensor | None, bucket: Bucket, *, screened: bool) -> Encoded:
        """Encode a group of layers; what the payload leaves of its input becomes the group's proposed residual.

        Args:
            group: the group.
            x: the input, fp32 [group.layer.numel]; None for the group's gradients, with momentum and residual.
            bucket: the bucket of the group; the seconds are added to its `encode_s`.
            screened: True if the gradients are known to be finite.
        """
        compressor, traits, step = self.compressor, self.compressor.traits, bucket.step
        keeps_residual = traits.keeps_residual and not group.dense
        started = time.perf_counter()
        encode = self._encode_together if self._is_batch(group) else self._encode_in_place
        payload = encode(group, step, screened=screened) if x is None else None
        if payload is None:
            x = self._compensated(group, step) if x is None else x
            payload = Dense(x) if group.dense else compressor.encode(x, group.layer, step)
            if keeps_residual and self._scaled is not None:
                self._scaled.subtract_(x, payload, group.layer, step)
            elif keeps_residual:
                payload.subtract_from_(x)
        if keeps_residual and self._averages:
            payload.keep_lost = keep_in(self._residuals.propose(group))
        if not group.dense:
            if traits.owns_momentum and isinstance(payload, IndexedValues):
                sent = payload.positions if payload.values.all() else payload.positions[payload.values != 0]
                self._velocities.propose(group).index_fill_(0, sent, 0)
            elif traits.owns_momentum and isinstance(payload, Batch):
                payload.clear_in_(self._velocities.propose(group))
            if payload.num_entries < group.layer.numel:
                self._encoded[group.key] = payload
        seconds = time.perf_counter() - started
        bucket.encode_s += seconds
        return group, payload, seconds

    def _layers(self, group: EncodeGroup, payload: Payload, seconds: float, step: Step) -> list[EncodedLayer]:
        """Divide a payload's bytes among the layers by the entries each sends, and the seconds by the layers' sizes."""
        counts, kind = [payload.num_entries], type(payload)
        if isinstance(payload, Batch):
            counts, kind = list(payload.counts), payload.kind
        elif len(group.layers) > 1:
            borders = list(itertools.accumulate([layer.numel for layer in group.layers], initial=0))
            before = borders if payload.num_entries else [0] * len(borders)
            if isinstance(payload, IndexedValues):
                before = payload.entries_before(borders)
            counts = [stop - start for start, stop in itertools.pairwise(before)]
        wanted = None
        if isinstance(self.compressor, Sparsifier) and self.compressor.granularity == "layer" and not group.dense:
            wanted = None if isinstance(payload, Dense) else self.compressor.density_for(group.layer, step)
        numel, total = group.layer.numel, sum(counts)
        lengths: Sequence[float] = (
            payload.lengths
            if isinstance(payload, Batch)
            else [
                payload.nbytes * (count / total if total else layer.numel / numel)
                for layer, count in zip(group.layers, counts, strict=True)
            ]
        )
        return [
            EncodedLayer(
                layer=layer,
                payload=kind.__name__,
                nbytes=nbytes,
                num_entries=count,
                seconds=seconds * layer.numel / numel,
                density_wanted=wanted,
            )
            for layer, count, nbytes in zip(group.layers, counts, lengths, strict=True)
        ]

    def _finish(self, groups: Sequence[EncodeGroup], total: Payload, bucket: Bucket) -> None:
        started = time.perf_counter()
        numels = [group.layer.numel for group in groups]
        for group, part in zip(groups, members(total, numels), strict=True):
            if (group.dense or self._averages) and part.write_to(group.updates, divisor=bucket.step.world_size):
                continue
            alone = len(group.updates) == 1
            out = group.updates[0] if alone else self._room_for(group)
            if group.dense:
                out.zero_()
                part.add_to_(out, divisor=bucket.step.world_size)
            else:
                self.compressor.finish(part, group.layer, bucket.step, out)
            if not alone:
                group.scatter_to_updates(out)
        bucket.encode_s += time.perf_counter() - started

    def _room_for(self, group: EncodeGroup) -> torch.Tensor:
        # scratch memory for the update of a group, [group.layer.numel] of `group.dtype`
        numel, kind = group.layer.numel, (group.device, group.dtype)
        if self._scratch.numel() < numel or (self._scratch.device, self._scratch.dtype) != kind:
            self._scratch = torch.empty(numel, dtype=group.dtype, device=group.device)
        return self._scratch[:numel]


class MultiRoundReducer(Reducer):
    """The reducer of a compressor that averages several fp32 tensors per bucket over ranks, one after another."""

    compressor: MultiRound

    def __init__(self, compressor: MultiRound, *, momentum: float = 0.0, nesterov: bool = False) -> None:
        super().__init__(compressor, momentum=momentum, nesterov=nesterov)
        self._kept_gradients: dict[int, torch.Tensor] = {}  # by layer id

    @property
    @override
    def nbytes(self) -> dict[str, int]:
        of_all = super().nbytes
        return of_all | {"buffers": of_all["buffers"] + memory_nbytes(self._kept_gradients.values())}

    @override
    def start(self, bucket: Bucket, start_sum: StartSum, transport: Transport) -> PendingReduction:
        """Exchange the whole bucket before returning, because later messages depend on the means of earlier ones."""
        bucket.screen()
        groups = self._groups(bucket)
        if not groups:
            return DONE
        started = time.perf_counter()
        waited_s = 0.0

        def average(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal waited_s
            began = time.perf_counter()
            total = start_sum(Dense(tensor), tuple(layer.id for layer in bucket.layers)).finish()
            waited_s += time.perf_counter() - began
            mean = torch.zeros(tensor.numel(), dtype=torch.float32, device=total.device)
            total.add_to_(mean, divisor=bucket.step.world_size)
            return mean

        inputs = [self._compensated(group, bucket.step) for group in groups]
        self._keep_gradients(bucket)
        bucket.gradients = bucket.updates
        for group in groups:
            group.gradients.clear()
        num_compressed = sum(not group.dense for group in groups)  # one layer each; they come before the dense group
        compressed = [(group.layer, x) for group, x in zip(groups[:num_compressed], inputs, strict=False)]
        updates = [group.updates[0] for group in groups[:num_compressed]]
        means = self.compressor.reduce(compressed, inputs[num_compressed:], bucket.step, average, updates)
        if self.compressor.traits.keeps_residual:
            for x, update in zip(inputs, updates, strict=False):
                x.sub_(update)
        for group, mean in zip(groups[num_compressed:], means, strict=True):
            group.scatter_to_updates(mean)
        bucket.encode_s += time.perf_counter() - started - waited_s
        self._report(groups, bucket)
        return DONE

    def _keep_gradients(self, bucket: Bucket) -> None:
        """Keep a step's gradients until the next step's have been allocated.

        If they are freed at once, the C library returns their pages to the system, and touching new ones takes 7 % of a
        step of ResNet-18.
        """
        of_layers = zip(bucket.layers, bucket.gradients, bucket.updates, strict=True)
        self._kept_gradients |= {layer.id: gradient for layer, gradient, update in of_layers if gradient is not update}

    def _report(self, groups: Sequence[EncodeGroup], bucket: Bucket) -> None:
        numel = sum(group.layer.numel for group in groups)
        for group in groups:
            for layer in group.layers:
                num_entries = layer.numel if group.dense else self.compressor.num_exchanged(layer, bucket.step)
                entry = EncodedLayer(
                    layer=layer,
                    payload="Dense",
                    nbytes=FP32_BYTES * num_entries,
                    num_entries=num_entries,
                    seconds=bucket.encode_s * layer.numel / numel,
                )
                bucket.encoded.append(entry)


def reducer_for(compressor: Compressor, *, momentum: float = 0.0, nesterov: bool = False) -> Reducer:
    """Return a new reducer for a compressor that encodes, or that exchanges several messages per bucket."""
    if isinstance(compressor, PerLayer):
        return PerLayerReducer(compressor, momentum=momentum, nesterov=nesterov)
    assert isinstance(compressor, MultiRound), f"{compressor.component_name} brings a hook of its own"
    return MultiRoundReducer(compressor, momentum=momentum, nesterov=nesterov)
