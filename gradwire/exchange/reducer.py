"""The reducer: error feedback, momentum correction, encoding, and the mean over ranks of a bucket's gradients.

Source: error feedback as in Karimireddy et al. 2019 (arXiv:1901.09847): x = g + r, payload = encode(x), r' = x -
payload; momentum correction and momentum factor masking as in Lin et al. 2018 (Deep Gradient Compression,
arXiv:1712.01887), sections 3.1 and 3.2.
Differs: the residual is in units of the gradient (it does not contain the learning rate), so a learning-rate schedule
does not rescale it. A collective that adds 16-bit values on intermediate ranks rounds each sum; the rank that rounds
adds the rounding error to its residual (a server, the host of `placed` and a backend's own all-reduce do not). Momentum
is also applied to layers that are sent uncompressed, so that these train as with the optimizer's own momentum.
"""

import abc
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from typing_extensions import override

from collectives.base import Key, PendingSum
from collectives.payloads import Dense, Payload, members
from collectives.payloads.base import KeepLost
from collectives.schedule.rounds import leaves
from collectives.transport.base import Transport
from compressors.base import FP32_BYTES, Compressor, MultiRound, PerLayer
from compressors.kernels.residuals import accelerate
from compressors.layer import Layer, Memory, Step, copies, memory_nbytes
from compressors.parts.buckets import NonFinite, bundled, clip_factor, split, summed
from compressors.quantizers import SharedScale
from gradwire.exchange.encode_group import UNCOMPRESSED, EncodeGroup, LayerStore, group_layers
from gradwire.exchange.marks import mark
from gradwire.exchange.report import Bucket, EncodedLayer

# (this rank's message, ids of the layers inside) -> the sum over ranks
SumPayloads = Callable[[Payload, Key], Payload]
# like `SumPayloads`, but this function returns while the messages are still being sent
StartSum = Callable[[Payload, Key], PendingSum]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingReduction:
    """The exchange of a bucket whose messages are still being sent or received.

    Attributes:
        wait: blocks until all messages from other ranks have arrived.
        finish: waits as `wait` does, then writes the bucket's updates; sends nothing; call it once.
    """

    wait: Callable[[], object]
    finish: Callable[[], None]


DONE = PendingReduction(wait=lambda: None, finish=lambda: None)

# a group of layers, its payload, and the seconds in which it was encoded
Encoded = tuple[EncodeGroup, Payload, float]
# what `encode_bucket` gets: the gradients, the residual to add, and the memory for what is not sent
Inputs = tuple[Sequence[torch.Tensor], torch.Tensor | None, torch.Tensor | None]


def keep_in(residual: torch.Tensor) -> KeepLost:
    """Return a function that adds rounding errors to the next step's residual, fp32 [numel]."""

    def keep(start: int, values: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        if positions is None:
            residual[start : start + values.numel()].add_(values)
        else:
            residual[start:].index_add_(0, positions, values)

    return keep


class Reducer(abc.ABC):
    """Compresses gradients on one rank, and keeps residuals, momentum buffers and the compressor's own memory by layer.

    `reducer_for` creates the right kind of reducer for a compressor.

    Calls on buckets compute new state but do not replace the current state: `commit` does that, and `drop` discards the
    new state.

    Args:
        compressor: the compressor, with its options.
        momentum: momentum coefficient in [0, 1), used if the compressor applies the momentum itself.
        nesterov: apply Nesterov momentum.

    Attributes:
        memory: the compressor's own memory.
        last_encoded: the payloads of the last committed step, by the ids of the layers in each payload. Only the
            positions of their entries are valid, because a collective may have overwritten the values. Payloads that
            contain every element are not kept.
    """

    def __init__(self, compressor: Compressor, *, momentum: float = 0.0, nesterov: bool = False) -> None:
        self.compressor = compressor
        self.memory = Memory()
        self.last_encoded: Mapping[Key, Payload] = {}
        self._momentum, self._nesterov = momentum, nesterov
        self._residuals, self._velocities = LayerStore(), LayerStore()
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

        This method returns while this rank's message is still being sent, so that the next bucket can be encoded.
        `start_sum` is `BoundCollective.start`; the other arguments and the errors are the same as for `reduce`.
        """

    def commit(self) -> None:
        """Make the residuals and other state that were computed since the last `commit` or `drop` the current state."""
        for state in (self._residuals, self._velocities, self.memory):
            state.commit()
        self.last_encoded, self._encoded = self._encoded, {}

    def drop(self) -> None:
        """Discard the residuals and other state computed in this step: all state is bit for bit as before the step."""
        for state in (self._residuals, self._velocities, self.memory):
            state.drop()
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
        parts = (part for payload in payloads for leaf in leaves(payload) for part in vars(leaf).values())
        return {
            "residual": self._residuals.accepted_nbytes,
            "proposed": self._residuals.proposed_nbytes,
            "momentum": self._velocities.accepted_nbytes + self._velocities.proposed_nbytes,
            "memory": self.memory.nbytes,
            "buffers": self.memory.buffers.nbytes,
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

    def _groups(self, bucket: Bucket, *, apart: bool = False) -> list[EncodeGroup]:
        bucket.step = dataclasses.replace(bucket.step, memory=self.memory)
        return group_layers(self.compressor, bucket.layers, bucket.step, bucket.gradients, bucket.updates, apart=apart)

    def _inputs(self, group: EncodeGroup, step: Step) -> Inputs:
        """Return what `encode_bucket` gets: clipped gradients, the residual, and the memory for what is not sent.

        If the compressor applies momentum, the gradients already contain momentum and residual.
        """
        traits, layers, gradients = group.compressor.traits, group.layers, group.gradients
        if traits.clip_norm:
            limit = traits.clip_norm / math.sqrt(step.world_size)
            factors = [clip_factor([gradient.float()], limit) for gradient in gradients]
            gradients = [
                gradient * factor if factor < 1 else gradient
                for gradient, factor in zip(gradients, factors, strict=True)
            ]
        residual = self._residuals.accepted(group) if traits.keeps_residual else None
        left = self._residuals.propose(group) if traits.keeps_residual else None
        if self.compressor.traits.owns_momentum:
            dtype = traits.dtype_for(group.updates[0])
            x = torch.empty(group.layer.numel, dtype=dtype, device=group.device) if left is None else left
            velocity, following = self._velocities.accepted(group), self._velocities.propose(group)
            momentum, nesterov = self._momentum, self._nesterov
            accelerate(gradients, velocity, residual, momentum, nesterov=nesterov, now=following, out=x)
            return split(x, layers), None, left
        if left is None:
            takes_all = group.is_plain or traits.keeps_fp64
            return gradients if takes_all else [gradient.float().contiguous() for gradient in gradients], None, None
        if residual is not None and group.is_plain:
            return gradients, residual, left
        parts = split(left, layers)
        for gradient, unsent, out in zip(gradients, split(residual, layers), parts, strict=True):
            if unsent is None:
                out.copy_(gradient)
            else:
                torch.add(gradient, unsent, out=out)
        return parts, None, left


class PerLayerReducer(Reducer):
    """Reducer that averages a bucket over ranks by encoding all of its layers into one message."""

    compressor: PerLayer

    @override
    def start(self, bucket: Bucket, start_sum: StartSum, transport: Transport) -> PendingReduction:
        with mark("encode"):
            encoded = self._encode_screened(bucket, transport)
        if not encoded:
            return DONE
        groups = [group for group, _, _ in encoded]
        # Collectives that keep state per layer need the ids in the order in which the layers lie in the message.
        key = sum((group.key for group in groups), ())
        with mark("send"):
            pending = start_sum(bundled([payload for _, payload, _ in encoded]), key)
        bucket.gradients = bucket.updates  # backward can reuse their memory while the message travels
        for group in groups:
            group.gradients.clear()
        self._report(encoded, bucket)

        def wait() -> None:
            with mark("wait"):
                pending.wait()

        def finish() -> None:
            wait()
            with mark("decode"):
                self._finish(groups, pending.finish(), bucket)
            self.memory.buffers.release(group.key for group in groups)

        return PendingReduction(wait=wait, finish=finish)

    def message(self, bucket: Bucket, transport: Transport | None = None) -> Payload | None:
        """Do the first half of `reduce`: return the message to be summed, or None if the bucket has no elements.

        The memory of the message is reused after `memory.buffers.end_step()`.

        Raises:
            TypeError: the compressor needs all ranks, and there is no transport.
        """
        if self.compressor.traits.needs_all_ranks and transport is None:
            raise TypeError(f"{self.compressor.component_name} needs all ranks while it encodes; call reduce")
        with mark("encode"):
            encoded = self._encode(bucket, transport)
        self._report(encoded, bucket)
        return bundled([payload for _, payload, _ in encoded]) if encoded else None

    def finish_bucket(self, total: Payload, bucket: Bucket) -> None:
        """Do the second half of `reduce`: write the updates, computed from the sum of all ranks' messages."""
        with mark("decode"):
            self._finish(self._groups(bucket), total, bucket)

    def _encode_screened(self, bucket: Bucket, transport: Transport) -> list[Encoded]:
        """Encode a bucket; if a value is not finite, call the bucket's `screen` before encoding.

        If the compressor needs all ranks while it encodes, `screen` is called in any case, because a rank could not
        encode a second time without the others.
        """
        if bucket.screen_ is None:
            return self._encode(bucket, transport)
        if not self.compressor.traits.needs_all_ranks:
            with contextlib.suppress(NonFinite):
                return self._encode(bucket, transport, screen=True)
        bucket.screen()
        return self._encode(bucket, transport)

    def _encode(self, bucket: Bucket, transport: Transport | None, *, screen: bool = False) -> list[Encoded]:
        """Encode a bucket; what is not sent becomes the next residual, once `commit` is called.

        Raises:
            NonFinite: `screen` is True, and gradients or residuals contain NaN or infinity.
        """
        traits, encoded = self.compressor.traits, []
        for group in self._groups(bucket):
            compressor, step, started = cast(PerLayer, group.compressor), bucket.step, time.perf_counter()
            gradients, residual, left = self._inputs(group, step)
            if traits.needs_all_ranks and compressor is self.compressor:
                assert transport is not None
                gradients, residual = [*summed(gradients, residual, left, group.layers)], None
                waits_from = time.perf_counter()
                cast(SharedScale, compressor).agree([*zip(group.layers, gradients, strict=True)], step, transport)
                started += time.perf_counter() - waits_from
            payload = compressor.encode_bucket(gradients, residual, left, group.layers, step, screen=screen)
            if left is not None and compressor.traits.averages:
                payload.keep_lost_with(keep_in(left))
            if traits.owns_momentum:
                payload.clear_selected_in_(self._velocities.propose(group))
            if payload.num_entries < payload.numel:
                self._encoded[group.key] = payload
            encoded.append((group, payload, time.perf_counter() - started))
        bucket.encode_s += sum(seconds for _, _, seconds in encoded)
        return encoded

    def _report(self, encoded: Sequence[Encoded], bucket: Bucket) -> None:
        """Report each layer's entries and bytes, and its share of the encoding seconds, in proportion to its size."""
        for group, payload, seconds in encoded:
            compressor, numels = cast(PerLayer, group.compressor), [layer.numel for layer in group.layers]
            has_aims = compressor.granularity == "layer"
            bucket.encoded += [
                EncodedLayer(
                    layer=layer,
                    payload=share.kind,
                    nbytes=share.nbytes,
                    num_entries=share.num_entries,
                    seconds=seconds * layer.numel / group.layer.numel,
                    density_wanted=compressor.density_for(layer, bucket.step) if has_aims else None,
                )
                for layer, share in zip(group.layers, payload.shares(numels), strict=True)
            ]

    def _finish(self, groups: Sequence[EncodeGroup], total: Payload, bucket: Bucket) -> None:
        started = time.perf_counter()
        units = [(cast(PerLayer, group.compressor), *unit) for group in groups for unit in group.units()]
        parts = members(total, [layer.numel for _, layer, _ in units])
        for (compressor, layer, updates), part in zip(units, parts, strict=True):
            compressor.finish(part, layer, bucket.step, updates)
        bucket.encode_s += time.perf_counter() - started


class MultiRoundReducer(Reducer):
    """Reducer for a compressor that averages several fp32 tensors per bucket over ranks, one after another."""

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
        groups = self._groups(bucket, apart=True)
        if not groups:
            return DONE
        started = time.perf_counter()
        waited_s = 0.0

        def average(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal waited_s
            began = time.perf_counter()
            with mark("exchange"):
                total = start_sum(Dense(tensor), tuple(layer.id for layer in bucket.layers)).finish()
            waited_s += time.perf_counter() - began
            mean = torch.zeros(tensor.numel(), dtype=torch.float32, device=total.device)
            total.add_to_(mean, divisor=bucket.step.world_size)
            return mean

        inputs = [self._input(group, bucket.step) for group in groups]
        self._keep_gradients(bucket)
        bucket.gradients = bucket.updates
        for group in groups:
            group.gradients.clear()
        # Compressed groups have one layer each, and come before the group that is not compressed.
        num_compressed = sum(group.compressor is self.compressor for group in groups)
        compressed = [(group.layer, x) for group, x in zip(groups[:num_compressed], inputs, strict=False)]
        updates = [group.updates[0] for group in groups[:num_compressed]]
        with mark("encode"):
            means = self.compressor.reduce(compressed, inputs[num_compressed:], bucket.step, average, updates)
        if self.compressor.traits.keeps_residual:
            for x, update in zip(inputs, updates, strict=False):
                x.sub_(update)
        for group, mean in zip(groups[num_compressed:], means, strict=True):
            for out, part in zip(group.updates, split(mean, group.layers), strict=True):
                out.copy_(part)
        bucket.encode_s += time.perf_counter() - started - waited_s
        self._report(groups, bucket)
        return DONE

    def _input(self, group: EncodeGroup, step: Step) -> torch.Tensor:
        # the tensor to send: one layer's (possibly its gradient itself), or one for all layers that are not compressed
        gradients, residual, left = self._inputs(group, step)
        xs = [*summed(gradients, residual, left, group.layers)]
        if group.compressor is self.compressor:
            return xs[0]
        return UNCOMPRESSED.encode_bucket(xs, None, None, group.layers, step).values

    def _keep_gradients(self, bucket: Bucket) -> None:
        """Keep a step's gradients until the next step's gradients have been allocated.

        If gradients are freed at once, the C library returns their pages to the system, and a step of ResNet-18 then
        spends 7 % of its time on touching new pages.
        """
        of_layers = zip(bucket.layers, bucket.gradients, bucket.updates, strict=True)
        self._kept_gradients |= {layer.id: gradient for layer, gradient, update in of_layers if gradient is not update}

    def _report(self, groups: Sequence[EncodeGroup], bucket: Bucket) -> None:
        numel = sum(group.layer.numel for group in groups)
        for group in groups:
            for layer in group.layers:
                is_compressed = group.compressor is self.compressor
                num_entries = self.compressor.num_exchanged(layer, bucket.step) if is_compressed else layer.numel
                entry = EncodedLayer(
                    layer=layer,
                    payload="Dense",
                    nbytes=FP32_BYTES * num_entries,
                    num_entries=num_entries,
                    seconds=bucket.encode_s * layer.numel / numel,
                )
                bucket.encoded.append(entry)


def reducer_for(compressor: Compressor, *, momentum: float = 0.0, nesterov: bool = False) -> Reducer:
    """Return a new reducer that suits the compressor: a `PerLayerReducer` or a `MultiRoundReducer`."""
    if isinstance(compressor, PerLayer):
        return PerLayerReducer(compressor, momentum=momentum, nesterov=nesterov)
    assert isinstance(compressor, MultiRound), f"{compressor.component_name} brings a hook of its own"
    return MultiRoundReducer(compressor, momentum=momentum, nesterov=nesterov)
