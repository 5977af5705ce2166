"""Divide each step of each rank into parts that add up to the step, and find what bounds the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from bench.extensions.trace.collectives import SplitCalls, split
from bench.extensions.trace.intervals import Intervals, Times, common, joined, lengths, minus, union
from bench.extensions.trace.kineto import Recording

# The parts of a step, in the order in which they claim a time that belongs to several, by their names for people.
PARTS = {
    "compute_s": "compute",
    "encoding_s": "encoding",
    "exposed_transfer_s": "exposed transfer",
    "exposed_wait_s": "exposed wait for late ranks",
    "exposed_unsplit_s": "exposed exchange, transfer or wait",
    "idle_s": "idle",
}
# The parts that would vanish if nothing were exchanged.
EXCHANGE = ("encoding_s", "exposed_transfer_s", "exposed_wait_s", "exposed_unsplit_s")
# A rank is called late if the others wait for it for more than this share of a step.
_LATE = 0.03


@dataclasses.dataclass(kw_only=True)
class RankSteps:
    """The steps of one rank.

    Attributes:
        rank: the rank.
        numbers: the numbers of its steps.
        step_s: duration of each step, float64 [steps].
        parts: for each key of `PARTS`, its duration in each step, float64 [steps]; None if it is not known.
        sets: when each part of `parts` took place, for the picture.
        calls: the exchanges.
    """

    rank: int
    numbers: list[int]
    step_s: Times
    parts: dict[str, Times | None]
    sets: dict[str, Intervals]
    calls: SplitCalls

    def mean(self, name: str) -> float | None:
        """Return the mean of a part, or of "step_s", over the steps; None if it is not known."""
        values = self.step_s if name == "step_s" else self.parts[name]
        return None if values is None else float(values.mean())

    @property
    def without_exchange_s(self) -> float:
        """Return the mean step without all parts that an exchange causes."""
        return float(self.step_s.mean()) - sum(self.mean(name) or 0.0 for name in EXCHANGE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Late:
    """A rank for which others wait: it costs each of them `wait_s` per step on average."""

    rank: int
    wait_s: float


@dataclasses.dataclass(kw_only=True)
class TracedJob:
    """The answer about a job; seconds are means over steps.

    Attributes:
        ranks: the steps of each rank.
        step_s: the step as the mean over ranks.
        parts: each part as the mean over ranks; None if no rank knows it.
        bound_by: key of the longest part.
        least_s: the step if nothing were exchanged: that of the slowest rank.
        late: ranks for which the others wait noticeably, the one that costs most first.
        notes: what cannot be known, one sentence each.
    """

    ranks: list[RankSteps]
    step_s: float
    parts: dict[str, float | None]
    bound_by: str
    least_s: float
    late: list[Late]
    notes: list[str]


def job_of(recordings: Sequence[Recording]) -> TracedJob:
    """Return the answer about the recordings of a job, one per rank."""
    all_calls, notes = split(recordings)
    for recording in recordings:
        if not recording.on_device and not len(recording.compute[0]):
            notes.append(
                f"{recording.path.name} holds no operators, so it is not known when rank {recording.rank} computed"
            )
    ranks = [_rank(recording, calls) for recording, calls in zip(recordings, all_calls, strict=True)]
    if len({tuple(each.numbers) for each in ranks}) > 1:
        notes.append("the ranks recorded different steps; means are over each rank's own steps")
    parts = {}
    for name in PARTS:
        known = [value for each in ranks if (value := each.mean(name)) is not None]
        parts[name] = sum(known) / len(known) if known else None
    step_s = sum(float(each.step_s.mean()) for each in ranks) / len(ranks)
    return TracedJob(
        ranks=ranks,
        step_s=step_s,
        parts=parts,
        bound_by=max(PARTS, key=lambda name: parts[name] or 0.0),
        least_s=min(step_s, max(each.without_exchange_s for each in ranks)),
        late=[late for late in _late(ranks) if late.wait_s > _LATE * step_s],
        notes=[note for recording in recordings for note in recording.notes] + notes,
    )


def _rank(recording: Recording, calls: SplitCalls) -> RankSteps:
    spans = np.array([*recording.steps.values()])
    starts, ends = spans[:, 0], spans[:, 1]
    waits_until = np.where(np.isnan(calls.transfer_s), calls.end_s, calls.end_s - calls.transfer_s)
    is_split = ~np.isnan(calls.transfer_s)
    claims = {
        "compute_s": recording.compute,
        "encoding_s": recording.encoding,
        "exposed_transfer_s": union(waits_until[is_split], calls.end_s[is_split]),
        "exposed_wait_s": union(calls.start_s[is_split], waits_until[is_split]),
        "exposed_unsplit_s": union(calls.start_s[~is_split], calls.end_s[~is_split]),
    }
    steps = union(starts, ends)
    sets: dict[str, Intervals] = {}
    for name, claimed in claims.items():
        sets[name] = minus(common(claimed, steps), joined(*sets.values())) if sets else common(claimed, steps)
    parts: dict[str, Times | None] = {name: lengths(own, starts, ends) for name, own in sets.items()}
    step_s = ends - starts
    parts["idle_s"] = np.maximum(step_s - sum(part for part in parts.values() if part is not None), 0.0)
    if not len(calls.start_s) and recording.world_size != 1:
        parts |= {"exposed_transfer_s": None, "exposed_wait_s": None, "exposed_unsplit_s": None}
    elif not is_split.any() and len(is_split):
        parts |= {"exposed_transfer_s": None, "exposed_wait_s": None}
    if not recording.has_marks:
        parts["encoding_s"] = None
    if not recording.on_device and not len(recording.compute[0]):
        parts |= {"compute_s": None, "idle_s": None}
    assert recording.rank is not None
    return RankSteps(
        rank=recording.rank, numbers=[*recording.steps], step_s=step_s, parts=parts, sets=sets, calls=calls
    )


def _late(ranks: Sequence[RankSteps]) -> list[Late]:
    """Return, for every rank that came last, how long the others waited for it per step, the longest first."""
    waits = np.zeros((len(ranks), len(ranks)))  # seconds per step, [waiting rank, late rank]
    for index, each in enumerate(ranks):
        calls = each.calls
        known = calls.late >= 0
        until = calls.end_s[known] - calls.transfer_s[known]
        exposed = lengths(each.sets["exposed_wait_s"], calls.start_s[known], until)
        np.add.at(waits[index], calls.late[known], exposed / len(each.numbers))
    others = max(1, len(ranks) - 1)
    found = [Late(rank=each.rank, wait_s=float(waits[:, index].sum()) / others) for index, each in enumerate(ranks)]
    return sorted(found, key=lambda late: -late.wait_s)
