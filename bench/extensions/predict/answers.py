"""Print predictions for one job: its step, its time to a target accuracy, and a comparison with real runs.

The time to a target is predicted from the number of steps that measured runs needed. Hosts may fail at a constant rate,
independently of each other. The expected time then has a closed form: with T seconds of training between two
checkpoints, restarts of R seconds, and a mean of M seconds between failures of any host, T seconds of training are
expected to take (e^(T / M) - 1) e^(R / M) M seconds.

Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22 (2006).
Differs: a checkpoint takes no time, because training waits only for a copy in memory.
"""

import csv
import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rich.markup import escape

from bench.cli.console import print_json
from bench.cli.sweep import run_all, say_plan
from bench.core import spec
from bench.core.errors import UsageError
from bench.core.files import check_writable, writing
from bench.core.units import format_bytes, format_seconds
from bench.extensions.predict.asynchronous import AsyncPrediction
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.fastest import fastest
from bench.extensions.predict.options import TABLE, Losses, PredictConfig
from bench.extensions.predict.prediction import Prediction
from bench.extensions.predict.ranking import (
    dense_name,
    dense_on_each_collective,
    on_each_collective,
    print_table,
    step_as_it_is,
)
from bench.extensions.predict.request import (
    BASELINE,
    PredictionRequest,
    columns,
    predicted_in_first_epoch,
    request_from_options,
)
from bench.extensions.predict.script_profile import Profile
from bench.extensions.predict.sentences import ACCURACY, about, first_epoch_note, heading, in_first_epoch
from bench.extensions.predict.validation import (
    ValidationCell,
    as_rows,
    cells_of,
    check_machine,
    compare,
    finished_runs,
    latency_note,
    notes,
    with_validated,
)
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.sweep_file import plan_runs, read_sweep
from bench.launch.sweep_state import SweepState
from bench.report import store
from bench.report.quality import quality_of
from bench.report.store import Row, Run, collect_runs, one_per_seed
from compressors.base import Compressor

# Columns in which measured runs must agree with the calibration.
_CALIBRATED = ("model", "dataset", "optimizer", "batch_size")
# Columns in which runs with the same number of ranks must not differ.
_SAME_SETTINGS = (
    "lr", "lr_scaling", "schedule", "warmup_epochs", "clip_norm", "label_smoothing", "augment", "amp", "train_size",
    "holdout_size", "partition",
)  # fmt: skip
# If failures of hosts make training this many times as long, it practically never ends.
_HOPELESS = 1e4
SECONDS_PER_HOUR = 3600.0


def predict_one(known: Calibration, options: PredictConfig, steps_from: list[Path], *, as_json: bool) -> None:
    """Print the prediction for one compressor on given links; use the fastest collective if the options name none.

    Args:
        known: the calibration.
        options: the options of `bench predict`.
        steps_from: folders or CSV files of runs that trained to a target accuracy; the time to this target is predicted
            from their number of steps. May be empty.
        as_json: True to print JSON for programs; False to print lines for people.
    """
    requests = on_each_collective(known, request_from_options(options))
    best = fastest(known, requests)
    checked, prediction = best.request, best.prediction
    said = [*first_epoch_note(known, [checked.compressor]), *notes(known, checked), *latency_note(options, checked)]
    if checked != requests[0]:
        said.append(
            f"The fastest of {len(requests)} collectives is shown; bench run uses {requests[0].collective} unless you "
            f"add --collective {checked.collective}"
        )
    row = columns(checked, known, prediction, predicted_in_first_epoch(known, checked))
    if steps_from:
        said.append(_add_time_to_target(row, known, checked, steps_from))
    if options.losses:
        row |= with_losses(Losses.parse(options.losses), checked, prediction, row.get("time_to_target_s"))
    said += _pays(known, checked, prediction, row)
    if isinstance(known, Profile):
        row["step_as_it_is_s"] = step_as_it_is(known, checked)
        said.append(
            f"a step of {known.model} without changes takes {format_seconds(row['step_as_it_is_s'])} on these links"
        )
    said.append(ACCURACY)
    if as_json:
        print_json(row | {"notes": said})
        return
    print(about(known), heading(checked), sep="\n")
    for name, text in _lines(checked, prediction, row).items():
        print(f"  {name:<20} {text}")
    print(*said, sep="\n")


def _add_time_to_target(row: dict[str, Any], known: Calibration, checked: PredictionRequest, paths: list[Path]) -> str:
    """Add the time to the target accuracy to the row; return a sentence that says what this time is based on.

    If the time is unknown, None is added, and the sentence says why.

    Args:
        row: the predicted values by column, to which the time is added.
        known: the calibration.
        checked: the request that was predicted.
        paths: folders or CSV files of runs that trained to the target.

    Raises:
        UsageError: ranks do not wait for each other, or the runs have several targets or differ in their settings.
    """
    if not checked.is_ddp:
        raise UsageError("--steps-from needs ranks that wait for each other in every step; leave out --strategy")
    needed = needed_steps(store.read(paths), known, checked.compressor, checked.world_size)
    row["steps_to_target"] = needed.steps
    row["time_to_target_s"] = None
    if needed.steps is None:
        return needed.said
    compressor = cast(Compressor, spec.build("compressors", checked.compressor))
    denser_steps = any(getattr(compressor, name, 0) for name in ("dense_steps", "warmup_steps"))
    if (needed.of_epochs and compressor.traits.denser_epochs) or denser_steps:
        return (
            f"{needed.said}; {checked.compressor} sends more in the first steps than in the predicted step, so the "
            "time to the target is unknown: give runs with --steps, or warmup_epochs=0, and without dense_steps or "
            "warmup_steps"
        )
    row["time_to_target_s"] = needed.steps * row["step_time_s"]
    return needed.said


def _pays(known: Calibration, checked: PredictionRequest, prediction: Prediction, row: dict[str, Any]) -> list[str]:
    """Add the step time with dense bf16 gradients to the row, and say in a sentence whether compression is faster.

    Return a list with this sentence. If bf16 gradients are not calibrated, or are themselves what was predicted,
    nothing is added to the row and the list is empty.
    """
    if BASELINE not in known.encoded or (checked.compressor == BASELINE and not checked.is_local):
        return []
    dense = fastest(known, dense_on_each_collective(known, checked))
    dense_s = dense.prediction.step_time_s
    row |= {"dense_collective": dense.request.collective, "dense_step_time_s": dense_s}
    ratio = dense.prediction.samples_per_s / prediction.samples_per_s
    if not checked.waits:
        return [
            f"{1 / ratio:.2f} times as many samples as with dense {BASELINE}: "
            f"{dense.prediction.samples_per_s:.1f} per second"
        ]
    than = f"{dense_name(checked)} on {dense.request.collective}, whose step takes {format_seconds(dense_s)}"
    if checked.compressor == "none":
        return [f"without compression, in 32 bits, a step takes {ratio:.2f} times as long as with {than}"]
    if ratio < 1:
        return [f"a step is {1 / ratio:.2f} times as fast as with {than}"]
    return [f"compression does not pay here: a step takes {ratio:.2f} times as long as with {than}"]


def _lines(checked: PredictionRequest, prediction: Prediction, row: dict[str, Any]) -> dict[str, str]:
    step = "step of rank 0" if not checked.waits else "step" if prediction.step_time_p95_s is None else "mean step"
    nbytes, messages = format_bytes(prediction.payload_bytes_per_step), prediction.messages_per_step
    lines = {
        step: format_seconds(prediction.step_time_s),
        "exposed": format_seconds(prediction.exposed_s),
        "bound by": prediction.bound_by,
        "sent per rank": f"{nbytes} in {messages:{'.0f' if messages >= 1 else '.1g'}} messages",
        "sent by the busiest": format_bytes(prediction.payload_bytes_max_per_step),
        "CPU per rank": format_seconds(prediction.cpu_s_per_step),
        "samples per second": f"{prediction.samples_per_s:.1f}",
    }
    if in_first := in_first_epoch(row):
        lines["first epoch"] = in_first
    if isinstance(prediction, AsyncPrediction):
        quick, middle, slow = (format_seconds(of(prediction.step_times_s)) for of in (min, statistics.median, max))
        lines["updates per second"] = f"{prediction.updates_per_s:.1f}"
        lines["staleness"] = f"mean {prediction.staleness_mean:.2f}, at most {prediction.staleness_max}"
        lines["steps of all ranks"] = f"fastest {quick}, median {middle}, slowest {slow}"
    if prediction.step_time_p95_s is not None:
        lines["95 % of steps within"] = format_seconds(prediction.step_time_p95_s)
    for word, window in (("slowest", prediction.slowest_window), ("fastest", prediction.fastest_window)):
        if window is not None:
            lines[f"{word} tenth"] = (
                f"{format_seconds(window.step_time_s)} per step that begins from {format_seconds(window.begin_s)} to "
                f"{format_seconds(window.end_s)} of the trace"
            )
    if row.get("time_to_target_s"):
        lines["time to target"] = f"{format_seconds(row['time_to_target_s'])} in {row['steps_to_target']:.0f} steps"
    if "losses" in row:
        to_target_s = row["time_to_target_with_losses_s"]
        lines["with losses"] = (
            f"{row['times_as_long_with_losses']:.2f} times as long, {row['restarts_per_hour']:.2g} restart(s) per hour"
            + ("" if to_target_s is None else f"; to the target {format_seconds(to_target_s)}")
        )
    return lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeededSteps:
    """The number of training steps that a configuration needs to reach its target accuracy.

    Attributes:
        steps: median over seeds; seeds that missed the target or diverged count as infinite. None if unknown.
        said: one sentence that says what the number is based on, or why it is unknown.
        of_epochs: True if the length of a run was given in epochs; this matters because some compressors send more in
            the first epochs.
    """

    steps: float | None
    said: str
    of_epochs: bool = False


def needed_steps(rows: Sequence[Row], calibration: Calibration, compressor: str, world_size: int) -> NeededSteps:
    """Return the number of steps that a compressor needs to reach the target accuracy with ``world_size`` ranks.

    The number of steps depends on the global batch size, so it is known only for the measured numbers of ranks. Between
    two measured numbers of ranks, the number of steps is interpolated linearly over the logarithm of the number of
    ranks. Outside the measured range, it is unknown.

    Args:
        rows: every evaluation of the measured runs, as in `metrics.csv`.
        calibration: gives model, data set, optimizer and batch size.
        compressor: spec text of the compressor, without options that have their default.
        world_size: number of ranks of the predicted job.

    Raises:
        UsageError: the runs have several targets, or runs with the same number of ranks differ in their settings.
    """
    wanted = {name: getattr(calibration, name) for name in _CALIBRATED}
    wanted |= {"compressor": compressor, "strategy": "ddp", "accumulate": 1}
    quality = quality_of(row for row in rows if row["dataset"] == calibration.dataset)
    counted = [
        run
        for run in collect_runs(rows)
        if all(run[name] == value for name, value in wanted.items())
        and (run.ended_well or run.diverged)
        and run[quality.target_column] is not None
        # A run that was resumed with another number of ranks starts a new count of its steps, so it is left out.
        and len({row["world_size"] for row in run.rows}) <= 1
    ]
    runs, _ = one_per_seed(counted)
    if not runs:
        return NeededSteps(
            steps=None,
            said=f"no time to target: no run with {compressor} on {calibration.model}, {calibration.dataset}, "
            f"{calibration.optimizer} and batches of {calibration.batch_size} had a target and ended",
        )
    target, *others = sorted({run[quality.target_column] for run in runs})
    if others:
        raise UsageError(
            f"the runs have the targets {', '.join(map(str, (target, *others)))}; give only runs with one target"
        )
    title = quality.in_words(target)
    by_size: dict[int, list[Run]] = {}
    for run in runs:
        by_size.setdefault(run["world_size"], []).append(run)
    for (ranks, of_size), name in itertools.product(by_size.items(), _SAME_SETTINGS):
        if len(values := list(dict.fromkeys(run[name] for run in of_size))) > 1:
            raise UsageError(
                f"the runs with {ranks} ranks differ in {name} ({', '.join(map(str, values))}); give only runs with "
                f"the same {name}"
            )
    medians = {
        ranks: statistics.median(
            min((row["step"] for row in run.rows if row["time_to_target_s"] is not None), default=math.inf)
            for run in of_size
        )
        for ranks, of_size in sorted(by_size.items())
    }
    sizes = list(medians)
    around = [size for size in sizes if size < world_size][-1:] + [size for size in sizes if size > world_size][:1]
    steps: float | None = None
    if world_size in medians and math.isinf(medians[world_size]):
        said = f"no time to target: most of {len(by_size[world_size])} run(s) missed {title}"
    elif world_size in medians:
        steps = medians[world_size]
        said = f"steps to {title}: median of {len(by_size[world_size])} run(s) with {world_size} ranks"
    elif len(around) < 2 or any(math.isinf(medians[size]) for size in around):
        said = (
            f"no time to target: steps to {title} were measured with {', '.join(map(str, sizes))} ranks, so "
            f"the number with {world_size} ranks is unknown"
        )
    else:
        low, high = around
        share = math.log(world_size / low) / math.log(high / low)
        steps = medians[low] * (medians[high] / medians[low]) ** share
        said = f"steps to {title}: interpolated between {low} and {high} ranks"
    return NeededSteps(steps=steps, said=said, of_epochs=any(run["steps"] is None for run in runs))


def stretch(*, losses_per_s: float, checkpoint_s: float, restart_s: float) -> float:
    """Return the factor by which random failures of hosts lengthen the expected training time.

    Args:
        losses_per_s: number of failures per second among all hosts together.
        checkpoint_s: seconds of training from one checkpoint to the next; a failure discards the training since the
            last checkpoint.
        restart_s: seconds from a failure until training continues; another failure in this time starts the restart
            again.

    Returns:
        A factor of at least 1; infinite if it is too large for a float.
    """
    per_checkpoint = losses_per_s * checkpoint_s
    try:
        return math.expm1(per_checkpoint) / per_checkpoint * math.exp(losses_per_s * restart_s)
    except OverflowError:
        return math.inf


def with_losses(
    losses: Losses, request: PredictionRequest, prediction: Prediction, time_to_target_s: float | None
) -> dict[str, Any]:
    """Return the columns of `bench predict --losses`: the expected times if hosts fail at random.

    Args:
        losses: how often each host fails, how long a restart takes, and how often checkpoints are written.
        request: the request that was predicted.
        prediction: the prediction without failures.
        time_to_target_s: seconds to the target accuracy without failures; None if unknown.

    Returns:
        Values by column: the option `--losses`, the factor by which training takes longer, restarts per hour, and
        seconds to the target accuracy with failures (None if `time_to_target_s` is None).

    Raises:
        UsageError: ranks do not wait for each other, or training would practically never end.
    """
    if not request.waits:
        raise UsageError("--losses needs a strategy whose ranks wait for each other; leave out --strategy")
    losses_per_s = len(request.hosts) / losses.every_s
    checkpoint_s = losses.checkpoint_steps * prediction.step_time_s
    times = stretch(losses_per_s=losses_per_s, checkpoint_s=checkpoint_s, restart_s=losses.restart_s)
    if times > _HOPELESS:
        raise UsageError(
            f"with a host lost every {format_seconds(1 / losses_per_s)} among {len(request.hosts)} hosts, checkpoints "
            f"that are {format_seconds(checkpoint_s)} apart are hardly ever reached; give fewer steps or a shorter "
            "restart"
        )
    to_target_s = time_to_target_s
    if time_to_target_s:
        rest_s = time_to_target_s % checkpoint_s  # seconds of training after the last checkpoint
        to_target_s = (time_to_target_s - rest_s) * times
        if rest_s:
            to_target_s += rest_s * stretch(losses_per_s=losses_per_s, checkpoint_s=rest_s, restart_s=losses.restart_s)
    return {
        "losses": str(losses),
        "times_as_long_with_losses": times,
        "restarts_per_hour": losses_per_s * SECONDS_PER_HOUR,
        "time_to_target_with_losses_s": to_target_s,
    }


def validate(known: Calibration, path: Path, file: Path, runs: Path, table: Path | None, *, as_json: bool) -> None:
    """Predict all configurations of a sweep file, run those that have no result yet, and print a comparison.

    The comparison is also added to the calibration file and written to a CSV file.

    Args:
        known: the calibration of this machine.
        path: file of the calibration.
        file: the sweep file.
        runs: folder of the sweep's runs.
        table: the CSV file; None for a file in the folder of runs.
        as_json: True to print JSON for programs; False to print a table for people.
    """
    check_machine(known)
    again = f"to run them again, remove their folders from {runs}"
    with ForkServer(TRAIN) as server:
        agenda = SweepState.look_up(plan_runs(read_sweep(file), server), runs)
        cells = cells_of(known, agenda.runs)
        for kept in filter(None, (path, table)):  # the folder of runs is created later
            check_writable(kept)
        configs = agenda.to_do(retry_failed=False)
        say_plan(agenda, configs, again)
        if configs:
            agenda = run_all(agenda, configs, server)
    _keep_compared(known, path, cells, agenda, table or runs / TABLE, as_json=as_json)
    agenda.raise_failures(again)


def compare_with_finished(known: Calibration, path: Path, folder: Path, table: Path | None, *, as_json: bool) -> None:
    """Predict the configurations of the finished runs in a folder, and print a comparison as `validate` does."""
    table = table or folder / TABLE
    for kept in (path, table):
        check_writable(kept)
    agenda = finished_runs(known, folder, lambda sentence: print(sentence, file=sys.stderr))
    _keep_compared(known, path, cells_of(known, agenda.runs), agenda, table, as_json=as_json)


def _keep_compared(
    known: Calibration, path: Path, cells: Sequence[ValidationCell], agenda: SweepState, table: Path, *, as_json: bool
) -> None:
    compared = compare(cells, agenda)
    rows = as_rows(compared, known)
    with_validated(known, compared).write(path)
    with writing(table, "--table"), table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    errors = sorted(abs(row["error"]) for row in rows if row["error"] is not None)
    middle = statistics.median(errors) if errors else None
    most = errors[math.ceil(0.9 * len(errors)) - 1] if errors else None
    if as_json:
        print_json({"cells": rows, "median_error": middle, "p90_error": most})
        return
    shown = [
        {
            "configuration": escape(row["settings"] or "[base]"),
            "predicted": format_seconds(row["predicted_step_time_s"]),
            "measured": (
                format_seconds(row["step_time_s"])
                if row["step_time_s"] is not None
                else "not timed"
                if row["runs"]
                else "failed"
            ),
            "error": "-" if row["error"] is None else f"{row['error']:+.1%}",
            "bound by": row["bound_by"],
        }
        for row in rows
    ]
    print_table(shown, left=("configuration", "bound by"))
    if middle is not None and most is not None:
        print(f"error of the step time: median {middle:.1%}, 90th percentile {most:.1%}, {len(errors)} configurations")
