"""Other programs' use of the cores while a decision is measured.

Losses and accuracies do not depend on it, but step times do. So trainings without the link always count, and what was
timed on a busy machine is measured again when the machine is idle.
"""

import dataclasses
import os
import time
from collections.abc import Iterable
from pathlib import Path

from bench.core.counters import NOTEWORTHY_SHARE, OtherWork

# Folder of step times and whole runs that were measured on a busy machine and do not count any more.
SET_ASIDE = ".under-load"
_LOOK_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Shares of the cores' time, from 0 to 1, that other programs took during a decision; None if unknown.

    Attributes:
        at_start: before the first seed.
        trajectories: mean over the trainings without the link.
        step_times: mean over the jobs that timed steps.
        checks: largest share during a check on the link.
    """

    at_start: float | None = None
    trajectories: float | None = None
    step_times: float | None = None
    checks: float | None = None


def share_now() -> float | None:
    """Return the share of the cores' time that other programs take now, measured for half a second."""
    work = OtherWork(os.getpid())
    work.start()
    time.sleep(_LOOK_S)
    work.stop()
    return work.share


def mean_share(shares: Iterable[float | None]) -> float | None:
    """Return the mean of the known shares; None if none is known."""
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def is_busy(share: float | None) -> bool:
    """Return True if other programs with this share of the cores' time make step times too long."""
    return share is not None and share > NOTEWORTHY_SHARE


def busy(shares: Iterable[float | None], advice: str) -> list[str]:
    """Return a warning with this advice if other programs used some of the cores; otherwise an empty list.

    Args:
        shares: for each measurement, the share of the cores' time that other programs took; only the mean is used.
        advice: what was measured, and what to do.
    """
    share = mean_share(shares)
    return [f"other programs took {share:.0%} of the cores while {advice}"] if share and is_busy(share) else []


def set_aside(study: Path, folders: Iterable[str]) -> None:
    """Move these folders of a study into a new folder in `SET_ASIDE`, where no measurement is looked for."""
    kept = study / SET_ASIDE
    kept.mkdir(exist_ok=True)
    place = kept / str(1 + len(list(kept.iterdir())))
    place.mkdir()
    for name in folders:
        if (study / name).exists():
            (study / name).rename(place / name)
