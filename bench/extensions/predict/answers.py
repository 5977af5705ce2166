"""Answer `bench predict`: predict one step, a ranking, a curve over link rates or a map, or compare with runs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from bench.cli.sweep import run_all, say_plan
from bench.core import spec
from bench.core.errors import UsageError
from bench.core.files import check_writable
from bench.core.units import format_seconds
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.notes import NOT_CHECKED, latency_note, notes, range_notes
from bench.extensions.predict.options import TABLE, Losses, PredictConfig
from bench.extensions.predict.output import print_curve, print_map, print_ranking, print_step, print_validation
from bench.extensions.predict.prediction import Prediction
from bench.extensions.predict.ranking import (
    MOST_TRIED,
    dense_on_each_collective,
    fastest,
    on_each_collective,
    parse_sweep,
    parse_world_sizes,
    ranked,
    regimes,
    sweep,
)
from bench.extensions.predict.request import BASELINE, PredictionRequest, check, request_from_options
from bench.extensions.predict.step import columns, same_everywhere
from bench.extensions.predict.time_to_target import needed_steps, with_losses
from bench.extensions.predict.validation import (
    ValidationCell,
    as_rows,
    cells_of,
    check_machine,
    compare,
    finished_runs,
    with_validated,
    write_table,
)
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.sweeps.file import plan_runs, read_sweep
from bench.launch.sweeps.state import SweepState
from bench.report import store
from compressors.base import Compressor

MAP_POINTS_PER_DECADE = 3


def predict_one(known: Calibration, options: PredictConfig, steps_from: list[Path], *, as_json: bool) -> None:
    """Show the prediction for one compressor at one link rate, with its fastest collective unless one is given."""
    ways = on_each_collective(known, request_from_options(options))
    best = fastest(known, ways)
    checked, prediction = best.request, best.prediction
    said = [*notes(known, checked), *latency_note(options, checked)]
    if best.request != ways[0]:
        said.append(
            f"The fastest of {len(ways)} collectives is shown; bench run takes {ways[0].collective} unless you add "
            f"--collective {best.collective}"
        )
    row = columns(checked, prediction, known)
    if steps_from:
        said.append(_add_time_to_target(row, known, checked, steps_from))
    if options.losses:
        row |= with_losses(Losses.parse(options.losses), checked, prediction, row.get("time_to_target_s"))
    said += _pays(known, checked, prediction, row)
    print_step(checked, prediction, row, said, as_json=as_json)


def rank_compressors(known: Calibration, options: PredictConfig, *, as_json: bool) -> None:
    """Show the predictions for all calibrated compressors at one link rate, the fastest first."""
    job = request_from_options(options)
    ways, left_out = ranked(known, job)
    dense = fastest(known, dense_on_each_collective(known, job)) if BASELINE in known.encoded else None
    rows = [
        columns(way.request, way.prediction, known)
        | ({"times_as_fast": way.prediction.samples_per_s / dense.prediction.samples_per_s} if dense else {})
        for way in ways
    ]
    said = [*dict.fromkeys(note for way in ways for note in notes(known, way.request, range_too=False))]
    said += [*range_notes(known, [way.request for way in ways]), *latency_note(options, ways[0].request)]
    if not job.collective and job.waits and job.world_size > MOST_TRIED:
        said.append(f"With more than {MOST_TRIED} ranks, each compressor uses the collective that a run would choose")
    said += [f"{name} is left out: {reason}" for name, reason in left_out.items()]
    print_ranking(ways[0].request, rows, said, as_json=as_json)


def predict_curve(known: Calibration, options: PredictConfig, text: str, *, as_json: bool) -> None:
    """Show the predictions for one compressor over a range of link rates."""
    rates = parse_sweep(text)
    checked = check(options, known)
    curve = sweep(known, request_from_options(options), rates)
    said = list(dict.fromkeys(said for way in (curve.pair[0], curve.pair[-1]) for said in notes(known, way.request)))
    said += latency_note(options, checked)
    print_curve(checked, curve, said, same_everywhere(checked, known), as_json=as_json)


def predict_map(known: Calibration, options: PredictConfig, text: str, *, as_json: bool) -> None:
    """Show the fastest pair of compressor and collective at each link rate, and at each number of ranks in `text`."""
    rates_text, comma, sizes_text = text.partition(",")
    if comma:
        _check_map(options, text)
    if options.collective:
        raise UsageError(
            f"--sweep tries all collectives; name a --compressor, or leave out --collective {options.collective}"
        )
    checked = check(dataclasses.replace(options, compressor=BASELINE), known)
    jobs = [checked]
    if comma:
        sizes = parse_world_sizes(sizes_text.partition("=")[2])
        jobs = [dataclasses.replace(checked, hosts=checked.hosts[:1] * size) for size in sizes]
    found = regimes(known, jobs, parse_sweep(rates_text, per_decade=MAP_POINTS_PER_DECADE))
    beyond = sum(each.outside is not None for each in found)
    said = [*notes(known, checked, range_too=False), *latency_note(options, checked)]
    if beyond:
        said.append(f"{NOT_CHECKED}: {beyond} of {len(found)} cells; bench predict --validate does that")
    print_map(found, said, same_everywhere(checked, known), as_json=as_json)


def _check_map(options: PredictConfig, text: str) -> None:
    """Raise UsageError if an option is given that a map over numbers of ranks sets itself."""
    if text.partition(",")[2].partition("=")[0].strip() != "world_size":
        raise UsageError(f"--sweep '{text}' is not possible; write it like bandwidth=1mbit..10gbit,world_size=2..64")
    set_by_map = (
        "compressor", "collective", "strategy", "straggler", "world_size", "hosts", "ranks_per_host", "cluster_file",
    )  # fmt: skip
    plain = PredictConfig()
    if given := [option.flag_name for option in PredictConfig.options() if option.name in set_by_map and
                 getattr(options, option.name) != getattr(plain, option.name)]:  # fmt: skip
        raise UsageError(f"a map tries all pairs on equal hosts with one rank each; leave out {', '.join(given)}")


def validate(known: Calibration, path: Path, file: Path, runs: Path, table: Path | None, *, as_json: bool) -> None:
    """Predict all configurations of a sweep file, then run those that have no result yet, and compare both."""
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
    """Predict the configurations of finished runs, and compare predictions and measurements."""
    table = table or folder / TABLE
    for kept in (path, table):
        check_writable(kept)
    agenda = finished_runs(known, folder, lambda sentence: print(sentence, file=sys.stderr))
    _keep_compared(known, path, cells_of(known, agenda.runs), agenda, table, as_json=as_json)


def _keep_compared(
    known: Calibration, path: Path, cells: Sequence[ValidationCell], agenda: SweepState, table: Path, *, as_json: bool
) -> None:
    """Show predictions next to measurements, and save their errors in the calibration file."""
    compared = compare(cells, agenda)
    rows = as_rows(compared, known)
    with_validated(known, compared).write(path)
    write_table(rows, table)
    print_validation(rows, as_json=as_json)


def _pays(known: Calibration, checked: PredictionRequest, prediction: Prediction, row: dict[str, Any]) -> list[str]:
    """Add the step time of dense 16-bit gradients to the row, and return a sentence that says which is faster.

    If dense 16-bit gradients are not calibrated, or are what was predicted, nothing is added and the list is empty.
    """
    if BASELINE not in known.encoded or checked.compressor == BASELINE:
        return []
    dense = fastest(known, dense_on_each_collective(known, checked))
    row |= {"dense_collective": dense.collective, "dense_step_time_s": dense.step_time_s}
    ratio = dense.prediction.samples_per_s / prediction.samples_per_s
    if not checked.waits:
        per_s = f"{dense.prediction.samples_per_s:.1f} per second"
        return [f"{1 / ratio:.2f} times as many samples as with dense {BASELINE}: {per_s}"]
    than = f"dense {BASELINE} on {dense.collective}, whose step takes {format_seconds(dense.step_time_s)}"
    if checked.compressor == "none":
        return [f"without compression, in 32 bits, a step takes {ratio:.2f} times as long as with {than}"]
    if ratio < 1:
        return [f"a step is {1 / ratio:.2f} times as fast as with {than}"]
    return [f"compression does not pay here: a step takes {ratio:.2f} times as long as with {than}"]


def _add_time_to_target(row: dict[str, Any], known: Calibration, checked: PredictionRequest, paths: list[Path]) -> str:
    """Add the time to the target to the row; return a sentence on its basis, or on why the time is unknown."""
    if not checked.waits:
        raise UsageError("--steps-from needs a strategy whose ranks wait for each other; leave out --strategy")
    needed = needed_steps(store.read(paths), known, checked.compressor, checked.world_size)
    row["steps_to_target"] = needed.steps
    row["time_to_target_s"] = None
    if needed.steps is None:
        return needed.said
    compressor = cast(Compressor, spec.build("compressors", checked.compressor))
    if (needed.of_epochs and compressor.denser_epochs) or getattr(compressor, "dense_steps", 0):
        return (
            f"{needed.said}; {checked.compressor} sends more in the first steps than in the predicted step, so the "
            "time to the target is unknown: give runs with --steps, or warmup_epochs=0, and without dense_steps"
        )
    row["time_to_target_s"] = needed.steps * row["step_time_s"]
    return needed.said
