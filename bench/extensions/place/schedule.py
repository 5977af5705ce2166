"""Tasks on devices and links, and when each ends, by list scheduling.

Tasks take what they use in the order of the list, as real devices work through their part of a program: one that is
listed later never passes one that is listed earlier. Every end is therefore built from the tasks' lengths by sums and
maxima alone, so that a longer task never makes the whole shorter (which schedulers that choose as they go do not
promise: Graham, "Bounds on multiprocessing timing anomalies", 1969), and the whole lies between the longest chain of
tasks and their sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

Purpose = Literal["compute", "batch", "values", "sum"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One operation on a device, or one transfer over the links of a route.

    Attributes:
        name: unique.
        seconds: how long it takes.
        uses: devices or directions of links that are its own while it lasts.
        after: names of the tasks, earlier in the list, that must have ended.
        purpose: an operation; or a transfer of a mini-batch, of activations and their gradients, or of sums of
            gradients.
        nbytes: of a transfer.
    """

    name: str
    seconds: float
    uses: tuple[str, ...]
    after: tuple[str, ...] = ()
    purpose: Purpose = "compute"
    nbytes: int = 0


def end_times(tasks: Sequence[Task]) -> dict[str, float]:
    """Return when each task ends."""
    ends: dict[str, float] = {}
    free_at: dict[str, float] = {}
    for task in tasks:
        start = max(
            max((ends[name] for name in task.after), default=0.0),
            max((free_at.get(name, 0.0) for name in task.uses), default=0.0),
        )
        ends[task.name] = start + task.seconds
        free_at.update((name, ends[task.name]) for name in task.uses)
    return ends


def makespan(tasks: Sequence[Task]) -> float:
    """Return when the last task ends."""
    return max(end_times(tasks).values(), default=0.0)


def critical_path(tasks: Sequence[Task]) -> float:
    """Return the length of the longest chain of tasks: the makespan if nothing had to share anything."""
    return makespan([dataclasses.replace(task, uses=()) for task in tasks])


def serial_sum(tasks: Sequence[Task]) -> float:
    """Return the time in which one task after the other would be done."""
    return sum(task.seconds for task in tasks)
