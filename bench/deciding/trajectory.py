"""Trajectories: the quality that a training reaches after each number of steps, measured without the emulated link.

If the ranks of a training wait for each other, the link changes only the time of the training, and none of its losses.
So one trajectory per method and seed is enough for all links.
"""

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.core.config.run import RunConfig
from bench.core.errors import RunFailed
from bench.deciding.load import is_busy, mean_share
from bench.launch.sweep_state import by_digest, past_runs
from bench.report.quality import Metric, quality_of
from bench.report.store import Row, Run, collect_runs, interval_steps, read


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The training of one method with one seed.

    Attributes:
        seed: the run's seed.
        intervals: for each interval between evaluations, (step at which it begins, number of steps, mean bytes that a
            rank sends in one of these steps).
        start_s: extra seconds of the first interval, in which memory is allocated and connections are opened, compared
            with later steps that send as many bytes.
        num_to_target: number of intervals until the target was reached; None if the target was missed.
        accuracy: final test accuracy, from 0 to 1, or final bits per byte of a text; None if the training diverged.
        train_time_s: seconds of training up to the target, or of the whole training if the target was missed, as
            measured in this run.
        run: the run.
    """

    seed: int
    intervals: list[tuple[int, int, float]]
    start_s: float
    num_to_target: int | None
    accuracy: float | None
    train_time_s: float
    run: Run

    @property
    def rows(self) -> list[Row]:
        """The rows of the run's evaluations, one for each interval."""
        return evaluations(self.run, quality_of([self.run.last_known]))

    @property
    def steps(self) -> Counter[float]:
        """How many steps were made until the target or the end, by the number of bytes sent in such a step."""
        counted: Counter[float] = Counter()
        for _, number, nbytes in self.intervals[: self.num_to_target]:
            counted[nbytes] += number
        return counted

    @property
    def other_cpu_share(self) -> float | None:
        """The share of the cores' time that other programs took during this training; None if unknown.

        It is the mean over evaluations, because the intervals between evaluations are too short to count alone.
        """
        return mean_share(row["other_cpu_share"] for row in self.run.rows)


def without_load(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories of one method with an extra time of the first steps as on an idle machine.

    This extra time does not depend on the seed. So trainings on a busy machine get the mean of those on an idle
    machine. If there is none, they get the smallest of all, because other programs make the time longer.
    """
    idle = [each.start_s for each in trajectories if not is_busy(each.other_cpu_share)]
    if len(idle) == len(trajectories):
        return list(trajectories)
    start_s = statistics.fmean(idle) if idle else min(each.start_s for each in trajectories)
    return [
        dataclasses.replace(each, start_s=start_s) if is_busy(each.other_cpu_share) else each for each in trajectories
    ]


def evaluations(run: Run, quality: Metric) -> list[Row]:
    """Return the rows of a run's evaluations, from which its trajectory is made."""
    return [row for row in run.rows if row[quality.column] is not None and row["payload_bytes_per_step"] is not None]


def trajectory_of(run: Run, target: float) -> Trajectory:
    """Return the trajectory of a finished or diverged run.

    Args:
        run: the run, with all its evaluations.
        target: test accuracy to reach, from 0 to 1; or bits per byte of a text.

    Raises:
        RunFailed: the run made no evaluation.
    """
    quality = quality_of([run.last_known])
    rows = evaluations(run, quality)
    if not rows:
        reason = run["error"] or "the training ended before its first evaluation"
        raise RunFailed(f"{run.title}: {reason}; leave out this method, or lower its --lr")
    ends = [row["step"] for row in rows]
    numbers = [number or 0 for number in interval_steps(rows)]
    sent = [row["payload_bytes_per_step"] + (row["state_bytes_per_step"] or 0.0) for row in rows]
    trained_s = [row["train_time_s"] for row in rows]
    # Compare only with later steps that send as many bytes, because encoding takes longer if more is sent.
    alike = [place for place in range(1, len(rows)) if math.isclose(sent[place], sent[0], rel_tol=0.02)]
    steps_alike = sum(numbers[place] for place in alike)
    alike_s = sum(trained_s[place] - trained_s[place - 1] for place in alike)
    expected_s = numbers[0] * alike_s / steps_alike if steps_alike else trained_s[0]
    reached = next((place for place, row in enumerate(rows, 1) if quality.reaches(row[quality.column], target)), None)
    return Trajectory(
        seed=run["seed"],
        intervals=[(end - number, number, each) for end, number, each in zip(ends, numbers, sent, strict=True)],
        start_s=max(0.0, trained_s[0] - expected_s),
        num_to_target=None if run.diverged else reached,
        accuracy=None if run.diverged else rows[-1][quality.column],
        train_time_s=trained_s[(reached or len(rows)) - 1],
        run=run,
    )


def find_trajectories(configs: Sequence[RunConfig], out: Path, target: float) -> dict[str, Trajectory]:
    """Return the trajectories of finished runs in a folder, by the digest of their configuration.

    Args:
        configs: the wanted configurations.
        out: folder of the runs.
        target: value to reach, as for `trajectory_of`.

    Raises:
        RunFailed: a run failed for another reason than divergence.
    """
    past = by_digest(past_runs(out))
    found = {}
    for digest in dict.fromkeys(config.digest for config in configs):
        if digest not in past or past[digest].state == "torn":
            continue
        (run,) = collect_runs(read([past[digest].folder.metrics]))
        if not (run.ended_well or run.diverged):
            raise RunFailed(f"{run.title} {run.ending}: {run['error']}; its logs are in {past[digest].folder.path}")
        found[digest] = trajectory_of(run, target)
    return found
