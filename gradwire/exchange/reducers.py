"""The reducer of a compressor that exchanges several messages per bucket, and the choice of a reducer."""

import time
from collections.abc import Sequence

import torch
from typing_extensions import override

from collectives.payloads import Dense
from collectives.transport.base import Transport
from compressors.base import FP32_BYTES, Compressor, MultiRound, PerLayer
from compressors.layer import Step, memory_nbytes
from compressors.parts.buckets import split, summed
from gradwire.exchange.encode_group import UNCOMPRESSED, EncodeGroup
from gradwire.exchange.reducer import DONE, PendingReduction, PerLayerReducer, Reducer, StartSum
from gradwire.exchange.report import Bucket, EncodedLayer


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
        groups = self._groups(bucket, apart=True)
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

        inputs = [self._input(group, bucket.step) for group in groups]
        self._keep_gradients(bucket)
        bucket.gradients = bucket.updates
        for group in groups:
            group.gradients.clear()
        # one layer each; they come before the group that is not compressed
        num_compressed = sum(group.compressor is self.compressor for group in groups)
        compressed = [(group.layer, x) for group, x in zip(groups[:num_compressed], inputs, strict=False)]
        updates = [group.updates[0] for group in groups[:num_compressed]]
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
        # the tensor to send: a layer's, which may be its gradient, or that of all layers that are not compressed
        gradients, residual, left = self._inputs(group, step)
        xs = [*summed(gradients, residual, left, group.layers)]
        if group.compressor is self.compressor:
            return xs[0]
        return UNCOMPRESSED.encode_bucket(xs, None, None, group.layers, step).values

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
    """Return a new reducer for a compressor that encodes, or that exchanges several messages per bucket."""
    if isinstance(compressor, PerLayer):
        return PerLayerReducer(compressor, momentum=momentum, nesterov=nesterov)
    assert isinstance(compressor, MultiRound), f"{compressor.component_name} brings a hook of its own"
    return MultiRoundReducer(compressor, momentum=momentum, nesterov=nesterov)
