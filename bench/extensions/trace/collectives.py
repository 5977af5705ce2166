"""Match the exchanges of all ranks: how long each transferred, how long a rank waited in it, and for which late rank.

The n-th exchange of a process group on one rank is the n-th on its other ranks. An exchange begins on a rank when the
rank is ready (with gloo: when one of its threads takes the sum), and ends on all ranks at about the same time. So no
clocks are compared: the rank on which an exchange is shortest came last, and this duration is the transfer. What the
exchange lasts longer on another rank is that rank's wait. Durations are clipped first: the part in which an earlier
exchange of the same group was under way counts for the earlier one.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.extensions.trace.call import BETWEEN_TWO, Call
from bench.extensions.trace.intervals import Times
from bench.extensions.trace.kineto import Recording

Group = tuple[str, str, tuple[int, ...]]


@dataclasses.dataclass(kw_only=True)
class SplitCalls:
    """The exchanges of one rank, in the order in which they began; every array has an entry for each.

    Attributes:
        start_s: beginning after clipping, float64.
        end_s: end, float64, at least `start_s`.
        transfer_s: duration of the transfer, at the end of the exchange, float64; NaN if it cannot be told from a wait.
        late: index of the recording whose rank came last; -1 if not known.
    """

    start_s: Times
    end_s: Times
    transfer_s: Times
    late: np.ndarray[Any, np.dtype[np.int64]]


def split(recordings: Sequence[Recording]) -> tuple[list[SplitCalls], list[str]]:
    """Return each recording's exchanges, divided into waiting and transfer, and a sentence for each that cannot be."""
    notes: list[str] = []
    all_calls = [_clipped(recording.calls) for recording in recordings]
    of_groups: dict[Group, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, recording in enumerate(recordings):
        for number, call in enumerate(recording.calls):
            if call.kind not in BETWEEN_TWO:
                of_groups[call.group][index].append(number)
    for group, lists in of_groups.items():
        here = [index for index, recording in enumerate(recordings) if recording.rank in group[2]] or [*lists]
        if len(here) < 2:
            continue
        matched, note = _match(recordings, group, {index: lists.get(index, []) for index in here})
        if note:
            notes.append(note)
        if not matched.size:
            continue
        durations = np.array(
            [
                all_calls[index].end_s[row] - all_calls[index].start_s[row]
                for index, row in zip(here, matched, strict=True)
            ]
        )
        for index, row in zip(here, matched, strict=True):
            all_calls[index].transfer_s[row] = durations.min(axis=0)
            all_calls[index].late[row] = np.array(here)[durations.argmin(axis=0)]
    notes += _gaps(recordings, [*of_groups])
    return all_calls, notes


def _clipped(calls: Sequence[Call]) -> SplitCalls:
    """Return calls without the parts in which an earlier call of the same group was under way."""
    starts, ends = (
        np.array([getattr(call, name) for call in calls], dtype=np.float64) for name in ("start_s", "end_s")
    )
    of_group: dict[Group, list[int]] = defaultdict(list)
    for number, call in enumerate(calls):
        of_group[call.group].append(number)
    for numbers in of_group.values():
        reached = np.append(-np.inf, np.maximum.accumulate(ends[numbers])[:-1])
        starts[numbers] = np.maximum(starts[numbers], np.minimum(reached, ends[numbers]))
    unknown = np.full(len(calls), np.nan)
    return SplitCalls(start_s=starts, end_s=ends, transfer_s=unknown, late=np.full(len(calls), -1))


def _match(
    recordings: Sequence[Recording], group: Group, lists: dict[int, list[int]]
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], str]:
    """Match the calls of a group on several ranks.

    Args:
        recordings: all recordings.
        group: the group.
        lists: by index of the recording, the numbers of the group's calls in it.

    Returns:
        The numbers of calls that belong together, int64 [ranks, matched calls], and a sentence about the others.
    """
    counts = {index: len(numbers) for index, numbers in lists.items()}
    sequences = {index: [recordings[index].calls[number].sequence for number in lists[index]] for index in lists}
    if all(None not in each and len({*each}) == len(each) for each in sequences.values()):
        shared = set.intersection(*({*each} for each in sequences.values()))
        kept = [
            [number for number, sequence in zip(lists[index], sequences[index], strict=True) if sequence in shared]
            for index in lists
        ]
    elif len({*counts.values()}) == 1:
        kept = [*lists.values()]
    else:
        kept = _in_equal_steps(recordings, lists)
    table = np.array(kept, dtype=np.int64).reshape(len(lists), -1)
    calls = [[recordings[index].calls[number] for number in row] for index, row in zip(lists, table, strict=True)]
    same = [len({call.kind for call in column}) == 1 for column in zip(*calls, strict=True)]
    table = table[:, same] if same else table
    most = max(counts.values())
    if table.shape[1] == most:
        return table, ""
    few, many = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    return table, (
        f"rank {recordings[many].rank} recorded {most} exchanges of {group_name(group)} and rank "
        f"{recordings[few].rank} {counts[few]}, of which {table.shape[1]} belong together; the waits in the others are "
        "not known"
    )


def _in_equal_steps(recordings: Sequence[Recording], lists: dict[int, list[int]]) -> list[list[int]]:
    """Return the numbers of the calls in those steps in which all ranks made equally many."""
    kept: list[list[int]] = [[] for _ in lists]
    for step in set.intersection(*({*recordings[index].steps} for index in lists)):
        inside = []
        for index, numbers in lists.items():
            start, end = recordings[index].steps[step]
            inside.append([number for number in numbers if start <= recordings[index].calls[number].start_s < end])
        if len({*map(len, inside)}) == 1:
            for row, numbers in zip(kept, inside, strict=True):
                row += numbers
    return [sorted(row) for row in kept]


def _gaps(recordings: Sequence[Recording], groups: Sequence[Group]) -> Iterator[str]:
    """Yield a sentence for each fact about the exchanges that the files do not tell."""
    here = {recording.rank for recording in recordings}
    size = max((recording.world_size or 0 for recording in recordings), default=0)
    missing = size - len(here)
    if missing > 0 and len(here) == 1:
        yield (
            f"only rank {next(iter(here))} of {size} is here, so it is not known how much of the exchange was waiting "
            "for late ranks; give the traces of all ranks"
        )
    elif missing > 0:
        yield f"{missing} of {size} ranks are not here, so waits for these ranks count as transfer"
    calls = [call for recording in recordings for call in recording.calls]
    if not calls and size != 1:
        yield "no exchange was recorded, so how long steps wait for it is not known" + (
            ""
            if any(recording.on_device for recording in recordings)
            else "; sums of gloo show up, as do exchanges of gradwire if the profiler records all threads"
        )
    if any(call.kind in BETWEEN_TWO for call in calls):
        yield "some exchanges are between two ranks (send, recv); how much of these was waiting is not known"
    if any(call.group[0] == "gloo" and call.in_numel is None for call in calls):
        yield "the sizes of gloo's exchanges are not in the trace; record with record_shapes=True"
    if any(call.group[0] == "gradwire" for call in calls):
        yield "the bytes of gradwire's own exchange are not in the trace; bench run shows them as sent/step"
    if any(group[0] == "gloo" and not group[2] for group in groups):
        yield "gloo does not record the group of an exchange; all its groups count as one"


def group_name(group: Group) -> str:
    """Return a group's name for people, such as "0 (8 ranks)"."""
    library, name, ranks = group
    size = f"{len(ranks)} ranks" if ranks else ""
    if not name:
        return size or ("gradwire" if library == "gradwire" else "unknown group")
    return f"{name[:40]} ({size})" if size else name[:40]


@dataclasses.dataclass(kw_only=True)
class CollectiveRow:
    """All exchanges of one kind, group and type, per step and rank.

    Attributes:
        kind: such as "all_reduce".
        group: the group's name for people.
        dtype: type of the elements; "" if not known.
        count: calls per step.
        nbytes: bytes per step, as nccl-tests counts them: the larger of input and output; None if not known.
        seconds: time per step, without waits unless `with_waits`.
        with_waits: True if the seconds contain waits for late ranks, so that the bandwidth is a lower bound.
        bus_bps: bus bandwidth in bits per second; None if not known.
    """

    kind: str
    group: str
    dtype: str
    count: float
    nbytes: float | None
    seconds: float
    with_waits: bool
    bus_bps: float | None


def rows(recordings: Sequence[Recording], all_calls: Sequence[SplitCalls]) -> list[CollectiveRow]:
    """Return one row for each kind of exchange, group and type, those that take longest first."""
    sums: dict[tuple[str, str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    ranks: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for index, (recording, split_calls) in enumerate(zip(recordings, all_calls, strict=True)):
        begin = min(start for start, _ in recording.steps.values())
        end = max(end for _, end in recording.steps.values())
        lasted = split_calls.end_s - split_calls.start_s
        for number, call in enumerate(recording.calls):
            if not begin <= call.end_s <= end:
                continue
            key = (call.kind, group_name(call.group), call.dtype)
            transfer = split_calls.transfer_s[number]
            nbytes, factor = _bytes_and_factor(call, recording.world_size)
            ranks[key].add(index)
            share = 1 / len(recording.steps)
            sums[key]["count"] += share
            sums[key]["seconds"] += share * float(lasted[number] if np.isnan(transfer) else transfer)
            sums[key]["with_waits"] += bool(np.isnan(transfer))
            sums[key]["unknown"] += nbytes is None
            sums[key]["no factor"] += factor is None
            sums[key]["nbytes"] += share * (nbytes or 0)
            sums[key]["bus"] += share * (nbytes or 0) * (factor or 0.0)
    found = []
    for (kind, group, dtype), each in sums.items():
        here, is_known = len(ranks[kind, group, dtype]), not each["unknown"]
        has_bus = is_known and not each["no factor"] and each["seconds"] > 0 and each["bus"] > 0
        found.append(
            CollectiveRow(
                kind=kind,
                group=group,
                dtype=dtype,
                count=each["count"] / here,
                nbytes=each["nbytes"] / here if is_known else None,
                seconds=each["seconds"] / here,
                with_waits=each["with_waits"] > 0,
                bus_bps=8 * each["bus"] / each["seconds"] if has_bus else None,
            )
        )
    return sorted(found, key=lambda row: -row.seconds)


def _bytes_and_factor(call: Call, world_size: int | None) -> tuple[int | None, float | None]:
    """Return the bytes of an exchange, and the factor from these to bytes on the bus, as nccl-tests defines both.

    Source: nccl-tests, doc/PERFORMANCE.md: with n ranks, 2 (n - 1) / n for all_reduce; (n - 1) / n for all_gather,
    reduce_scatter and all_to_all; 1 for the others.
    """
    ranks = len(call.group[2]) or world_size
    if call.itemsize is None or call.in_numel is None:
        return None, None
    numel = max(call.in_numel, call.out_numel or 0)
    if call.kind == "all_gather" and call.out_numel is None and ranks:  # gloo records the input only
        numel = call.in_numel * ranks
    factors = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
    if call.kind not in factors:
        return numel * call.itemsize, 1.0 if call.kind != "unknown" else None
    factor = factors[call.kind] * (ranks - 1) / ranks if ranks else None
    return numel * call.itemsize, factor
