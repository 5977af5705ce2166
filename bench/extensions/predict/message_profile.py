"""Measure a message: its sizes, and the CPU time to pack, unpack, merge and decode it."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from bench.extensions.predict.calibration import (
    LeafSize,
    LinearCost,
    MessageProfile,
)
from collectives.base import Key
from collectives.payloads.base import HEADER_BYTES, Payload, unpack
from collectives.schedule.rounds import Layout, leaves

# A message as it is passed to a collective: the ids of the message's layers, and the payload.
SentMessage = tuple[Key, Payload]
# Costs are measured for a whole payload, and for one part of a payload that is cut into this many parts.
PARTS = 8


def clock() -> float:
    """Return the CPU time in seconds if this process computes on one thread, otherwise the wall-clock time.

    CPU time is preferred, because other work on the machine does not lengthen it.
    """
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def profile_of_message(messages: Sequence[SentMessage], stir: Callable[[], object], repeats: int) -> MessageProfile:
    """Return the sizes of a message, and the CPU time to pack, unpack, merge and decode it.

    Args:
        messages: the same message of each rank, with the rank's own gradients.
        stir: computes something else before each repetition, to replace the contents of the caches.
        repeats: number of repetitions.
    """
    keys, of_ranks = zip(*messages, strict=True)
    first, second = of_ranks[:2]
    growth = [(1, growth_in_parts(first))]
    if first.addable and not first.elementwise:
        total = first
        for count, payload in enumerate(of_ranks[1:], start=2):
            total = total.add(payload)
            growth.append((count, max(growth[-1][1], total.nbytes / first.nbytes)))
    sizes = [(first, second)]
    if first.addable:
        start, stop = Layout.of(first).cuts(PARTS)[0]
        sizes.append((first.slice(start, stop), second.slice(start, stop)))
    lengths = [own.nbytes for own, _ in sizes]
    pack_s, unpack_s, merge_s, decode_s = zip(*(_handled(*both, stir, repeats) for both in sizes), strict=True)
    return MessageProfile(
        leaves=tuple(map(LeafSize.of, leaves(first))),
        layers=keys[0],
        growth=tuple(growth),
        merge=work_of(*zip(lengths, merge_s, strict=True)),
        pack_s=pack_s[0],
        unpack=work_of(*zip(lengths, unpack_s, strict=True)),
        decode_s=decode_s[0],
    )


def growth_in_parts(payload: Payload) -> float:
    """Return bytes of a payload that is cut in two / bytes of the whole payload, at least 1; headers do not count.

    The parts of a payload of codes are longer than the whole, because the values in them are bf16 or fp32.
    """
    if not payload.addable or payload.elementwise:
        return 1.0
    parts = [payload.slice(start, stop) for start, stop in Layout.of(payload).cuts(2)]
    return max(1.0, sum(map(_body_nbytes, parts)) / max(1, _body_nbytes(payload)))


def _body_nbytes(payload: Payload) -> int:
    return payload.nbytes - HEADER_BYTES * len(leaves(payload))


def _handled(first: Payload, second: Payload, stir: Callable[[], object], repeats: int) -> list[float]:
    """Return the median seconds to pack `first`, to unpack it, to merge it with `second`, and to decode it.

    `stir` is called before each repetition. Merging includes packing the merged payload if it is not element-wise.
    """
    dense, times = torch.zeros(first.numel), []
    for _ in range(repeats):
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
    return [statistics.median(of_operation) for of_operation in zip(*times, strict=True)]


def work_of(whole: tuple[int, float], part: tuple[int, float] | None = None) -> LinearCost:
    """Return the time of an operation as a linear function of bytes, from two measurements as (bytes, seconds).

    Args:
        whole: the measurement with a whole payload.
        part: the measurement with a part of the payload; if it is None or has as many bytes as `whole`, the time is
            assumed to be constant.
    """
    if part is None or part[0] == whole[0]:
        return LinearCost(fixed_s=whole[1])
    per_byte_s = max(0.0, whole[1] - part[1]) / (whole[0] - part[0])
    return LinearCost(fixed_s=max(0.0, part[1] - per_byte_s * part[0]), per_byte_s=per_byte_s)
