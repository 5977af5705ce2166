"""Output of `bench predict`: one step, a ranking, a curve over the rate, a map of the fastest pairs, a validation."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

from rich.markup import escape

from bench.cli.console import plain_table, print_json, stdout_console
from bench.core.units import format_bytes, format_rate, format_seconds
from bench.extensions.predict.asynchronous import AsyncPrediction
from bench.extensions.predict.prediction import Prediction
from bench.extensions.predict.ranking import Curve, Regime
from bench.extensions.predict.request import BASELINE, PredictionRequest


def print_step(
    checked: PredictionRequest, prediction: Prediction, row: dict[str, Any], said: list[str], *, as_json: bool
) -> None:
    """Print the predicted time and traffic of a step."""
    if as_json:
        print_json(row | {"notes": said})
        return
    print(_heading(checked))
    step = "step of rank 0" if not checked.waits else "step" if prediction.step_time_p95_s is None else "mean step"
    for name, text in (
        (step, format_seconds(prediction.step_time_s)),
        ("exposed", format_seconds(prediction.exposed_s)),
        ("bound by", prediction.bound_by),
        (
            "sent per rank",
            f"{format_bytes(prediction.payload_bytes_per_step)} in {prediction.messages_per_step:.0f} messages",
        ),
        ("sent by the busiest", format_bytes(prediction.payload_bytes_max_per_step)),
        ("CPU per rank", format_seconds(prediction.cpu_s_per_step)),
        ("samples per second", f"{prediction.samples_per_s:.1f}"),
        *(_of_server(prediction) if isinstance(prediction, AsyncPrediction) else ()),
        *_over_time(prediction),
        *(
            [("time to target", f"{format_seconds(row['time_to_target_s'])} in {row['steps_to_target']:.0f} steps")]
            if row.get("time_to_target_s")
            else []
        ),
        *(_of_losses(row) if "losses" in row else ()),
    ):
        print(f"  {name:<20} {text}")
    print(*said, sep="\n")


def print_ranking(checked: PredictionRequest, rows: list[dict[str, Any]], said: list[str], *, as_json: bool) -> None:
    """Print compressors on stdout, the fastest first."""
    if as_json:
        print_json({"ranking": rows, "notes": said})
        return
    print(_heading(checked, of_all=True))
    table = plain_table()
    compared = "times_as_fast" in rows[0]
    for heading in (
        "compressor",
        "collective",
        "step",
        *(["vs bf16"] if compared else []),
        "sent per rank",
        "bound by",
    ):
        table.add_column(heading, justify="left" if heading in ("compressor", "collective", "bound by") else "right")
    for row in rows:
        table.add_row(
            escape(row["compressor"]),
            escape(row["collective"]),
            format_seconds(row["step_time_s"]),
            *([f"{row['times_as_fast']:.2f}x"] if compared else []),
            format_bytes(row["payload_bytes_per_step"]),
            row["bound_by"],
        )
    stdout_console().print(table)
    print(*said, sep="\n")


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


def _of_losses(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the effects of failing hosts."""
    text = f"{row['times_as_long_with_losses']:.2f} times as long, {row['restarts_per_hour']:.2g} restart(s) per hour"
    if (to_target_s := row["time_to_target_with_losses_s"]) is not None:
        text += f"; to the target {format_seconds(to_target_s)}"
    yield "with losses", text


def _of_server(prediction: AsyncPrediction) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the figures that exist only if ranks do not wait for each other."""
    fastest, middle, slowest = (format_seconds(of(prediction.step_times_s)) for of in (min, statistics.median, max))
    yield "updates per second", f"{prediction.updates_per_s:.1f}"
    yield "staleness", f"mean {prediction.staleness_mean:.2f}, at most {prediction.staleness_max}"
    yield "steps of all ranks", f"fastest {fastest}, median {middle}, slowest {slowest}"


def _over_time(prediction: Prediction) -> list[tuple[str, str]]:
    """Return (name, text) of how step times vary if the rate of links changes over time."""
    if prediction.step_time_p95_s is None:
        return []
    said = [("95 % of steps within", format_seconds(prediction.step_time_p95_s))]
    for word, window in (("slowest", prediction.slowest_window), ("fastest", prediction.fastest_window)):
        if window is not None:
            place = f"from {format_seconds(window.begin_s)} to {format_seconds(window.end_s)} of the trace"
            said.append((f"{word} tenth", f"{format_seconds(window.step_time_s)} per step that begins {place}"))
    return said


def print_curve(
    checked: PredictionRequest, curve: Curve, said: list[str], same: dict[str, Any], *, as_json: bool
) -> None:
    """Print the steps of the pair and of dense 16-bit gradients at each rate; all rates share the columns `same`."""
    said = [*said, *_verdict(checked, curve)]
    if as_json:
        rows = [
            {
                "bandwidth_bps": rate,
                "step_time_s": pair.step_time_s,
                "exposed_s": pair.prediction.exposed_s,
                "payload_bytes_per_step": pair.prediction.payload_bytes_per_step,
                "bound_by": pair.prediction.bound_by,
                "collective": pair.collective,
                "dense_step_time_s": dense.step_time_s,
                "dense_collective": dense.collective,
            }
            for rate, pair, dense in zip(curve.rates_bps, curve.pair, curve.dense, strict=True)
        ]
        print_json({**same, "curve": rows, "break_even_bps": curve.break_even_bps, "notes": said})
        return
    table = plain_table()
    for heading in ("bandwidth", "step", "collective", "bound by", "dense bf16", "vs bf16"):
        table.add_column(heading, justify="left" if heading in ("collective", "bound by") else "right")
    for rate, pair, dense in zip(curve.rates_bps, curve.pair, curve.dense, strict=True):
        times = f"{dense.step_time_s / pair.step_time_s:.2f}x"
        steps = format_seconds(pair.step_time_s), pair.collective, pair.prediction.bound_by
        table.add_row(format_rate(rate), *steps, format_seconds(dense.step_time_s), times)
    where = ", ".join(dict.fromkeys(dense.collective for dense in curve.dense))
    print(f"{checked.compressor}, {checked.world_size} ranks, compared with dense bf16 on {where}")
    stdout_console().print(table)
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


def print_map(found: list[Regime], said: list[str], same: dict[str, Any], *, as_json: bool) -> None:
    """Print the fastest pair by rate and number of ranks; all cells share the columns `same`."""
    if as_json:
        of_cells = ("compressor", "collective", "world_size", "hosts")
        everywhere = {name: value for name, value in same.items() if name not in of_cells}
        cells = [dataclasses.asdict(each) | {"speedup": each.speedup} for each in found]
        print_json({**everywhere, "regimes": cells, "notes": said})
        return
    table = plain_table()
    sizes = list(dict.fromkeys(each.world_size for each in found))
    for heading in ("bandwidth", *(f"{size} ranks" for size in sizes)):
        table.add_column(heading, justify="right" if heading == "bandwidth" else "left")
    rows: dict[float, list[str]] = {}
    for each in found:
        pair = f"{each.compressor}+{each.collective} {each.speedup:.1f}x"
        rows.setdefault(each.bandwidth_bps, []).append(pair)
    for rate, pairs in rows.items():
        table.add_row(format_rate(rate), *pairs)
    print("the fastest pair, and how many times as fast as dense bf16 on its fastest collective")
    stdout_console().print(table)
    print(*said, sep="\n")


def print_validation(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print predicted and measured step times and their errors."""
    errors = sorted(abs(row["error"]) for row in rows if row["error"] is not None)
    middle = statistics.median(errors) if errors else None
    most = errors[math.ceil(0.9 * len(errors)) - 1] if errors else None
    if as_json:
        print_json({"cells": rows, "median_error": middle, "p90_error": most})
        return
    table = plain_table()
    for heading in ("configuration", "predicted", "measured", "error", "bound by"):
        table.add_column(heading, justify="left" if heading in ("configuration", "bound by") else "right")
    for row in rows:
        untimed = "not timed" if row["runs"] else "failed"
        measured = untimed if row["step_time_s"] is None else format_seconds(row["step_time_s"])
        error = "-" if row["error"] is None else f"{row['error']:+.1%}"
        name = escape(row["settings"] or "[base]")
        table.add_row(name, format_seconds(row["predicted_step_time_s"]), measured, error, row["bound_by"])
    stdout_console().print(table)
    if middle is not None and most is not None:
        print(f"error of the step time: median {middle:.1%}, 90th percentile {most:.1%}, {len(errors)} configurations")
