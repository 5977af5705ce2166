"""Answer `bench predict`: predict one step, a ranking, a curve over link rates or a map, or compare with runs."""

import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rich.markup import escape

from bench.cli.console import plain_table, print_json, stdout_console
from bench.cli.sweep import run_all, say_plan
from bench.core import spec
from bench.core.errors import UsageError
from bench.core.files import check_writable
from bench.core.units import format_bytes, format_rate, format_seconds
from bench.extensions.predict.asynchronous import AsyncPrediction
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.options import TABLE, Losses, PredictConfig
from bench.extensions.predict.prediction import Prediction
from bench.extensions.predict.ranking import (
    MOST_TRIED,
    Curve,
    dense_on_each_collective,
    fastest,
    on_each_collective,
    parse_sweep,
    parse_world_sizes,
    ranked,
    regimes,
    sweep,
)
from bench.extensions.predict.request import (
    BASELINE,
    PredictionRequest,
    check,
    columns,
    request_columns,
    request_from_options,
)
from bench.extensions.predict.time_to_target import needed_steps, with_losses
from bench.extensions.predict.validation import (
    NOT_CHECKED,
    ValidationCell,
    as_rows,
    cells_of,
    check_machine,
    compare,
    finished_runs,
    latency_note,
    notes,
    range_notes,
    with_validated,
    write_table,
)
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.sweep_file import plan_runs, read_sweep
from bench.launch.sweep_state import SweepState
from bench.report import store
from compressors.base import Compressor

MAP_POINTS_PER_DECADE = 3
# Columns that a sweep over link rates sets.
SWEPT = ("uplink_bps", "downlink_bps")


def predict_one(known: Calibration, options: PredictConfig, steps_from: list[Path], *, as_json: bool) -> None:
    """Print the prediction for one compressor at one link rate, with its fastest collective unless one is given."""
    ways = on_each_collective(known, request_from_options(options))
    best = fastest(known, ways)
    checked, prediction = best.request, best.prediction
    said = [*notes(known, checked), *latency_note(options, checked)]
    if checked != ways[0]:
        said.append(
            f"The fastest of {len(ways)} collectives is shown; bench run takes {ways[0].collective} unless you add "
            f"--collective {checked.collective}"
        )
    row = columns(checked, prediction, known)
    if steps_from:
        said.append(_add_time_to_target(row, known, checked, steps_from))
    if options.losses:
        row |= with_losses(Losses.parse(options.losses), checked, prediction, row.get("time_to_target_s"))
    said += _pays(known, checked, prediction, row)
    if as_json:
        print_json(row | {"notes": said})
        return
    print(_heading(checked))
    for name, text in _lines(checked, prediction, row).items():
        print(f"  {name:<20} {text}")
    print(*said, sep="\n")


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
    if (needed.of_epochs and compressor.traits.denser_epochs) or getattr(compressor, "dense_steps", 0):
        return (
            f"{needed.said}; {checked.compressor} sends more in the first steps than in the predicted step, so the "
            "time to the target is unknown: give runs with --steps, or warmup_epochs=0, and without dense_steps"
        )
    row["time_to_target_s"] = needed.steps * row["step_time_s"]
    return needed.said


def _pays(known: Calibration, checked: PredictionRequest, prediction: Prediction, row: dict[str, Any]) -> list[str]:
    """Add the step time of dense 16-bit gradients to the row, and return a sentence that says which is faster.

    If dense 16-bit gradients are not calibrated, or are what was predicted, nothing is added and the list is empty.
    """
    if BASELINE not in known.encoded or checked.compressor == BASELINE:
        return []
    dense = fastest(known, dense_on_each_collective(known, checked))
    dense_s = dense.prediction.step_time_s
    row |= {"dense_collective": dense.request.collective, "dense_step_time_s": dense_s}
    ratio = dense.prediction.samples_per_s / prediction.samples_per_s
    if not checked.waits:
        per_s = f"{dense.prediction.samples_per_s:.1f} per second"
        return [f"{1 / ratio:.2f} times as many samples as with dense {BASELINE}: {per_s}"]
    than = f"dense {BASELINE} on {dense.request.collective}, whose step takes {format_seconds(dense_s)}"
    if checked.compressor == "none":
        return [f"without compression, in 32 bits, a step takes {ratio:.2f} times as long as with {than}"]
    if ratio < 1:
        return [f"a step is {1 / ratio:.2f} times as fast as with {than}"]
    return [f"compression does not pay here: a step takes {ratio:.2f} times as long as with {than}"]


def _lines(checked: PredictionRequest, prediction: Prediction, row: dict[str, Any]) -> dict[str, str]:
    step = "step of rank 0" if not checked.waits else "step" if prediction.step_time_p95_s is None else "mean step"
    messages = f"{prediction.messages_per_step:.0f} messages"
    lines = {
        step: format_seconds(prediction.step_time_s),
        "exposed": format_seconds(prediction.exposed_s),
        "bound by": prediction.bound_by,
        "sent per rank": f"{format_bytes(prediction.payload_bytes_per_step)} in {messages}",
        "sent by the busiest": format_bytes(prediction.payload_bytes_max_per_step),
        "CPU per rank": format_seconds(prediction.cpu_s_per_step),
        "samples per second": f"{prediction.samples_per_s:.1f}",
    }
    if isinstance(prediction, AsyncPrediction):
        quick, middle, slow = (format_seconds(of(prediction.step_times_s)) for of in (min, statistics.median, max))
        lines["updates per second"] = f"{prediction.updates_per_s:.1f}"
        lines["staleness"] = f"mean {prediction.staleness_mean:.2f}, at most {prediction.staleness_max}"
        lines["steps of all ranks"] = f"fastest {quick}, median {middle}, slowest {slow}"
    if prediction.step_time_p95_s is not None:
        lines["95 % of steps within"] = format_seconds(prediction.step_time_p95_s)
    for word, window in (("slowest", prediction.slowest_window), ("fastest", prediction.fastest_window)):
        if window is not None:
            place = f"from {format_seconds(window.begin_s)} to {format_seconds(window.end_s)} of the trace"
            lines[f"{word} tenth"] = f"{format_seconds(window.step_time_s)} per step that begins {place}"
    if row.get("time_to_target_s"):
        lines["time to target"] = f"{format_seconds(row['time_to_target_s'])} in {row['steps_to_target']:.0f} steps"
    if "losses" in row:
        to_target_s = row["time_to_target_with_losses_s"]
        lines["with losses"] = (
            f"{row['times_as_long_with_losses']:.2f} times as long, {row['restarts_per_hour']:.2g} restart(s) per hour"
            + ("" if to_target_s is None else f"; to the target {format_seconds(to_target_s)}")
        )
    return lines


def _heading(checked: PredictionRequest, *, of_all: bool = False) -> str:
    """Return one line that describes the predicted job; with `of_all`, without the compressor."""
    where = checked.collective if checked.waits else checked.strategy
    pair = (checked.strategy if not checked.waits else "") if of_all else f"{checked.compressor} on {where}"
    rate = "on links without a limit" if checked.slowest_bps is None else f"at {format_rate(checked.slowest_bps)}"
    if len({dataclasses.replace(host, name="any") for host in checked.hosts}) > 1:
        rate += " on the slowest link"
    latency = max(host.latency_s for host in checked.hosts)
    parts = [
        pair,
        f"{checked.world_size} ranks",
        f"{checked.link_trace}, {rate} on average" if checked.link_trace else rate,
        f"latency {format_seconds(latency)}" if latency else "",
        f"a straggler ({checked.straggler_text})" if checked.straggler_text else "",
    ]
    return ", ".join(filter(None, parts))


def _print_table(rows: Sequence[Mapping[str, str]], *, left: Collection[str]) -> None:
    """Print rows (cells by heading) as a table; the columns in `left` are aligned left, the others right."""
    table = plain_table()
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading in left else "right")
    for row in rows:
        table.add_row(*row.values())
    stdout_console().print(table)


def rank_compressors(known: Calibration, options: PredictConfig, *, as_json: bool) -> None:
    """Print the predictions for all calibrated compressors at one link rate, the fastest first."""
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
    if as_json:
        print_json({"ranking": rows, "notes": said})
        return
    print(_heading(ways[0].request, of_all=True))
    cells = [
        {
            "compressor": escape(row["compressor"]),
            "collective": escape(row["collective"]),
            "step": format_seconds(row["step_time_s"]),
            **({"vs bf16": f"{row['times_as_fast']:.2f}x"} if dense else {}),
            "sent per rank": format_bytes(row["payload_bytes_per_step"]),
            "bound by": row["bound_by"],
        }
        for row in rows
    ]
    _print_table(cells, left=("compressor", "collective", "bound by"))
    print(*said, sep="\n")


def predict_curve(known: Calibration, options: PredictConfig, text: str, *, as_json: bool) -> None:
    """Print the predictions for one compressor, and for dense 16-bit gradients, over a range of link rates."""
    rates = parse_sweep(text)
    checked = check(options, known)
    curve = sweep(known, request_from_options(options), rates)
    said = list(dict.fromkeys(said for way in (curve.pair[0], curve.pair[-1]) for said in notes(known, way.request)))
    said += [*latency_note(options, checked), *_verdict(checked, curve)]
    points = list(zip(curve.rates_bps, curve.pair, curve.dense, strict=True))
    if as_json:
        rows = [
            {
                "bandwidth_bps": rate,
                "step_time_s": pair.prediction.step_time_s,
                "exposed_s": pair.prediction.exposed_s,
                "payload_bytes_per_step": pair.prediction.payload_bytes_per_step,
                "bound_by": pair.prediction.bound_by,
                "collective": pair.request.collective,
                "dense_step_time_s": dense.prediction.step_time_s,
                "dense_collective": dense.request.collective,
            }
            for rate, pair, dense in points
        ]
        same = request_columns(checked, known, without=SWEPT)
        print_json({**same, "curve": rows, "break_even_bps": curve.break_even_bps, "notes": said})
        return
    where = ", ".join(dict.fromkeys(dense.request.collective for dense in curve.dense))
    print(f"{checked.compressor}, {checked.world_size} ranks, compared with dense bf16 on {where}")
    cells = [
        {
            "bandwidth": format_rate(rate),
            "step": format_seconds(pair.prediction.step_time_s),
            "collective": pair.request.collective,
            "bound by": pair.prediction.bound_by,
            "dense bf16": format_seconds(dense.prediction.step_time_s),
            "vs bf16": f"{dense.prediction.step_time_s / pair.prediction.step_time_s:.2f}x",
        }
        for rate, pair, dense in points
    ]
    _print_table(cells, left=("collective", "bound by"))
    print(*said, sep="\n")


def _verdict(checked: PredictionRequest, curve: Curve) -> list[str]:
    """Return a sentence that says at which rates the pair is faster than dense 16-bit gradients."""
    if checked.compressor == BASELINE:
        return []
    it = "uncompressed in 32 bits is faster" if checked.compressor == "none" else "compression pays"
    if all(curve.pays):
        return [f"{it} over the whole range"]
    if not any(curve.pays):
        return [
            "16 bits are faster over the whole range"
            if checked.compressor == "none"
            else "compression does not pay anywhere in the range"
        ]
    first, *others = map(format_rate, curve.break_even_bps)
    between = [f"between {low} and {high}" for low, high in itertools.pairwise((first, *others))]
    stretches = [f"below {first}", *between, f"above {(first, *others)[-1]}"]
    return [f"{it} {', and '.join(stretches[0 if curve.pays[0] else 1 :: 2])}"]


def predict_map(known: Calibration, options: PredictConfig, text: str, *, as_json: bool) -> None:
    """Print the fastest pair of compressor and collective at each link rate, and at each number of ranks in `text`."""
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
    if as_json:
        same = request_columns(checked, known, without=(*SWEPT, "compressor", "collective", "world_size", "hosts"))
        cells = [dataclasses.asdict(each) | {"speedup": each.speedup} for each in found]
        print_json({**same, "regimes": cells, "notes": said})
        return
    rows: dict[float, dict[str, str]] = {}
    for each in found:
        row = rows.setdefault(each.bandwidth_bps, {"bandwidth": format_rate(each.bandwidth_bps)})
        row[f"{each.world_size} ranks"] = f"{each.compressor}+{each.collective} {each.speedup:.1f}x"
    print("the fastest pair, and how many times as fast as dense bf16 on its fastest collective")
    _print_table(list(rows.values()), left=[f"{each.world_size} ranks" for each in found])
    print(*said, sep="\n")


def _check_map(options: PredictConfig, text: str) -> None:
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
    compared = compare(cells, agenda)
    rows = as_rows(compared, known)
    with_validated(known, compared).write(path)
    write_table(rows, table)
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
    _print_table(shown, left=("configuration", "bound by"))
    if middle is not None and most is not None:
        print(f"error of the step time: median {middle:.1%}, 90th percentile {most:.1%}, {len(errors)} configurations")
