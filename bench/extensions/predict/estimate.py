"""Estimate the parts of a step without measuring them: from a model's shapes, a step's time, and typical costs."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

import torch

from bench.core import environment, spec
from bench.core.errors import UsageError
from bench.core.units import format_seconds, parse_duration
from bench.core.waiting import waiting
from bench.datasets.base import Dataset
from bench.extensions.predict.calibrating import cannot_be_calibrated
from bench.extensions.predict.calibration import (
    LOCAL,
    VERSION,
    BucketParts,
    Calibration,
    CpuContention,
    EncodedBucket,
    LeafSize,
    LinearCost,
    MessageCosts,
    MessageProfile,
)
from bench.extensions.predict.message_profile import growth_in_parts
from bench.extensions.predict.options import PredictConfig
from bench.extensions.predict.request import BASELINE
from bench.models.base import Model, build_network
from collectives.base import Key, PendingSum
from collectives.options import raise_first
from collectives.payloads.base import Payload
from collectives.schedule.rounds import leaves
from collectives.transport.base import SingleRank
from compressors.base import Compressor, PerLayer
from compressors.layer import Layer, Step, layers_of
from gradwire.ddp.buckets import bucket_size, buckets_of
from gradwire.exchange.reducer import reducer_for
from gradwire.exchange.report import Bucket

DATASET, BATCH_SIZE = "digits", 32
# CPU time in ns to encode one element of ResNet-18 (`results/reference/encode-resnet18.csv`;
# group_topk: with 16-bit values).
ENCODE_NS = {
    "none": 0.33, "bf16": 0.29, "fp16": 0.29, "int8": 0.45, "natural": 0.74, "qsgd": 0.75, "terngrad": 1.03,
    "sign": 1.10, "onebit": 1.36, "twobit": 0.82, "topk": 1.16, "group_topk": 0.48, "randomk": 0.68,
    "adaptive_topk": 1.28, "threshold": 1.30, "qsparse": 1.25, "dgc": 1.71, "algc": 1.01, "hylo": 1.15,
    "powersgd": 1.41,
}  # fmt: skip
# The same on an NVIDIA H200, in ms for one layer of 11 million elements (`results/reference/encode-h200.csv`; powersgd:
# from the steps in `resnet18-h200.csv`). Half of it is for the start of kernels, as the steps of ResNet-18 show.
H200_MS, H200_NUMEL, STARTING_SHARE = {
    "none": 0.14, "bf16": 0.24, "fp16": 0.24, "int8": 0.52, "natural": 0.59, "qsgd": 0.65, "terngrad": 0.97,
    "sign": 1.09, "onebit": 1.31, "twobit": 1.23, "topk": 1.98, "group_topk": 0.93, "randomk": 1.58,
    "adaptive_topk": 2.80, "threshold": 1.95, "qsparse": 2.35, "dgc": 2.11, "algc": 1.87, "hylo": 2.67,
    "powersgd": 0.29,
}, 11e6, 0.5  # fmt: skip
# Compressors that start their kernels once for a whole bucket on a GPU, not for each layer.
OF_WHOLE_BUCKETS = ("group_topk",)
# Encoding takes twice as long right after compute, because compute has replaced the contents of the caches.
BEHIND_COMPUTE = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodingCosts:
    """Typical costs of a device that encodes.

    Attributes:
        name: the device, in words.
        decode_ns, decode_term_ns: time of decoding in ns per element: to write the mean, and to add the values of one
            rank.
        merge_byte_s, add_byte_s, pack_byte_s: time in s per byte: to merge sparse entries, to add dense values, and to
            pack or read a message.
        messages: costs of messages.
    """

    name: str
    decode_ns: float
    decode_term_ns: float
    merge_byte_s: float
    add_byte_s: float
    pack_byte_s: float
    messages: MessageCosts


# (number of ranks, bytes of their merged largest entries / bytes of one rank's largest entries)
GROWTH = ((1, 1.0), (2, 1.8), (4, 3.3))
MESSAGES = MessageCosts(message_s=15e-6, per_byte_s=1e-10, wake_s=30e-6)
COSTS = {
    "cpu": EncodingCosts(
        name="one CPU thread",
        decode_ns=0.4,
        decode_term_ns=0.17,
        merge_byte_s=5e-9,
        add_byte_s=1e-10,
        pack_byte_s=2e-10,
        messages=MESSAGES,
    ),
    # Of the H200; merging is as fast as decoding the entries of one rank, and other parts move bytes through memory.
    "cuda": EncodingCosts(
        name="an NVIDIA H200",
        decode_ns=0.013,
        decode_term_ns=0.06,
        merge_byte_s=1e-9,
        add_byte_s=1e-12,
        pack_byte_s=1e-12,
        messages=dataclasses.replace(MESSAGES, per_byte_s=0.0),
    ),
}
AROUND_MESSAGE_S = 50e-6
# Shares of a step's time for loading the batch, and for updating the parameters.
BATCH_SHARE, UPDATE_SHARE = 0.03, 0.03
# Share of backward in the time of forward and backward: for each matrix product of forward, backward computes two.
BACKWARD_SHARE = 2 / 3
# Load up to which ranks are assumed not to slow each other down; too high to be reached.
ANY_LOAD = 1e9
# A model of which only the number of parameters is known: parameters of a matrix, if 16 to 64 matrices are enough.
MATRIX_NUMEL, LEAST_MATRICES, MOST_MATRICES = 2**20, 16, 64
# Index of a step long after the first steps, because some compressors send all entries in the first steps.
LATE = 10**6


@dataclasses.dataclass(frozen=True, kw_only=True)
class EstimatedCalibration(Calibration):
    """A calibration whose parts are estimated, not measured.

    Attributes:
        classes: number of classes that the network tells apart; None if only its number of parameters is known.
        said: a sentence that tells the user what the estimate is based on.
    """

    how_to_check: ClassVar[str] = "this is a rough estimate"

    classes: int | None
    said: str

    @property
    def about(self) -> str:
        """Return the name of the model, and its number of classes if it is known."""
        return self.model if self.classes is None else f"{self.model} for {self.classes} classes"


@dataclasses.dataclass(frozen=True)
class _WithClasses:
    """The inputs of a data set, with another number of classes."""

    dataset: Dataset
    num_classes: int

    def dummy_batch(self, num_samples: int, device: torch.device | str) -> torch.Tensor:
        return self.dataset.dummy_batch(num_samples, device)


def estimated(config: PredictConfig) -> EstimatedCalibration:
    """Return an estimated calibration of a model whose step takes `config.step_time` without an exchange.

    Raises:
        UsageError: the time is missing, or neither a model nor a number of parameters is named; or the cost of the
            compressor is not known.
    """
    of_model = {name for name in ("model", "dataset", "classes") if getattr(config, name) is not None}
    raise_first(
        UsageError,
        (
            config.step_time is None,
            "--parameters needs the time of a step without an exchange too; give --step-time 250ms",
        ),
        (
            config.model is None and config.parameters is None,
            "--step-time needs the shapes of a model; name it with --model, or give --parameters 124M",
        ),
        (
            config.parameters is not None and bool(of_model),
            f"--parameters is for a model that bench does not know; leave out --{min(of_model, default='')}",
        ),
        (
            config.shared_cores is not None,
            "only a calibration shows how ranks slow each other down on --shared-cores; leave it out",
        ),
    )
    step_s = parse_duration(cast(str, config.step_time))
    if config.parameters is not None:
        layers = equal_matrices(int(config.parameters))
        name, dataset_name, num_classes = "a model of equal layers", "", None
        basis = f"{len(layers)} equal square matrices"
        measures = "bench profile measures your own script"
        if config.device == "cpu":
            measures += ", and --device cuda is for ranks on GPUs"
    else:
        dataset = cast(Dataset, spec.build("datasets", config.dataset or DATASET))
        model = cast(Model, spec.build("models", cast(str, config.model)))
        with torch.device("meta"), spec.usage_errors():
            inputs = _WithClasses(dataset, config.classes or dataset.num_classes)
            layers = [dataclasses.replace(layer, weight=None) for layer in layers_of(build_network(model, inputs))]
        name, dataset_name, num_classes = str(model), str(dataset), inputs.num_classes
        basis = f"the shapes of {config.model}"
        measures = f"bench calibrate --model {config.model} measures them"
    bucket_mb = bucket_size(layers)
    buckets = buckets_of([layer for layer in layers if layer.numel], bucket_mb)
    batch_s, update_s = BATCH_SHARE * step_s, UPDATE_SHARE * step_s
    backward_s = BACKWARD_SHARE * (step_s - batch_s - update_s)
    forward_s = step_s - batch_s - update_s - backward_s
    # All linear, attention and conv layers are assumed to take equally long.
    counts = [sum(layer.kind in ("conv", "linear", "attention") for layer in bucket) for bucket in buckets]
    ready_s = [backward_s * (done / (sum(counts) or 1)) for done in itertools.accumulate(counts)]
    names = dict.fromkeys([config.compressor, BASELINE] if config.compressor else ENCODE_NS)
    compressors = [cast(Compressor, spec.build("compressors", name)) for name in names]
    return EstimatedCalibration(
        version=VERSION,
        cpu=environment.cpu_model(),
        cores=environment.usable_cores(),
        torch_version=environment.version_of("torch"),
        kernels=environment.kernels(),
        model=name,
        dataset=dataset_name,
        optimizer="sgd",
        batch_size=config.batch_size or BATCH_SIZE,
        threads=1,
        bucket_mb=bucket_mb,
        batch_s=batch_s,
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        buckets=tuple(
            BucketParts(
                ready_s=at,
                layers=tuple(layer.id for layer in bucket),
                numels=tuple(layer.numel for layer in bucket),
            )
            for at, bucket in zip(ready_s, buckets, strict=True)
        ),
        encoded=_encoded(compressors, buckets, config.device),
        first_epoch=_encoded(
            [each for each in compressors if each.traits.denser_epochs], buckets, config.device, in_first_epoch=True
        ),
        crowds=(
            CpuContention(
                load=ANY_LOAD,
                handed_over_s=tuple(batch_s + forward_s + at for at in ready_s),
                computed_s=batch_s + forward_s + backward_s,
                cpu_s=step_s,
            ),
        ),
        messages={LOCAL: COSTS[config.device].messages},
        around_message_s=AROUND_MESSAGE_S,
        classes=num_classes,
        said=f"Rough estimate from {basis}, a step of {format_seconds(step_s)} and typical costs of encoding by "
        f"{COSTS[config.device].name}; {measures}",
    )


def equal_matrices(numel: int) -> list[Layer]:
    """Return the layers of a model of which only the number of parameters is known: equal matrices, nearly square.

    Their number of parameters may differ from `numel` by one row and one column of each matrix.
    """
    count = min(max(round(numel / MATRIX_NUMEL), LEAST_MATRICES), MOST_MATRICES)
    rows = math.isqrt(numel // count) or 1
    shape = (rows, max(1, numel // count // rows))
    return [
        Layer(id=index, name=f"matrix {index}", shape=shape, kind="linear", numel=math.prod(shape))
        for index in range(count)
    ]


def _encoded(
    compressors: Sequence[Compressor], buckets: Sequence[Sequence[Layer]], device: str, *, in_first_epoch: bool = False
) -> dict[str, tuple[EncodedBucket, ...]]:
    """Return each bucket's messages with their estimated costs, by compressor.

    All compressors encode the same random gradients, to find the lengths of their messages. Of buckets with the same
    shapes, only the first is encoded. Compressors use one thread, because several threads that share busy cores spend
    most of their CPU time on waiting for each other.

    Raises:
        UsageError: the time that a compressor takes to encode is not known.
    """
    for compressor in compressors:
        reason, name = cannot_be_calibrated(compressor), compressor.component_name
        raise_first(
            UsageError,
            (reason is not None, reason or ""),
            (
                name not in ENCODE_NS,
                f"the time that {name} takes to encode is not known and cannot be estimated; measure it with bench "
                "calibrate",
            ),
        )
    index = 0 if in_first_epoch else LATE
    step = Step(index=index, epoch=0, rank=0, world_size=1, seed=1, warmup=in_first_epoch)
    random, threads = torch.Generator().manual_seed(1), torch.get_num_threads()
    found: dict[str, tuple[EncodedBucket, ...]] = dict.fromkeys(map(str, compressors), ())
    torch.set_num_threads(1)
    try:
        for number, layers in enumerate(buckets):
            first = next(each for each, other in enumerate(buckets) if _shapes(other) == _shapes(layers))
            if first < number:
                renamed = dict(zip((layer.id for layer in buckets[first]), (layer.id for layer in layers), strict=True))
                found = {name: (*each, _renamed(each[first], renamed)) for name, each in found.items()}
                continue
            gradients = [torch.randn(layer.numel, generator=random) for layer in layers]
            for compressor in compressors:
                waiting.doing(f"encoding random gradients with {compressor}")
                found[str(compressor)] += (_encoded_bucket(compressor, layers, gradients, step, device),)
    finally:
        torch.set_num_threads(threads)
    return found


def _shapes(layers: Sequence[Layer]) -> list[tuple[str, tuple[int, ...]]]:
    return [(layer.kind, layer.shape) for layer in layers]


def _renamed(encoded: EncodedBucket, ids: Mapping[int, int]) -> EncodedBucket:
    """Return the messages of another bucket of the same shapes; `ids` gives its layers' ids by those of this one."""
    offers = [dataclasses.replace(offer, layers=tuple(map(ids.__getitem__, offer.layers))) for offer in encoded.offers]
    return dataclasses.replace(encoded, offers=tuple(offers))


def _encoded_bucket(
    compressor: Compressor, layers: Sequence[Layer], gradients: Sequence[torch.Tensor], step: Step, device: str
) -> EncodedBucket:
    costs = COSTS[device]
    offers: list[MessageProfile] = []

    def travel(payload: Payload, key: Key) -> PendingSum:
        is_sparse, in_parts = payload.addable and not payload.elementwise, growth_in_parts(payload)
        offers.append(
            MessageProfile(
                leaves=tuple(map(LeafSize.of, leaves(payload))),
                layers=key,
                growth=tuple((ranks, in_parts * factor) for ranks, factor in GROWTH if is_sparse or ranks == 1),
                merge=LinearCost(per_byte_s=costs.merge_byte_s if is_sparse else costs.add_byte_s),
                pack_s=costs.pack_byte_s * payload.nbytes,
                unpack=LinearCost(per_byte_s=costs.pack_byte_s),
                decode_s=1e-9 * costs.decode_term_ns * payload.numel,
            )
        )
        return PendingSum.done(payload)

    is_kept = isinstance(compressor, PerLayer)  # such a compressor does not change the gradients
    gradients = [gradient if is_kept else gradient.clone() for gradient in gradients]
    bucket = Bucket(layers=list(layers), gradients=gradients, step=step)
    reducer_for(compressor).start(bucket, travel, SingleRank())  # the sum need not be decoded
    numel = sum(layer.numel for layer in layers)
    name = compressor.component_name
    encode_s = 1e-9 * BEHIND_COMPUTE * ENCODE_NS[name] * numel
    if device == "cuda":
        starts = 1 if name in OF_WHOLE_BUCKETS else len(layers)
        encode_s = 1e-3 * H200_MS[name] * (STARTING_SHARE * starts + (1 - STARTING_SHARE) * numel / H200_NUMEL)
    work_s = (*[encode_s / len(offers)] * len(offers), 1e-9 * costs.decode_ns * numel)
    return EncodedBucket(work_s=work_s, offers=tuple(offers))
