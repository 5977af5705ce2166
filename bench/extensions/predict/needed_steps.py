"""Find how many steps measured runs took to their target, so that `bench predict` can predict a time to target."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.core.errors import UsageError
from bench.extensions.predict.calibration import Calibration
from bench.report.store import Row, Run, collect_runs, one_per_seed

_THE_SAME = ("model", "dataset", "optimizer", "batch_size")
# Columns in which runs with the same number of ranks must not differ.
_ALIKE = ("lr", "lr_scaling", "schedule", "warmup_epochs", "augment", "amp", "train_size", "holdout_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeededSteps:
    """The number of steps that a configuration needs to its target.

    Attributes:
        steps: median over seeds, with those that missed the target or diverged counted as infinite; None: not known.
        said: one sentence on what the number is based on, or why there is none.
        of_epochs: True if a run's length was given in epochs, so that its compressor may have sent more in early ones.
    """

    steps: float | None
    said: str
    of_epochs: bool = False


def needed_steps(rows: Sequence[Row], calibration: Calibration, compressor: str, world_size: int) -> NeededSteps:
    """Return the number of steps that a compressor needs to the target with ``world_size`` ranks.

    The number depends on the global batch, so it is known for the numbers of ranks that were measured. Between two of
    these it is interpolated linearly in the logarithms; outside them it is unknown.

    Args:
        rows: every evaluation of the measured runs.
        calibration: gives model, data set, optimizer and batch size.
        compressor: the compressor's shortest text.
        world_size: number of ranks of the predicted job.

    Raises:
        UsageError: the runs have several targets, or those with the same number of ranks differ in their settings.
    """
    wanted = {name: getattr(calibration, name) for name in _THE_SAME}
    wanted |= {"compressor": compressor, "strategy": "ddp", "accumulate": 1}
    alike = [run for run in collect_runs(rows) if all(run[name] == value for name, value in wanted.items())]
    counted = [run for run in alike if (run.ended_well or run.diverged) and run["target_accuracy"] is not None]
    runs, _ = one_per_seed([run for run in counted if not _changed_ranks(run)])
    if not runs:
        return NeededSteps(
            steps=None,
            said=f"no time to target: no run with {compressor} had one, and ended, on {calibration.model}, "
            f"{calibration.dataset}, {calibration.optimizer} and batches of {calibration.batch_size}",
        )
    targets = sorted({run["target_accuracy"] for run in runs})
    if len(targets) > 1:
        raise UsageError(f"the runs have the targets {', '.join(map(str, targets))}; give those of one")
    for ranks in {run["world_size"] for run in runs}:
        _check_alike([run for run in runs if run["world_size"] == ranks])
    found = _at(_medians(runs), world_size, targets[0])
    return dataclasses.replace(found, of_epochs=any(run["steps"] is None for run in runs))


def _check_alike(runs: Sequence[Run]) -> None:
    for name in _ALIKE:
        if len(values := list(dict.fromkeys(run[name] for run in runs))) > 1:
            raise UsageError(
                f"the runs with {runs[0]['world_size']} ranks differ in {name} ({', '.join(map(str, values))}); give "
                "those of one"
            )


def _changed_ranks(run: Run) -> bool:
    """Return True if the run was resumed with another number of ranks, which restarts the count of steps."""
    return len({row["world_size"] for row in run.rows}) > 1


def _medians(runs: Sequence[Run]) -> dict[int, tuple[float, int]]:
    """Return (median of steps, number of seeds) by number of ranks."""
    seeds: dict[int, list[float]] = {}
    for run in runs:
        reached = [row["step"] for row in run.rows if row["time_to_target_s"] is not None]
        seeds.setdefault(run["world_size"], []).append(min(reached, default=math.inf))
    return {ranks: (statistics.median(steps), len(steps)) for ranks, steps in sorted(seeds.items())}


def _at(medians: Mapping[int, tuple[float, int]], world_size: int, target: Any) -> NeededSteps:
    sizes = list(medians)
    if world_size in medians:
        steps, seeds = medians[world_size]
        if math.isinf(steps):
            return NeededSteps(steps=None, said=f"no time to target: most of {seeds} run(s) missed {target:.1%}")
        return NeededSteps(steps=steps, said=f"steps to {target:.1%}: median of {seeds} run(s) with {world_size} ranks")
    around = [size for size in sizes if size < world_size][-1:] + [size for size in sizes if size > world_size][:1]
    if len(around) < 2 or any(math.isinf(medians[size][0]) for size in around):
        return NeededSteps(
            steps=None,
            said=f"no time to target: steps to {target:.1%} were measured with {', '.join(map(str, sizes))} ranks, "
            f"which does not tell what {world_size} would need",
        )
    (low, high), (of_low, of_high) = around, (medians[size][0] for size in around)
    share = math.log(world_size / low) / math.log(high / low)
    return NeededSteps(
        steps=of_low * (of_high / of_low) ** share,
        said=f"steps to {target:.1%}: interpolated between {low} and {high} ranks",
    )
