"""Draw what a training step consists of: the parts of its time, and the share of each layer that is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.core.schema import LAYERS
from bench.report.columns import format_value
from bench.report.groups import RunGroup
from bench.report.plots import style
from bench.report.plots.results import Results, last_known, to_frame

if TYPE_CHECKING:
    import pandas as pd

_BAR = 0.38
_NAME_WIDTH = 34  # characters beside the bars
_LINE_IN = 0.15
_ABOVE, _BELOW = -_BAR / 2, _BAR / 2  # the bar of a step, and that of the exchange during it
# The bar of each part, and its shade and hatch, because a colour stands for a method in every picture.
_PARTS: dict[str, tuple[float, dict[str, Any]]] = {
    "forward and backward": (_ABOVE, {"alpha": 0.85, "hatch": ""}),
    "exposed exchange": (_ABOVE, {"alpha": 0.5, "hatch": "////"}),
    "optimizer and rest": (_ABOVE, {"alpha": 0.2, "hatch": ""}),
    "busy encoding": (_BELOW, {"alpha": 0.5, "hatch": "...."}),
    "busy exchanging": (_BELOW, {"alpha": 0.2, "hatch": "xxxx"}),
}


def draw_time(results: Results) -> style.Picture:
    """Draw two bars per configuration: the parts of the time of a step and, below it, those of its exchange.

    Raises:
        NotDrawable: no finished run has measured the parts of a step.
    """
    from matplotlib.patches import Patch

    shown = results.drawable(
        results.configurations,
        parts_of_step,
        "a step's time needs a finished run with values in forward_backward_s",
    )
    names = [style.wrapped(title, _NAME_WIDTH) for title, _, _ in shown]
    most_lines = max(name.count("\n") + 1 for name in names)
    figure, (axes,) = style.new_figure(height=0.9 + len(shown) * max(0.55, 0.1 + _LINE_IN * most_lines))
    longest, words = 0.0, []
    for position, (title, look, parts) in enumerate(shown):
        ends = {_ABOVE: 0.0, _BELOW: 0.0}
        times = {name: f"{name} {format_value('step_time_s', seconds)}" for name, seconds in parts.items()}
        for name, seconds in parts.items():
            offset, shade = _PARTS[name]
            (bar,) = axes.barh(
                position + offset,
                seconds,
                _BAR,
                left=ends[offset],
                label=name,
                facecolor=style.color(*look),
                edgecolor="white",
                linewidth=0.4,
                **shade,
            )
            style.tooltips(bar, f"{title}: {times[name]}")
            ends[offset] += seconds
        longest = max(longest, *ends.values())
        words.append(f"{title}: {', '.join(times.values())}")
    axes.set_yticks(range(len(shown)), names)
    axes.invert_yaxis()
    axes.set(xlim=(0.0, longest * 1.03), title="Where a step's time goes")
    axes.grid(visible=False, axis="y")
    style.name_axis(axes, "x", "time per step, mean over seeds", "step_time_s")
    drawn = {name for _, _, parts in shown for name in parts}
    patches = {
        name: Patch(color=style.GREY, ec="white", **shade) for name, (_, shade) in _PARTS.items() if name in drawn
    }
    return style.with_legend(figure, patches, f"Stacked bars of a step's time. {'; '.join(words)}.")


def parts_of_step(group: RunGroup) -> dict[str, float]:
    """Return the mean seconds over seeds of each part of a step, by name; empty if they were not measured.

    Encoding and exchanging are included only if the backend reports their times.
    """
    if not group.values("forward_backward_s"):
        return {}
    runs = last_known(group)
    computing, exposed = runs["forward_backward_s"], runs["exposed_s"].fillna(0.0)
    rest = (runs["step_time_s"] - computing - exposed).clip(lower=0.0).fillna(0.0)
    parts = [computing, exposed, rest]
    reported = runs.dropna(subset=["encode_s", "exchange_s"])
    if len(reported):
        parts += [reported["encode_s"], (reported["exchange_s"] - reported["encode_s"]).clip(lower=0.0)]
    return {name: float(part.mean()) for name, part in zip(_PARTS, parts, strict=False)}


_LAYER_IN = 0.13


def draw_density(results: Results) -> style.Picture:
    """Draw heat maps of the share of each layer that was sent.

    Each configuration that did not send every entry has one heat map, with a row per layer and a cell per evaluation.

    Raises:
        NotDrawable: no finished run has a ``layers.csv`` with a share below 1.
    """
    from matplotlib.colors import LogNorm

    drawable = results.drawable(
        results.configurations,
        lambda group: _densities(results, group),
        "density over time needs the layers.csv of a finished run that did not send every entry",
    )
    sparse = {title: each for title, _, each in drawable}
    figure, panels = style.new_figure(
        height=sum(0.7 + _LAYER_IN * len(each) for each in sparse.values()),
        rows=len(sparse),
        height_ratios=[len(each) for each in sparse.values()],
        sharex=True,
    )
    smallest = min(float(each[each > 0.0].min().min()) for each in sparse.values())
    # Edges of the faces' colour leave no seams between cells.
    colors: dict[str, Any] = {"cmap": "cividis", "norm": LogNorm(smallest, 1.0), "edgecolors": "face"}
    figure.suptitle("Share of each layer that was sent", x=0.01, ha="left", fontsize=9)
    for axes, (title, each) in zip(panels, sparse.items(), strict=True):
        mesh = axes.pcolormesh([0.0, *each.columns], range(len(each) + 1), each.clip(lower=smallest), **colors)
        style.tooltips(
            mesh,
            *(
                f"{title}: {share:.2g} of {layer}, step {step}"
                for layer, shares in each.iterrows()
                for step, share in shares.items()
            ),
        )
        axes.set(title=style.wrapped(title, 70), ylabel="layer")
        axes.set_yticks([row + 0.5 for row in range(len(each))], each.index, fontsize=6)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.grid(visible=False)
    style.name_axis(panels[-1], "x", "optimizer steps", "step")
    style.write_ticks(figure.colorbar(mesh, ax=panels, label="entries sent (share)", aspect=40).ax, "y")
    words = "; ".join(f"{title} {each.min().min():.2g} to {each.max().max():.2g}" for title, each in sparse.items())
    return style.Picture(figure=figure, alt=f"Heat maps of the share of each layer that was sent: {words}.")


def _densities(results: Results, group: RunGroup) -> pd.DataFrame:
    """Return the share of each layer's entries that was sent, as a mean over seeds.

    Returns:
        A table with a row per layer, in the model's order, and a column per evaluated step; without rows if every entry
        of every layer was sent.
    """
    runs = {run["run_id"] for run in group.ok}
    layers = to_frame([row for row in results.layers if row["run_id"] in runs], LAYERS)
    known = layers.dropna(subset=["density_mean"])
    table = known.pivot_table(index="layer", columns="step", values="density_mean", aggfunc="mean", sort=False)
    table = table.sort_index(axis="columns").dropna(axis="columns")
    return table if table.size and table.min().min() < 1.0 else table[:0]
