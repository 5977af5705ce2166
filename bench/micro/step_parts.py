"""The parts of a training step, measured in this process: compute up to each bucket, and what compressors do to it.

What comes once in a step is timed as it comes there, behind compute that has filled the caches with other things: by
itself, time after time, encoding takes half as long, and reading a short message a fifth.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.core import spec
from bench.core.config.calibrate import CalibrateConfig
from bench.core.config.run import RunConfig
from bench.core.parts import BucketParts, Crowd, EncodedBucket, LeafSize, Offer, Work
from bench.datasets.base import Dataset
from bench.models.base import Model
from bench.optimizers.base import Optimizer
from bench.strategies.data_parallel.replicas import wrap
from bench.train.batches import Batches
from collectives.base import Key
from collectives.payloads.base import Payload, unpack
from collectives.payloads.dense import Dense
from collectives.ring import Ring
from collectives.rounds.layout import leaves
from collectives.transport.alone import Alone
from collectives.transport.base import Transport
from compressors.base import Compressor
from compressors.ddp.bucket import Bucket
from compressors.ddp.reducer import Reducer
from compressors.ddp.taken import TakenGradients
from compressors.layer import Layer, Step, layers_of

WARMUP = 4
LATE = 10**6
"""a step at which no compressor sends all entries any more, as some do at first"""
CROWDED_STEPS = 8
RANKS = 4
"""whose gradients are recorded, at the same weights, to see how far the entries that they send are the same"""
MOMENTUM = 0.9
STIRRED_SAMPLES = 8
"""of a mini-batch, at most, that are computed between two timings"""
PARTS = 8
"""of one of which, as of the whole, it is measured what is done to it"""
REPEATS = 5
SUMS = 40
SHORT_NUMEL = 64
"""of a message in which only its being one takes time"""

Message = tuple[Key, Payload]
"""What a collective is given: the layers inside and the payload."""


def clock() -> float:
    """Seconds that other work on the machine does not lengthen, where this process computes one thing at a time."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
    """One rank's step without any exchange: medians, seconds."""

    batch_s: float
    forward_s: float
    backward_s: float
    update_s: float
    buckets: tuple[BucketParts, ...]


class StepParts:
    """A model that trains by itself; every rank of the process group must make one.

    Args:
        config: complete.
    """

    def __init__(self, config: CalibrateConfig) -> None:
        torch.manual_seed(config.seed)
        device = torch.device("cpu")
        dataset = cast(Dataset, spec.build("datasets", config.dataset))
        model = cast(Model, spec.build("models", config.model)).build(dataset.num_classes)
        self._ddp: DistributedDataParallel = wrap(model, device, config.bucket_mb)
        optimizer = cast(Optimizer, spec.build("optimizers", config.optimizer))
        self._optimizer = optimizer.build(model.parameters(), 0.0)  # for gradients that are taken come to no update
        train, _ = dataset.load(Path(config.data_dir), seed=config.seed, train_size=None, test_size=None)
        of_run = RunConfig(batch_size=config.batch_size, augment=config.augment, seed=config.seed, replicas=1)
        self._batches = Batches(of_run, dataset, train, 0, device)
        self._times: list[list[float]] = []
        self._layer_of = {id(layer.weight): layer for layer in layers_of(model)}
        self._arrived: list[tuple[float, list[Layer], list[torch.Tensor]]] = []
        self._keeps = False
        self._clock = clock
        self._taken = TakenGradients(self._ddp)
        self._ddp.register_comm_hook(None, lambda _, bucket: self._take(bucket))
        for _ in range(WARMUP):  # in the first of these DDP's ranks agree on their buckets
            self._step()

    def time_steps(self, count: int) -> None:
        """Time some steps more."""
        for _ in range(count):
            marks, arrived = self._step()
            ready = [at - marks[2] for at in arrived]
            self._times.append([after - before for before, after in itertools.pairwise(marks)] + ready)

    def compute(self) -> Compute:
        """What all timed steps come to, of which there must be some."""
        batch_s, forward_s, backward_s, update_s, *ready = map(statistics.median, zip(*self._times, strict=True))
        buckets = [bucket_parts(at, of) for at, (_, of, _) in zip(ready, self._arrived, strict=True)]
        return Compute(
            batch_s=batch_s,
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=update_s,
            buckets=tuple(buckets),
        )

    def crowd(self, group: dist.ProcessGroup, cores: int) -> Crowd:
        """Time steps that all ranks of a group, which must all call, begin at once: by the clock, until the last one.

        Args:
            group: of this rank and the others.
            cores: that they share.
        """
        self._clock = time.perf_counter
        ends, used_s = [], []
        for _ in range(1 + CROWDED_STEPS):
            dist.barrier(group)
            cpu_started = time.process_time()
            marks, arrived = self._step()
            used_s.append(time.process_time() - cpu_started)
            begun = torch.tensor([marks[0]], dtype=torch.float64)
            last = torch.tensor([*arrived, marks[3]], dtype=torch.float64)
            dist.all_reduce(begun, dist.ReduceOp.MIN, group)
            dist.all_reduce(last, dist.ReduceOp.MAX, group)
            ends.append((last - begun).tolist())
        self._clock = clock
        *handed_over, computed_s = map(statistics.median, zip(*ends[1:], strict=True))
        return Crowd(
            load=dist.get_world_size(group) * torch.get_num_threads() / cores,
            handed_over_s=tuple(handed_over),
            computed_s=computed_s,
            cpu_s=_mean_of_ranks(statistics.median(used_s[1:]), group),
        )

    def around_message_s(self, group: dist.ProcessGroup, transport: Transport) -> float:
        """CPU seconds of a rank for a message that comes behind compute, sent or received; all of a group must call.

        Args:
            group: of this rank and the others.
            transport: among them.
        """
        n, ring = dist.get_world_size(group), Ring().bind(transport)
        taken = []
        for _ in range(CROWDED_STEPS):
            self._step()
            dist.barrier(group)
            started = time.thread_time()
            ring.sum(Dense(torch.zeros(SHORT_NUMEL * n)), (0,))
            taken.append(time.thread_time() - started)
        return _mean_of_ranks(statistics.median(taken), group) / (4 * (n - 1))

    def round_s(self, group: dist.ProcessGroup, transport: Transport, *, computing: bool) -> float:
        """Seconds of a round of short messages among many, beside steps or by itself; all of a group must call.

        Args:
            group: of this rank and the others.
            transport: among them.
            computing: all ranks make steps meanwhile.
        """
        n, ring = dist.get_world_size(group), Ring().bind(transport)

        def sums() -> float:
            started = time.perf_counter()
            for _ in range(SUMS):
                ring.sum(Dense(torch.zeros(SHORT_NUMEL * n)), (0,))
            return (time.perf_counter() - started) / (SUMS * 2 * (n - 1))

        dist.barrier(group)
        with ThreadPoolExecutor(1) as beside:
            under_way = beside.submit(sums)
            while computing and not under_way.done():
                self._step()
        return _mean_of_ranks(under_way.result(), group)

    def stir(self) -> None:
        """Compute on a few samples, so that caches hold what they hold behind backward."""
        x, y = next(self._batches)
        torch.nn.functional.cross_entropy(self._ddp(x[:STIRRED_SAMPLES]), y[:STIRRED_SAMPLES]).backward()
        self._optimizer.zero_grad()

    def _step(self) -> tuple[list[float], list[float]]:
        """(when the batch was asked for, it was there, forward, backward and update had ended; when buckets came)."""
        self._arrived = []
        marks = [self._clock()]
        x, y = next(self._batches)
        marks.append(self._clock())
        loss = torch.nn.functional.cross_entropy(self._ddp(x), y)
        marks.append(self._clock())
        loss.backward()
        marks.append(self._clock())
        self._optimizer.step()
        self._optimizer.zero_grad()
        marks.append(self._clock())
        return marks, [arrived for arrived, _, _ in self._arrived]

    def gradients(self) -> list[list[tuple[list[Layer], list[torch.Tensor]]]]:
        """Of some ranks at the same weights: each bucket's layers and gradients."""
        self._keeps = True
        ranks = []
        for _ in range(RANKS):
            self._arrived = []
            x, y = next(self._batches)
            torch.nn.functional.cross_entropy(self._ddp(x), y).backward()
            self._optimizer.zero_grad()
            ranks.append([(of, kept) for _, of, kept in self._arrived])
        self._keeps = False
        return ranks

    def _take(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        arrived = self._clock()
        layers = [self._layer_of[id(parameter)] for parameter in bucket.parameters()]
        gradients, _ = self._taken.of(bucket)
        kept = [gradient.clone() for gradient in gradients] if self._keeps else []
        self._arrived.append((arrived, layers, kept))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


def bucket_parts(ready_s: float, layers: Sequence[Layer]) -> BucketParts:
    """Of layers without elements nothing is sent."""
    filled = [layer for layer in layers if layer.numel]
    ids, numels = tuple(layer.id for layer in filled), tuple(layer.numel for layer in filled)
    return BucketParts(ready_s=ready_s, layers=ids, numels=numels)


def _mean_of_ranks(value: float, group: dist.ProcessGroup) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return float(total) / dist.get_world_size(group)


def encoded(
    text: str,
    gradients: Sequence[Sequence[tuple[list[Layer], list[torch.Tensor]]]],
    config: CalibrateConfig,
    stir: Callable[[], object],
) -> tuple[EncodedBucket, ...]:
    """What a compressor makes of every bucket.

    Args:
        text: of the compressor.
        gradients: as of `StepParts.gradients`; left as they are.
        config: complete.
        stir: computes something else.
    """
    compressor = cast(Compressor, spec.build("compressors", text))
    reducers = [Reducer(compressor, momentum=MOMENTUM if compressor.owns_momentum else 0.0) for _ in gradients]
    num_buckets = len(gradients[0])
    works: list[list[list[float]]] = [[] for _ in range(num_buckets)]
    offers: list[list[list[Message]]] = [[] for _ in range(num_buckets)]
    for turn in range(1 + config.turns):
        for rank, (reducer, of_rank) in enumerate(zip(reducers, gradients, strict=True)):
            step = Step(index=LATE + turn, epoch=0, rank=rank, world_size=1, seed=config.seed, warmup=False)
            for number, (layers, kept) in enumerate(of_rank):
                bucket = Bucket(layers=layers, gradients=[gradient.clone() for gradient in kept], step=step)
                if is_timed := turn > 0 and rank == 0:
                    stir()
                work_s, messages = _reduced(reducer, bucket)
                if is_timed:
                    works[number].append(work_s)
                if turn == config.turns:
                    offers[number].append(messages)
            reducer.commit()
    return tuple(
        EncodedBucket(
            work_s=tuple(map(statistics.median, zip(*work, strict=True))),
            offers=tuple(_offer(of_ranks, stir) for of_ranks in zip(*of_bucket, strict=True)),
        )
        for work, of_bucket in zip(works, offers, strict=True)
    )


def _reduced(reducer: Reducer, bucket: Bucket) -> tuple[list[float], list[Message]]:
    """(seconds before each message and after the last, the messages)."""
    marks, messages = [clock()], []

    def travel(payload: Payload, key: Key) -> Payload:
        marks.append(clock())
        messages.append((key, payload.with_wire(payload.wire.clone()) if payload.elementwise else payload))
        marks.append(clock())
        return payload

    reducer.reduce(bucket, travel, Alone())
    marks.append(clock())
    return [after - before for before, after in zip(marks[::2], marks[1::2], strict=True)], messages


def _offer(messages: Sequence[Message], stir: Callable[[], object]) -> Offer:
    """A message, from what several ranks offer."""
    keys, of_ranks = zip(*messages, strict=True)
    first, second = of_ranks[:2]
    growth = [(1, 1.0)]
    if first.addable and not first.elementwise:
        total = first
        for count, payload in enumerate(of_ranks[1:], start=2):
            total = total.add(payload)
            growth.append((count, max(growth[-1][1], total.nbytes / first.nbytes)))
    whole = _handled(first, second, stir)
    part = _handled(first.split(PARTS)[0], second.split(PARTS)[0], stir) if first.addable else None
    return Offer(
        leaves=tuple(_size(leaf) for leaf in leaves(first)),
        layers=keys[0],
        growth=tuple(growth),
        merge=work_of(*((each.nbytes, each.merge_s) for each in (whole, part) if each is not None)),
        pack_s=whole.pack_s,
        unpack=work_of(*((each.nbytes, each.unpack_s) for each in (whole, part) if each is not None)),
        decode_s=whole.decode_s,
    )


class _Handled(NamedTuple):
    """Seconds of what is done to a payload of so many bytes; merged ones that are not element-wise are packed again."""

    nbytes: int
    pack_s: float
    unpack_s: float
    merge_s: float
    decode_s: float


def _handled(first: Payload, second: Payload, stir: Callable[[], object]) -> _Handled:
    """Medians of a few times, each behind other work."""
    dense, times = torch.zeros(first.numel), []
    for _ in range(REPEATS):
        stir()
        marks = [clock()]
        packed = first.pack()
        marks.append(clock())
        unpack(packed)
        marks.append(clock())
        if first.elementwise:
            first.wire + second.wire
        elif first.addable:
            first.add(second).pack()
        marks.append(clock())
        first.add_to_(dense)
        marks.append(clock())
        times.append([after - before for before, after in itertools.pairwise(marks)])
    return _Handled(first.nbytes, *map(statistics.median, zip(*times, strict=True)))


def work_of(whole: tuple[int, float], part: tuple[int, float] | None = None) -> Work:
    """From seconds for the bytes of a whole and of a part of it; where it has none, all of it is for any."""
    if part is None or part[0] == whole[0]:
        return Work(each_s=whole[1])
    byte_s = max(0.0, whole[1] - part[1]) / (whole[0] - part[0])
    return Work(each_s=max(0.0, part[1] - byte_s * part[0]), byte_s=byte_s)


def _size(leaf: Payload) -> LeafSize:
    wire = leaf.wire if leaf.elementwise else None
    return LeafSize(
        numel=leaf.numel,
        nbytes=leaf.nbytes,
        alignment=leaf.alignment,
        addable=leaf.addable,
        wire_numel=None if wire is None else wire.numel(),
        wire_dtype=None if wire is None else str(wire.dtype).removeprefix("torch."),
        splits_blocks=leaf.splits_blocks,
    )
