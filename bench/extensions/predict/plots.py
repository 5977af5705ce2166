"""Plots of predictions: step time by bandwidth, fastest and needed links, prediction against measurement.

The plots are drawn from files that `bench predict` writes: the JSON of a sweep or a map, or the table of a validation.
"""

import csv
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.core.files import check_regular
from bench.core.units import format_rate
from bench.report.columns import format_value
from bench.report.plots import style
from bench.report.plots.kinds import FileKind
from bench.report.plots.results import NotDrawable

_WITHIN = 0.15  # relative error of the band that is drawn
_DENSE = "bf16"
_HATCHES = ("", "///", "\\\\\\")  # distinguish pairs in a grey print, or if there are more pairs than colours


def curve(path: Path, methods: style.Methods) -> style.Picture:
    """Draw the predicted step times of one compressor and of dense gradients against bandwidth, with break-even points.

    Args:
        path: JSON file that `bench predict --sweep` wrote for one compressor.
        methods: colours and line styles of compressors and collectives in other pictures.
    """
    content = _json(path, "curve", "bench predict --sweep bandwidth=1mbit..10gbit --json")
    rates = [point["bandwidth_bps"] for point in content["curve"]]
    times = [point[column] for point in content["curve"] for column in ("dense_step_time_s", "step_time_s")]
    _check_above_zero([*rates, *times, *content["break_even_bps"]])
    pair = f"{content['compressor']} on {content['collective']}"
    figure, (axes,) = style.new_figure()
    lines = {}
    dense, own = methods.index(_DENSE), methods.index(content["compressor"], content["collective"])
    for name, column, index in ((f"dense {_DENSE}", "dense_step_time_s", dense), (pair, "step_time_s", own)):
        seconds = [point[column] for point in content["curve"]]
        (lines[name],) = axes.plot(rates, seconds, **style.line(index, int(name == pair and own == dense)))
        style.tooltips(
            lines[name],
            *(
                f"{name}: {format_value('step_time_s', each)} at {format_rate(rate)}"
                for rate, each in zip(rates, seconds, strict=True)
            ),
        )
    for rate in content["break_even_bps"]:
        axes.axvline(rate, color=style.GREY, linewidth=0.9)
        axes.annotate(
            format_rate(rate), (rate, 0.98), xycoords=("data", "axes fraction"), rotation=90, ha="right", va="top"
        )
    axes.set(xscale="log", yscale="log", title=f"Predicted step time, {content['world_size']} ranks")
    style.name_axis(axes, "x", "bandwidth of all links", "uplink_bps")
    style.name_axis(axes, "y", "time of a step", "step_time_s", log=True)
    even = " and ".join(map(format_rate, content["break_even_bps"])) or "nowhere in the range"
    return style.with_legend(figure, lines, f"Predicted step times of {pair} and dense {_DENSE}; break-even: {even}.")


def regime_map(path: Path, methods: style.Methods) -> style.Picture:
    """Draw the fastest pair of compressor and collective, and its speed-up, at each bandwidth and number of ranks.

    The speed-up is relative to dense gradients.

    Args:
        path: JSON file that `bench predict --sweep` wrote for a range of ranks.
        methods: colours and line styles of compressors and collectives in other pictures.
    """
    cells = _json(path, "regimes", "bench predict --sweep bandwidth=1mbit..10gbit,world_size=2..64 --json")["regimes"]
    rates = sorted({cell["bandwidth_bps"] for cell in cells})
    sizes = sorted({cell["world_size"] for cell in cells})
    pairs = list(dict.fromkeys((cell["compressor"], cell["collective"]) for cell in cells))
    figure, (axes,) = style.new_figure(height=0.9 + 0.34 * len(sizes))
    boxes = {}
    for cell in cells:
        column, row = rates.index(cell["bandwidth_bps"]), sizes.index(cell["world_size"])
        index = pairs.index((cell["compressor"], cell["collective"]))
        (box,) = axes.barh(
            row,
            1,
            left=column,
            height=1,
            color=style.marker(methods.index(*pairs[index]))["color"],
            alpha=0.45,
            edgecolor="white",
            hatch=_HATCHES[index % len(_HATCHES)],
        )
        boxes[" on ".join(pairs[index])] = box
        style.tooltips(
            box,
            f"{' on '.join(pairs[index])}: {cell['speedup']:.2f}x as fast as dense {_DENSE}, "
            f"{cell['world_size']} ranks at {format_rate(cell['bandwidth_bps'])}",
        )
        mark = "" if cell["outside"] is None else "?"
        axes.annotate(f"{cell['speedup']:.1f}{mark}", (column + 0.5, row), ha="center", va="center", fontsize=7)
    axes.grid(visible=False)
    axes.set_xticks(
        [column + 0.5 for column in range(len(rates))], list(map(format_rate, rates)), rotation=45, ha="right"
    )
    axes.set_yticks(range(len(sizes)), list(map(str, sizes)))
    title = f"Predicted: the fastest pair, speed-up over dense {_DENSE} (?: outside the validated range)"
    axes.set(ylabel="ranks", title=title)
    return style.with_legend(figure, boxes, f"Map of the fastest pair by bandwidth and ranks: {', '.join(boxes)}.")


def predicted_measured(path: Path, methods: style.Methods) -> style.Picture:
    """Draw the predicted against the measured step time of each validated configuration, with a band of 15 %."""
    from matplotlib.ticker import LogLocator

    known = [(float(cell["step_time_s"]), float(cell["predicted_step_time_s"]), cell) for cell in _validation(path)]
    _check_above_zero(seconds for *both, _ in known for seconds in both)
    figure, (axes,) = style.new_figure(height=4.2)
    bounds = [
        0.8 * min(min(measured, predicted) for measured, predicted, _ in known),
        1.25 * max(max(measured, predicted) for measured, predicted, _ in known),
    ]
    axes.plot(bounds, bounds, color=style.INK, linewidth=0.9)
    low, high = ([bound * factor for bound in bounds] for factor in (1 - _WITHIN, 1 + _WITHIN))
    axes.fill_between(bounds, low, high, color=style.GREY, alpha=0.2, linewidth=0)
    points: dict[str, Any] = {}
    for measured, predicted, cell in known:
        pair = f"{cell['compressor']} on {cell['collective']}"
        look = style.marker(methods.index(cell["compressor"], cell["collective"]))
        (points[pair],) = axes.plot(measured, predicted, linestyle="", **look)
        times = (format_value("step_time_s", seconds) for seconds in (predicted, measured))
        style.tooltips(points[pair], f"{pair}: predicted {' and measured '.join(times)}")
    axes.set(xscale="log", yscale="log", xlim=bounds, ylim=bounds)
    style.name_axis(axes, "x", "measured time of a step", "step_time_s")
    style.name_axis(axes, "y", "predicted", "step_time_s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    errors = sorted(abs(predicted / measured - 1) for measured, predicted, _ in known)
    middle, most = statistics.median(errors), errors[math.ceil(0.9 * len(errors)) - 1]
    said = f"{len(known)} configurations, error: median {middle:.1%}, 90th percentile {most:.1%}"
    axes.set_title(
        style.wrapped(
            f"Predicted against measured step time: {said}; the band is {_WITHIN:.0%} wide to either side", 60
        )
    )
    return style.with_legend(figure, points, f"Predicted against measured step times: {said}.")


def needed_rates(path: Path, methods: style.Methods) -> style.Picture:
    """Draw the rates at which each method reaches shares of the speed without an exchange, beside common links.

    Args:
        path: JSON file that `bench predict --needed-rate` wrote.
        methods: colours and line styles of compressors and collectives in other pictures.
    """
    content = _json(path, "needed_rates", "bench predict --needed-rate --json")
    methods_found, links = list(reversed(content["needed_rates"])), content["links"]
    found = [each["bandwidth_bps"] for method in methods_found for each in method["rates"] if each["bandwidth_bps"]]
    _check_above_zero([*links.values(), *found])
    low, high = 0.5 * min(*found, *links.values()), 8 * max(*found, *links.values())
    figure, (axes,) = style.new_figure(height=1.7 + 0.2 * len(methods_found))
    marks: dict[str, Any] = {}
    for row, method in enumerate(methods_found):
        name, color = method["compressor"], style.marker(methods.index(method["compressor"]))["color"]
        reached = [(index, each) for index, each in enumerate(method["rates"]) if each["bandwidth_bps"] is not None]
        axes.plot([each["bandwidth_bps"] for _, each in reached], [row] * len(reached), color=color)
        for index, each in reached:
            share, look = f"{each['share']:.0%}", style.marker(0, index) | {"color": color}
            (point,) = axes.plot(each["bandwidth_bps"], row, linestyle="", **look)
            (marks[share],) = axes.plot([], linestyle="", **style.marker(0, index))  # for the legend, in one colour
            style.tooltips(point, f"{name}: {share} at {format_rate(each['bandwidth_bps'])}")
        if len(reached) < len(method["rates"]):
            end = (reached[-1][1]["bandwidth_bps"] if reached else low, row)
            text = f"at most {method['most']:.1%}"
            axes.annotate(text, end, (6, 0), textcoords="offset points", va="center", fontsize=7)
    for name, rate in links.items():
        axes.axvline(rate, color=style.GREY, linewidth=0.9, zorder=0)
        side = "right" if any(rate < other < 1.5 * rate for other in links.values()) else "left"
        axes.annotate(name, (rate, 1.02), xycoords=("data", "axes fraction"), rotation=90, ha=side, fontsize=7)
    axes.set_yticks(range(len(methods_found)), [method["compressor"] for method in methods_found])
    axes.set(xscale="log", xlim=(low, high))
    axes.set_title(
        f"Predicted: the rate for a share of the speed without an exchange, {content['world_size']} ranks", pad=66
    )
    style.name_axis(axes, "x", "bandwidth of all links", "uplink_bps")
    alt = f"Rates at which {len(methods_found)} methods reach a share of the speed without an exchange."
    return style.with_legend(figure, dict(sorted(marks.items())), alt)


def _check_above_zero(values: Iterable[float]) -> None:
    if not all(value > 0 and math.isfinite(value) for value in values):
        raise ValueError("a rate or a time is not a finite number above 0")


def _json(path: Path, key: str, command: str) -> dict[str, Any]:
    """Return the JSON object in a file that `bench predict --json` wrote.

    Raises:
        NotDrawable: the file cannot be read or lacks the key.
    """
    check_regular(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NotDrawable(f"{path} cannot be read: {error}; write it with {command}") from None
    if not isinstance(content, dict) or not content.get(key):
        raise NotDrawable(f"{path} has no key '{key}', or nothing in it; write it with {command}")
    return content


def _validation(path: Path) -> list[dict[str, str]]:
    check_regular(path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            cells = [cell for cell in csv.DictReader(file) if cell.get("error")]
    except (OSError, ValueError, csv.Error) as error:
        raise NotDrawable(f"{path} cannot be read: {error}; write it with bench predict --validate") from None
    if not cells:
        raise NotDrawable(f"{path} holds no measured configuration; give the table of bench predict --validate")
    return cells


CURVE = FileKind(
    name="predicted-curve",
    shows="predicted step time against bandwidth, from bench predict --sweep bandwidth=...",
    reading="Both lines are predictions. Compression pays at rates at which the line of the pair is below the other.",
    made_by="bench predict",
    keys=frozenset({"compressor", "collective", "world_size", "curve", "break_even_bps"}),
    function=curve,
)
REGIME_MAP = FileKind(
    name="regime-map",
    shows="the fastest pair by bandwidth and ranks, from bench predict --sweep bandwidth=...,world_size=...",
    reading="Each cell shows the pair with the shortest predicted step, and its speed-up over dense gradients.",
    made_by="bench predict",
    keys=frozenset({"regimes", "notes"}),
    function=regime_map,
)
NEEDED_RATE = FileKind(
    name="needed-rate",
    shows="the rate that each method needs for a share of the speed without an exchange, from bench predict "
    "--needed-rate",
    reading="A link suffices for a share if its line is right of the share's mark. Where marks are missing, the method "
    "does not reach these shares on any link.",
    made_by="bench predict",
    keys=frozenset({"needed_rates", "links", "notes"}),
    function=needed_rates,
)
PREDICTED_MEASURED = FileKind(
    name="predicted-measured",
    shows="predicted against measured step time, from the table of bench predict --validate",
    reading="A point above the line is a configuration whose predicted step time is longer than the measured one.",
    made_by="bench predict",
    keys=frozenset({"compressor", "collective", "predicted_step_time_s", "step_time_s", "error"}),
    function=predicted_measured,
)
