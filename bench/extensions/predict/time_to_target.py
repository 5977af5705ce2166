"""Predict the time to a target accuracy, from the number of steps of measured runs, also if hosts fail at random.

Hosts fail at a constant rate, independently of each other. The expected time then has a closed form: with T seconds of
training between two checkpoints, restarts of R seconds, and a mean of M seconds between losses among all hosts, each T
takes (e^(T / M) - 1) e^(R / M) M seconds.

Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22 (2006).
Differs: a dump takes no time, because training waits only for a copy in memory.
"""

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.core.errors import UsageError
from bench.core.units import format_seconds
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.options import Losses
from bench.extensions.predict.prediction import Prediction
from bench.extensions.predict.request import PredictionRequest
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
    # A run that was resumed with another number of ranks starts a new count of its steps, so it is left out.
    runs, _ = one_per_seed([run for run in counted if len({row["world_size"] for row in run.rows}) <= 1])
    if not runs:
        return NeededSteps(
            steps=None,
            said=f"no time to target: no run with {compressor} on {calibration.model}, {calibration.dataset}, "
            f"{calibration.optimizer} and batches of {calibration.batch_size} had a target and ended",
        )
    targets = sorted({run["target_accuracy"] for run in runs})
    if len(targets) > 1:
        raise UsageError(f"the runs have the targets {', '.join(map(str, targets))}; give only runs with one target")
    by_size: dict[int, list[Run]] = {}
    for run in runs:
        by_size.setdefault(run["world_size"], []).append(run)
    for (ranks, of_size), name in itertools.product(by_size.items(), _ALIKE):
        if len(values := list(dict.fromkeys(run[name] for run in of_size))) > 1:
            raise UsageError(
                f"the runs with {ranks} ranks differ in {name} ({', '.join(map(str, values))}); give only runs with "
                f"the same {name}"
            )
    seeds = {
        ranks: [
            min((row["step"] for row in run.rows if row["time_to_target_s"] is not None), default=math.inf)
            for run in of_size
        ]
        for ranks, of_size in sorted(by_size.items())
    }
    medians = {ranks: (statistics.median(steps), len(steps)) for ranks, steps in seeds.items()}
    found = _at(medians, world_size, targets[0])
    return dataclasses.replace(found, of_epochs=any(run["steps"] is None for run in runs))


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


def stretch(*, losses_per_s: float, checkpoint_s: float, restart_s: float) -> float:
    """Return the expected time with losses / the time without losses.

    Args:
        losses_per_s: losses per second, of all hosts together.
        checkpoint_s: seconds of training from one checkpoint to the next; a loss discards the training since the last
            checkpoint.
        restart_s: seconds from a loss until training continues; another loss in this time starts the restart again.

    Returns:
        At least 1; infinite if it is too large for a float.
    """
    per_checkpoint = losses_per_s * checkpoint_s
    try:
        return math.expm1(per_checkpoint) / per_checkpoint * math.exp(losses_per_s * restart_s)
    except OverflowError:
        return math.inf


_HOPELESS = 1e4
SECONDS_PER_HOUR = 3600.0


def with_losses(
    losses: Losses, request: PredictionRequest, prediction: Prediction, time_to_target_s: float | None
) -> dict[str, Any]:
    """Return the expected times if hosts fail at random.

    Args:
        losses: how often each host fails, how long a restart takes, and how often checkpoints are written.
        request: the request that was predicted.
        prediction: the prediction without losses.
        time_to_target_s: time to the target without losses; None if unknown.

    Returns:
        Columns by name; the time to the target with losses is None if `time_to_target_s` is None.

    Raises:
        UsageError: ranks do not wait for each other, or training would practically never end.
    """
    if not request.waits:
        raise UsageError("--losses needs a strategy whose ranks wait for each other; leave out --strategy")
    losses_per_s = len(request.hosts) / losses.every_s
    checkpoint_s = losses.checkpoint_steps * prediction.step_time_s

    times_as_long = functools.partial(stretch, losses_per_s=losses_per_s, restart_s=losses.restart_s)
    times = times_as_long(checkpoint_s=checkpoint_s)
    if times > _HOPELESS:
        raise UsageError(
            f"with a loss every {format_seconds(1 / losses_per_s)} among {len(request.hosts)} hosts, checkpoints that "
            f"are {format_seconds(checkpoint_s)} apart are hardly ever reached; give fewer steps or a shorter restart"
        )
    to_target_s = time_to_target_s
    if time_to_target_s:
        rest_s = time_to_target_s % checkpoint_s  # since the last checkpoint
        to_target_s = (time_to_target_s - rest_s) * times + (
            rest_s * times_as_long(checkpoint_s=rest_s) if rest_s else 0.0
        )
    return {
        "losses": str(losses),
        "times_as_long_with_losses": times,
        "restarts_per_hour": losses_per_s * SECONDS_PER_HOUR,
        "time_to_target_with_losses_s": to_target_s,
    }
