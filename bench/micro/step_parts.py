"""The parts of a training step, measured in this process: compute up to each bucket, and what compressors do to it."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.core import spec
from bench.core.calibrate_config import CalibrateConfig
from bench.core.config import RunConfig
from bench.core.parts import BucketParts, Crowd, EncodedBucket, LeafSize, Offer
from bench.datasets.base import Dataset
from bench.models.base import Model
from bench.optimizers.base import Optimizer
from bench.strategies.data_parallel.replicas import wrap
from bench.train.batches import Batches
from collectives.base import Key
from collectives.payloads.base import Payload
from collectives.rounds.layout import leaves
from collectives.transport.alone import Alone
from compressors.base import Compressor
from compressors.ddp.bucket import Bucket
from compressors.ddp.reducer import Reducer
from compressors.layer import Layer, Step, layers_of

WARMUP = 4
CROWDED_STEPS = 8
RANKS = 4
"""whose gradients are recorded, at the same weights, to see how far the entries that they send are the same"""
MOMENTUM = 0.9

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
        self._optimizer = optimizer.build(model.parameters(), 1e-3)
        train, _ = dataset.load(Path(config.data_dir), seed=config.seed, train_size=None, test_size=None)
        of_run = RunConfig(batch_size=config.batch_size, augment=config.augment, seed=config.seed, replicas=1)
        self._batches = Batches(of_run, dataset, train, 0, device)
        self._repeats = config.repeats
        self._layer_of = {id(layer.weight): layer for layer in layers_of(model)}
        self._arrived: list[tuple[float, list[Layer], list[torch.Tensor]]] = []
        self._keeps = False
        self._clock = clock
        self._ddp.register_comm_hook(None, lambda _, bucket: self._take(bucket))
        for _ in range(WARMUP):  # in the first of these DDP's ranks agree on their buckets
            self._step()

    def compute(self) -> Compute:
        """Time some steps."""
        times: list[list[float]] = []
        for _ in range(self._repeats):
            marks, arrived = self._step()
            ready = [at - marks[2] for at in arrived]
            times.append([after - before for before, after in itertools.pairwise(marks)] + ready)
        batch_s, forward_s, backward_s, update_s, *ready = map(statistics.median, zip(*times, strict=True))
        buckets = [
            BucketParts(ready_s=at, layers=tuple(layer.id for layer in of), numels=tuple(layer.numel for layer in of))
            for at, (_, of, _) in zip(ready, self._arrived, strict=True)
        ]
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
        ends = []
        for _ in range(1 + CROWDED_STEPS):
            dist.barrier(group)
            marks, arrived = self._step()
            begun = torch.tensor([marks[0]], dtype=torch.float64)
            last = torch.tensor([*arrived, marks[3]], dtype=torch.float64)
            dist.all_reduce(begun, dist.ReduceOp.MIN, group)
            dist.all_reduce(last, dist.ReduceOp.MAX, group)
            ends.append((last - begun).tolist())
        self._clock = clock
        *handed_over, computed_s = map(statistics.median, zip(*ends[1:], strict=True))
        load = dist.get_world_size(group) * torch.get_num_threads() / cores
        return Crowd(load=load, handed_over_s=tuple(handed_over), computed_s=computed_s)

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
        return ranks

    def _take(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        arrived = self._clock()
        layers = [self._layer_of[id(parameter)] for parameter in bucket.parameters()]
        kept = [gradient.flatten().clone() for gradient in bucket.gradients()] if self._keeps else []
        self._arrived.append((arrived, layers, kept))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


def encoded(
    text: str, gradients: Sequence[Sequence[tuple[list[Layer], list[torch.Tensor]]]], config: CalibrateConfig
) -> tuple[EncodedBucket, ...]:
    """What a compressor makes of every bucket.

    Args:
        text: of the compressor.
        gradients: as of `StepParts.gradients`; left as they are.
        config: complete.
    """
    compressor = cast(Compressor, spec.build("compressors", text))
    reducers = [Reducer(compressor, momentum=MOMENTUM if compressor.owns_momentum else 0.0) for _ in gradients]
    num_buckets = len(gradients[0])
    works: list[list[list[float]]] = [[] for _ in range(num_buckets)]
    offers: list[list[list[Message]]] = [[] for _ in range(num_buckets)]
    for turn in range(1 + config.turns):
        for rank, (reducer, of_rank) in enumerate(zip(reducers, gradients, strict=True)):
            step = Step(index=turn, epoch=0, rank=rank, world_size=1, seed=config.seed, warmup=False)
            for number, (layers, kept) in enumerate(of_rank):
                bucket = Bucket(layers=layers, gradients=[gradient.clone() for gradient in kept], step=step)
                work_s, messages = _reduced(reducer, bucket)
                if turn:
                    works[number].append(work_s)
                if turn == config.turns:
                    offers[number].append(messages)
            reducer.commit()
    return tuple(
        EncodedBucket(
            work_s=tuple(map(statistics.median, zip(*work, strict=True))),
            offers=tuple(_offer(of_ranks) for of_ranks in zip(*of_bucket, strict=True)),
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


def _offer(messages: Sequence[Message]) -> Offer:
    """A message, from what several ranks offer."""
    keys, of_ranks = zip(*messages, strict=True)
    first, second = of_ranks[:2]
    dense = torch.zeros(first.numel)
    growth, merge_byte_s = [(1, 1.0)], 0.0
    if first.elementwise:
        wire = first.wire
        merge_byte_s = _seconds(lambda: wire + wire) / max(1, wire.nbytes)
    elif first.addable:
        merge_byte_s = _seconds(lambda: first.add(second)) / second.nbytes
        total = first
        for count, payload in enumerate(of_ranks[1:], start=2):
            total = total.add(payload)
            growth.append((count, max(growth[-1][1], total.nbytes / first.nbytes)))
    return Offer(
        leaves=tuple(_size(leaf) for leaf in leaves(first)),
        layers=keys[0],
        growth=tuple(growth),
        merge_byte_s=merge_byte_s,
        decode_s=_seconds(lambda: first.add_to_(dense)),
    )


def _size(leaf: Payload) -> LeafSize:
    wire = leaf.wire if leaf.elementwise else None
    return LeafSize(
        numel=leaf.numel,
        nbytes=leaf.nbytes,
        alignment=leaf.alignment,
        addable=leaf.addable,
        wire_numel=None if wire is None else wire.numel(),
        wire_dtype=None if wire is None else str(wire.dtype).removeprefix("torch."),
    )


def _seconds(work: Callable[[], object]) -> float:
    def once() -> float:
        started = clock()
        work()
        return clock() - started

    return statistics.median(once() for _ in range(5))
