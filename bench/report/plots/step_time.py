"""Draw the parts of a step's time, and of the exchange that runs at the same time."""

from __future__ import annotations

from typing import Any

from bench.report.configurations import Configuration, format_value
from bench.report.plots import style
from bench.report.plots.picture import Picture
from bench.report.plots.results import NotDrawable, Results, last_known

_BAR = 0.38
_NAME_WIDTH = 34  # characters beside the bars
_LINE_IN = 0.15
# Shade and hatch distinguish the parts, because a colour stands for a method in every picture.
_OF_STEP: dict[str, dict[str, Any]] = {
    "forward and backward": {"alpha": 0.85, "hatch": ""},
    "exposed exchange": {"alpha": 0.5, "hatch": "////"},
    "optimizer and rest": {"alpha": 0.2, "hatch": ""},
}
_BESIDE: dict[str, dict[str, Any]] = {
    "busy encoding": {"alpha": 0.5, "hatch": "...."},
    "busy exchanging": {"alpha": 0.2, "hatch": "xxxx"},
}


def draw(results: Results) -> Picture:
    """Draw two bars per configuration: the parts of the step, and below it those of the exchange."""
    shown = [each for each in results.configurations if each.values("forward_backward_s")]
    if not shown:
        raise NotDrawable("a step's time needs a finished run with values in forward_backward_s")
    from matplotlib.patches import Patch

    names = [style.wrapped(each.title, _NAME_WIDTH) for each in shown]
    most_lines = max(name.count("\n") + 1 for name in names)
    figure, (axes,) = style.new_figure(height=0.9 + len(shown) * max(0.55, 0.1 + _LINE_IN * most_lines))
    looks = results.looks(results.configurations)
    bars = {name: Patch(color=style.GREY, ec="white", **shade) for name, shade in (_OF_STEP | _BESIDE).items()}
    drawn: set[str] = set()
    longest = 0.0
    for position, configuration in enumerate(shown):
        for offset, parts, shades in (
            (-_BAR / 2, step_parts(configuration), _OF_STEP),
            (_BAR / 2, exchange_parts(configuration), _BESIDE),
        ):
            left = 0.0
            for name, seconds in parts.items():
                (bar,) = axes.barh(
                    position + offset,
                    seconds,
                    _BAR,
                    left=left,
                    label=name,
                    facecolor=style.color(*looks[configuration.title]),
                    edgecolor="white",
                    linewidth=0.4,
                    **shades[name],
                )
                style.tooltips(bar, f"{configuration.title}: {name} {format_value('step_time_s', seconds)}")
                drawn.add(name)
                left += seconds
            longest = max(longest, left)
    axes.set_yticks(range(len(shown)), names)
    axes.invert_yaxis()
    axes.set_xlim(0.0, longest * 1.03)
    axes.grid(visible=False, axis="y")
    axes.set_title("Where a step's time goes")
    style.name_axis(axes, "x", "time per step, mean over seeds", "step_time_s")
    style.legend(figure, {name: bar for name, bar in bars.items() if name in drawn})
    return Picture(figure=figure, alt=f"Stacked bars of a step's time. {'; '.join(map(_in_words, shown))}.")


def step_parts(configuration: Configuration) -> dict[str, float]:
    """Return the seconds of each part of a step."""
    runs = last_known(configuration)
    computing, exposed = runs["forward_backward_s"], runs["exposed_s"].fillna(0.0)
    rest = (runs["step_time_s"] - computing - exposed).clip(lower=0.0).fillna(0.0)
    return {name: float(part.mean()) for name, part in zip(_OF_STEP, (computing, exposed, rest), strict=True)}


def exchange_parts(configuration: Configuration) -> dict[str, float]:
    """Return the busy seconds of the exchange per step, as encoding and the rest; empty if not measured."""
    runs = last_known(configuration).dropna(subset=["encode_s", "exchange_s"])
    if not len(runs):
        return {}
    encoding = runs["encode_s"]
    return {
        name: float(part.mean())
        for name, part in zip(_BESIDE, (encoding, (runs["exchange_s"] - encoding).clip(lower=0.0)), strict=True)
    }


def _in_words(configuration: Configuration) -> str:
    parts = step_parts(configuration) | exchange_parts(configuration)
    times = ", ".join(f"{name} {format_value('step_time_s', seconds)}" for name, seconds in parts.items())
    return f"{configuration.title}: {times}"
