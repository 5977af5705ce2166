"""Measure the parts of a training step in this process: compute until each gradient bucket is ready, and compression.

Work that occurs once per step is timed right after other compute, which has replaced the contents of the caches, as in
a real step. If this work were timed in a loop of its own, encoding would take only half as long, and reading a short
message only a fifth as long.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.datasets.base import Dataset
from bench.extensions.predict.calibration import (
    BucketParts,
    CpuContention,
    EncodedBucket,
)
from bench.extensions.predict.message_profile import SentMessage, clock, profile_of_message
from bench.extensions.predict.options import CalibrateConfig
from bench.models.base import seeded_network
from bench.optimizers.base import Optimizer
from bench.rank import partition
from bench.rank.data import Batches
from bench.strategies.ddp import wrap
from collectives.allreduce import Ring
from collectives.base import Key
from collectives.payloads.base import Dense, Payload
from collectives.transport.base import SingleRank, Transport
from compressors.base import Compressor
from compressors.layer import Layer, Step, layers_of
from gradwire.ddp.gradients import ZeroCopyGradients
from gradwire.exchange.reducer import Reducer, reducer_for
from gradwire.exchange.report import Bucket

# Numbers of steps before the first timed one; in the first two, DDP forms its buckets.
WARMUP, LEAST_WARMUP = 4, 2
# A step that takes longer than this is repeated only as often as necessary.
SLOW_S = 1.0
# Index of a step long after the first steps, because some compressors send all entries in the first steps.
LATE = 10**6
CROWDED_STEPS = 8
# Each compressor is timed at least this often, even if the budget is spent.
LEAST_TURNS = 2
# Gradients of this many ranks are recorded at the same weights, to measure how many of the ranks' entries coincide.
RANKS = 4
MOMENTUM = 0.9
# Largest number of samples that are computed between two timings: in general, and if steps are slow.
STIRRED_SAMPLES, STIRRED_SAMPLES_IF_SLOW = 8, 2
REPEATS = 5
SUMS = 40
# Number of elements of a message that is so short that its time does not depend on its length.
SHORT_NUMEL = 64


class StepParts:
    """Train a model on this rank, without any exchange, and time the parts of its steps.

    Every rank of the process group must create an object of this class.

    Args:
        config: the complete configuration.

    Attributes:
        numel: number of elements of the gradient.
        num_buckets: number of buckets into which DDP cuts the gradient.
        step_s: seconds of a step.
        stir_s: seconds of a call of `stir`, which computes a little to replace the contents of the caches.
        is_slow: True if a step takes so long that measurements use fewer or smaller steps.
    """

    def __init__(self, config: CalibrateConfig) -> None:
        device = torch.device("cpu")
        dataset = cast(Dataset, spec.build("datasets", config.dataset))
        self._task = dataset.task
        model = seeded_network(config.model, dataset, config.seed)
        self._ddp: DistributedDataParallel = wrap(model, device, config.bucket_mb)
        # The gradients never reach the optimizer.
        self._optimizer = cast(Optimizer, spec.build("optimizers", config.optimizer)).bind(model, 0.0)
        train, _ = dataset.load(Path(config.data_dir), seed=config.seed, train_size=None, test_size=None)
        self._batches = Batches(
            RunConfig(batch_size=config.batch_size, augment=config.augment, seed=config.seed, replicas=1),
            dataset,
            train,
            partition.iid(len(train), 1, config.seed),
            0,
            device,
        )
        self.numel = sum(parameter.numel() for parameter in model.parameters())
        self._times: list[list[float]] = []
        self._layer_of = {id(layer.weight): layer for layer in layers_of(model)}
        self._arrived: list[tuple[float, list[Layer], list[torch.Tensor]]] = []
        self._keeps = False
        self._copied_s = 0.0
        self._clock = clock
        self._taken = ZeroCopyGradients(self._ddp)
        self._ddp.register_comm_hook(None, lambda _, bucket: self._take(bucket))
        for number in range(WARMUP):
            marks, arrived = self._step()
            self.num_buckets = len(arrived)
            self.step_s = marks[-1] - marks[0]
            self.is_slow = self.step_s > SLOW_S
            if number + 1 >= LEAST_WARMUP and self.is_slow:
                break
        started = clock()
        self.stir()
        self.stir_s = clock() - started

    def times(self, count: int) -> list[list[float]]:
        """Run and time `count` more steps; return the times of all steps that were timed since the last call.

        There is one list per step. It has the seconds of batch, forward, backward and update, and then, for each
        bucket, the seconds from the start of backward until the bucket is ready.
        """
        for _ in range(count):
            self._step(is_timed=True)
        times, self._times = self._times, []
        return times

    def crowd(self, group: dist.ProcessGroup, cores: int, steps: int) -> CpuContention:
        """Measure the wall-clock time of steps that all ranks of a group begin together.

        Each of these ranks must call this method.

        Args:
            group: the ranks that take part, including this rank.
            cores: number of cores that the ranks share.
            steps: number of steps; the first does not count if there are several.
        """
        self._clock = time.perf_counter
        ends, used_s = [], []
        for _ in range(steps):
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
        first = min(1, steps - 1)
        *handed_over, computed_s = map(statistics.median, zip(*ends[first:], strict=True))
        return CpuContention(
            load=dist.get_world_size(group) * torch.get_num_threads() / cores,
            handed_over_s=tuple(handed_over),
            computed_s=computed_s,
            cpu_s=_mean_of_ranks(statistics.median(used_s[first:]), group),
        )

    def around_message_s(self, group: dist.ProcessGroup, transport: Transport, steps: int) -> float:
        """Return a rank's CPU seconds to send or receive one message right after compute.

        Every rank must call this method.

        Args:
            group: the ranks that take part, including this rank.
            transport: connects the ranks of the group.
            steps: number of steps; after each, the ranks sum a short tensor, whose messages are timed.
        """
        n, ring = dist.get_world_size(group), Ring().bind(transport)
        taken = []
        for _ in range(steps):
            self._step()
            dist.barrier(group)
            started = time.thread_time()
            ring.sum(Dense(torch.zeros(SHORT_NUMEL * n)), (0,))
            taken.append(time.thread_time() - started)
        return _mean_of_ranks(statistics.median(taken), group) / (4 * (n - 1))

    def round_s(self, group: dist.ProcessGroup, transport: Transport, *, computing: bool) -> float:
        """Return the mean seconds of a round, in which each rank sends a short message.

        Every rank must call this method.

        Args:
            group: the ranks that take part, including this rank.
            transport: connects the ranks of the group.
            computing: True if all ranks shall compute at the same time: steps, or calls of `stir` if steps are slow.
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
                (self.stir if self.is_slow else self._step)()
        return _mean_of_ranks(under_way.result(), group)

    def stir(self) -> None:
        """Compute on a few samples, to fill the CPU caches with the contents that they have after backward."""
        x, y = next(self._batches)
        if self.is_slow:  # reading all weights is enough to fill the caches
            with torch.no_grad():
                self._ddp.module(x[:STIRRED_SAMPLES_IF_SLOW])
            return
        self._task.loss(self._ddp(x[:STIRRED_SAMPLES]), y[:STIRRED_SAMPLES]).backward()
        self._optimizer.zero_grad()

    def _step(self, *, is_timed: bool = False) -> tuple[list[float], list[float]]:
        """Run one step, and return the times in seconds at which its parts began.

        If `is_timed`, also store the step's times for the method `times`.

        Returns:
            The times before batch, before forward, before backward, before update and after update; and the time at
            which each bucket was ready.
        """
        self._arrived = []
        marks = [self._now()]
        x, y = next(self._batches)
        marks.append(self._now())
        loss = self._task.loss(self._ddp(x), y)
        marks.append(self._now())
        loss.backward()
        marks.append(self._now())
        self._optimizer.step()
        self._optimizer.zero_grad()
        marks.append(self._now())
        arrived = [at for at, _, _ in self._arrived]
        if is_timed:
            durations = [after - before for before, after in itertools.pairwise(marks)]
            self._times.append(durations + [at - marks[2] for at in arrived])
        return marks, arrived

    def gradients(self) -> list[list[tuple[list[Layer], list[torch.Tensor]]]]:
        """Run and time a step for each of `RANKS` simulated ranks; return the gradients, as [rank][bucket].

        All these steps use the same weights, each with the next batch. A bucket is a tuple (its layers, the gradient of
        each layer).
        """
        self._keeps = True
        ranks = []
        for _ in range(RANKS):
            self._step(is_timed=True)
            ranks.append([(of, kept) for _, of, kept in self._arrived])
        self._keeps = False
        return ranks

    def _now(self) -> float:
        """Return the clock's reading in seconds, minus the time that was spent on copying gradients."""
        return self._clock() - self._copied_s

    def _take(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        arrived = self._now()
        layers = [self._layer_of[id(parameter)] for parameter in bucket.parameters()]
        gradients, _ = self._taken.of(bucket)
        started = self._clock()
        kept = [gradient.clone() for gradient in gradients] if self._keeps else []
        self._copied_s += self._clock() - started
        self._arrived.append((arrived, layers, kept))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


def bucket_parts(ready_s: float, layers: Sequence[Layer]) -> BucketParts:
    """Return a bucket of those `layers` that have elements; layers without elements send nothing.

    Args:
        ready_s: seconds from the start of backward until the bucket is ready.
        layers: the layers, in their order in the bucket.
    """
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
    seconds: float = math.inf,
    *,
    in_first_epoch: bool = False,
) -> tuple[tuple[EncodedBucket, ...], int]:
    """Measure a compressor's work; return the messages that encode each bucket, and the number of repetitions.

    Args:
        text: spec text of the compressor.
        gradients: the result of `StepParts.gradients`; not changed.
        config: the complete configuration.
        stir: computes something else, to replace the contents of the caches.
        seconds: time limit; if it is short, there are fewer repetitions, but at least `LEAST_TURNS`.
        in_first_epoch: True for steps at the start of a density warm-up; False for steps after it.
    """
    compressor = cast(Compressor, spec.build("compressors", text))
    reducers = [
        reducer_for(compressor, momentum=MOMENTUM if compressor.traits.owns_momentum else 0.0) for _ in gradients
    ]
    num_buckets = len(gradients[0])
    works: list[list[list[float]]] = [[] for _ in range(num_buckets)]
    offers: list[list[list[SentMessage]]] = []
    started, turn, turns = time.monotonic(), 0, config.turns
    while turn <= turns:
        turn_started = time.monotonic()
        offers = [[] for _ in range(num_buckets)]
        for rank, (reducer, of_rank) in enumerate(zip(reducers, gradients, strict=True)):
            index = turn if in_first_epoch else LATE + turn
            step = Step(index=index, epoch=0, rank=rank, world_size=1, seed=config.seed, warmup=in_first_epoch)
            for number, (layers, kept) in enumerate(of_rank):
                bucket = Bucket(layers=layers, gradients=[gradient.clone() for gradient in kept], step=step)
                if is_timed := turn > 0 and rank == 0:
                    stir()
                work_s, messages = _reduced(reducer, bucket)
                if is_timed:
                    works[number].append(work_s)
                offers[number].append(messages)
            reducer.commit()
        if turn == 1 and seconds < math.inf:
            turn_s = 2 * (time.monotonic() - turn_started)  # the operations on messages take about as long again
            turns = min(turns, max(LEAST_TURNS, int((seconds - (turn_started - started)) / turn_s)))
        turn += 1
    repeats = REPEATS if turns == config.turns else min(REPEATS, turns)
    buckets = tuple(
        EncodedBucket(
            work_s=tuple(map(statistics.median, zip(*work, strict=True))),
            offers=tuple(profile_of_message(of_ranks, stir, repeats) for of_ranks in zip(*of_bucket, strict=True)),
        )
        for work, of_bucket in zip(works, offers, strict=True)
    )
    return buckets, turns


def _reduced(reducer: Reducer, bucket: Bucket) -> tuple[list[float], list[SentMessage]]:
    """Compress one bucket; return the seconds of work before each message and after the last, and the messages."""
    marks, messages = [clock()], []

    def travel(payload: Payload, key: Key) -> Payload:
        marks.append(clock())
        messages.append((key, payload.with_wire(payload.wire.clone()) if payload.elementwise else payload))
        marks.append(clock())
        return payload

    reducer.reduce(bucket, travel, SingleRank())
    marks.append(clock())
    return [after - before for before, after in zip(marks[::2], marks[1::2], strict=True)], messages
