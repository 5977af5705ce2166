"""Time and check the compressors of `bench compressors` in one process, whose argument is the job's folder.

The process reads the folder's `config.json`, and appends progress and results line by line to `progress.jsonl`.
"""

import collections
import dataclasses
import datetime
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from bench.core import spec
from bench.core.environment import origin_columns
from bench.core.errors import BenchError, RunFailed
from bench.core.run_folder import RunFolder, append_json_line
from bench.datasets.base import Dataset
from bench.extensions.microbenchmarks.options import CompressorsConfig, interleave
from bench.models.base import seeded_network
from bench.optimizers.torch_optimizers import Sgd
from bench.rank import data, partition
from bench.rank.process import device_time, end_process, rank_main, set_up_device
from collectives.base import Key
from collectives.payloads import Payload, unpack
from collectives.transport.base import SingleRank
from compressors.base import FP32_BYTES, Compressor
from compressors.layer import Layer, Step, layers_of
from gradwire.ddp.buckets import WHOLE_MODEL_MB, buckets_of
from gradwire.exchange.encode_group import group_layers
from gradwire.exchange.reducer import reducer_for
from gradwire.exchange.report import Bucket

SMALLEST_SCALE = 1e-3
STEPS_BEFORE = 5
BATCH_SIZE = 32


def synthetic(layers: Sequence[Layer], count: int, seed: int) -> list[torch.Tensor]:
    """Return random gradients: heavy-tailed noise around means that all of the gradients share.

    The values of each layer have their own scale between 0.001 and 1.

    Args:
        layers: the layers; only their numbers of elements are used.
        count: number of gradients.
        seed: the same seed gives the same gradients.

    Returns:
        One tensor per gradient, fp32 [numel of all layers], with the layers in the given order.
    """
    generator = torch.Generator().manual_seed(seed)
    scales = SMALLEST_SCALE ** torch.rand(len(layers), generator=generator)
    means = [0.3 * torch.randn(layer.numel, generator=generator) for layer in layers]
    gradients = []
    for _ in range(count):
        noises = [torch.randn(layer.numel, generator=generator) for layer in layers]
        values = zip(noises, means, scales, strict=True)
        gradients.append(torch.cat([noise.mul_(noise.abs()).add_(mean).mul_(scale) for noise, mean, scale in values]))
    return gradients


def recorded(config: CompressorsConfig, model: nn.Module, layers: Sequence[Layer], count: int) -> list[torch.Tensor]:
    """Train a model for a few steps, and return the gradients of the last `count` steps.

    The gradients of the first `STEPS_BEFORE` steps are not returned.

    Args:
        config: options of the command; only the data set, its folder and the seed are used.
        model: the model, which is trained in place with SGD at its default learning rate.
        layers: the layers of the model.
        count: number of gradients.

    Returns:
        One tensor per gradient, fp32 [numel of all layers], with the layers in the given order, on the model's device.

    Raises:
        RunFailed: a gradient is not finite.
    """
    parameters = [cast(nn.Parameter, layer.weight) for layer in layers]
    device, num_steps = parameters[0].device, STEPS_BEFORE + count
    optimizer = Sgd().bind(nn.ParameterList(parameters), Sgd.default_lr)
    dataset = cast(Dataset, spec.build("datasets", config.dataset))
    size = min(num_steps * BATCH_SIZE, dataset.resolve_sizes(None, None)[0])
    train, _ = dataset.load(Path(config.data_dir), seed=config.seed, train_size=size, test_size=1)
    indices, per_epoch = partition.iid(size, 1, config.seed)[0], data.steps_per_epoch(size, 1, BATCH_SIZE)
    epochs = (
        data.order(indices, seed=config.seed, rank=0, epoch=epoch).split(BATCH_SIZE)[:per_epoch]
        for epoch in itertools.count()
    )
    gradients: collections.deque[torch.Tensor] = collections.deque(maxlen=count)
    for index, chosen in enumerate(itertools.islice(itertools.chain.from_iterable(epochs), num_steps)):
        inputs = dataset.normalise(train.inputs[chosen].to(device))
        optimizer.zero_grad()
        dataset.task.loss(model(inputs), train.targets[chosen].to(device)).backward()
        gradients.append(torch.cat([cast(torch.Tensor, p.grad).flatten() for p in parameters]))
        if not bool(torch.isfinite(gradients[-1]).all()):
            raise RunFailed(f"the gradient of training step {index} is not finite; try another --seed or --model")
        optimizer.step()
    return list(gradients)


WARMUP_PASSES = 2  # these first passes do not count: buffers are allocated, and residuals reach their usual size


@dataclasses.dataclass(kw_only=True)
class Pass:
    """Hold the measurements of one pass, in which a compressor encodes and decodes one gradient.

    Here x is the vector to send: the gradient plus the residual (the part of earlier gradients that was not sent). C(x)
    is the vector that arrives: the decoded messages.

    Attributes:
        encode_s: seconds until the last message is packed; includes momentum, residual and all rounds of messages.
        decode_s: seconds from the end of encoding until C(x) has replaced the gradient.
        packed_bytes: bytes of all messages including their headers.
        num_entries: number of elements that the messages contain.
        given, error, product, sent: |x|^2, |x - C(x)|^2, <x, C(x)> and |C(x)|^2.
    """

    encode_s: float = 0.0
    decode_s: float = 0.0
    packed_bytes: int = 0
    num_entries: int = 0
    given: float = 0.0
    error: float = 0.0
    product: float = 0.0
    sent: float = 0.0


class Encoding:
    """Measure how a compressor encodes and decodes the gradients of a model.

    Args:
        config: options of the command.
        compressor: the compressor as text, such as `topk:ratio=0.01`.
        layers: the layers in the model's order.
    """

    def __init__(self, config: CompressorsConfig, compressor: str, layers: Sequence[Layer]) -> None:
        self.name = compressor
        self._seed = config.seed
        self._compressor = cast(Compressor, spec.build("compressors", compressor))
        self._reducer = reducer_for(self._compressor)
        self._alone = SingleRank()
        self._layers = layers
        self._buckets = buckets_of(layers, WHOLE_MODEL_MB if self._compressor.traits.one_bucket else config.bucket_mb)
        self._units = [unit for bucket in self._buckets for unit in group_layers(self._compressor, bucket, apart=True)]
        self._passes: list[Pass] = []
        compressed = [unit for unit in self._units if unit.compressor is self._compressor]
        self._squares: dict[tuple[int, ...], list[float]] = {unit.key: [] for unit in compressed}
        self._num_passes = 0

    def measure(self, gradient: torch.Tensor) -> None:
        """Encode and decode a gradient, fp32 [numel of all layers], and keep times, bytes and errors for method `row`.

        The results of the first `WARMUP_PASSES` calls are not kept. The gradient is not changed.
        """
        update = gradient.clone()  # the decoded gradient will replace these values
        views = self._by_layer(update)
        step = Step(index=self._num_passes, epoch=0, rank=0, world_size=1, seed=self._seed, warmup=False)
        measured = Pass()
        for layers in self._buckets:
            bucket = Bucket(layers=layers, gradients=[views[layer.id] for layer in layers], step=step)
            started = packed_at = device_time(update.device)

            def travel(payload: Payload, key: Key) -> Payload:
                """Pack the payload into bytes, record their number, and return the payload unpacked from the bytes."""
                nonlocal packed_at
                packed = payload.pack()
                measured.packed_bytes += packed.numel()
                packed_at = device_time(packed.device)
                return unpack(packed)

            self._reducer.reduce(bucket, travel, self._alone)
            measured.encode_s += packed_at - started
            measured.decode_s += device_time(update.device) - packed_at
            measured.num_entries += sum(encoded.num_entries for encoded in bucket.encoded)
        self._reducer.commit()
        self._num_passes += 1
        if self._num_passes > WARMUP_PASSES:
            self._compare(measured, gradient, update)
            self._passes.append(measured)

    def row(self) -> dict[str, Any]:
        """Return the measured columns of a row of `bench compressors`, by the name of the column."""
        numel = sum(layer.numel for layer in self._layers)
        encode_s = statistics.median(one.encode_s for one in self._passes)
        decode_s = statistics.median(one.decode_s for one in self._passes)
        packed_bytes = statistics.fmean(one.packed_bytes for one in self._passes)
        proved = [unit.compressor.contraction_bound(unit.layer) for unit in self._units if unit.key in self._squares]
        known = [bound for bound in proved if bound is not None]
        return {
            "compressor": self.name,
            "numel": numel,
            "dense_bytes": FP32_BYTES * numel,
            "packed_bytes": packed_bytes,
            "compression_ratio": FP32_BYTES * numel / packed_bytes,
            "bits_per_element": 8 * packed_bytes / numel,
            "effective_density": statistics.fmean(one.num_entries / numel for one in self._passes),
            "relative_error": statistics.fmean(_ratio(one.error, one.given) ** 0.5 for one in self._passes),
            "cosine": statistics.fmean(_ratio(one.product, (one.given * one.sent) ** 0.5) for one in self._passes),
            "contraction_seen": max(map(statistics.fmean, self._squares.values()), default=0.0),
            "contraction_proved": max(known, default=0.0) if len(known) == len(proved) else None,
            "encode_s": encode_s,
            "encode_Bps": FP32_BYTES * numel / encode_s,
            "decode_s": decode_s,
            "decode_Bps": FP32_BYTES * numel / decode_s,
        }

    def _compare(self, measured: Pass, gradient: torch.Tensor, update: torch.Tensor) -> None:
        # Compute the errors of a pass from the gradient, the decoded gradient, and the residual if there is one.
        given, arrived = self._by_layer(gradient), self._by_layer(update)
        kept = self._reducer.state_dict()["residuals"]
        for unit in self._units:
            unit_given, unit_error = 0.0, 0.0
            for layer in unit.layers:
                sent = arrived[layer.id].double()
                lost = kept[layer.id].double() if layer.id in kept else given[layer.id] - sent
                x = sent + lost
                unit_given += float(x @ x)
                unit_error += float(lost @ lost)
                measured.product += float(x @ sent)
                measured.sent += float(sent @ sent)
            measured.given += unit_given
            measured.error += unit_error
            if unit.key in self._squares:
                self._squares[unit.key].append(_ratio(unit_error, unit_given))

    def _by_layer(self, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        parts = torch.split(flat, [layer.numel for layer in self._layers])
        return dict(zip((layer.id for layer in self._layers), parts, strict=True))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


NUM_GRADIENTS = 5  # with more repeats, the same gradients are encoded again, each time with other residuals


def run(config: CompressorsConfig, folder: RunFolder) -> None:
    """Measure all compressors alternately, each `WARMUP_PASSES + config.repeats` times, and then write their rows."""
    origin = origin_columns(config.device) | {
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    }
    device = set_up_device(config.device, config.threads)
    dataset = cast(Dataset, spec.build("datasets", config.dataset))
    model = seeded_network(config.model, dataset, config.seed).to(device)
    layers = layers_of(model)
    count = min(NUM_GRADIENTS, config.repeats)
    if config.gradients == "recorded":
        gradients = recorded(config, model, layers, count)
    else:
        gradients = [gradient.to(device) for gradient in synthetic(layers, count, config.seed)]

    encodings = [Encoding(config, compressor, layers) for compressor in spec.split_list(config.compressors)]
    for repeat, encoding in interleave(encodings, WARMUP_PASSES + config.repeats):
        encoding.measure(gradients[repeat % count])
        if repeat >= WARMUP_PASSES:
            append_json_line(folder.progress, {"ended": ["", encoding.name]})
    for encoding in encodings:
        append_json_line(folder.progress, {"row": config.columns() | encoding.row() | origin})


main = rank_main(CompressorsConfig, run, (BenchError,))

if __name__ == "__main__":
    end_process(main(sys.argv[1]))
