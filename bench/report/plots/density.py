"""Draw which share of each layer was sent, from evaluation to evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.core.schema.layers import LAYERS
from bench.report.configurations import Configuration
from bench.report.plots import style
from bench.report.plots.picture import Picture
from bench.report.plots.results import NotDrawable, Results
from bench.report.store import to_frame

if TYPE_CHECKING:
    import pandas as pd

_LAYER_IN = 0.13


def draw(results: Results) -> Picture:
    """Draw one panel per configuration that is not dense, with a row per layer and a cell per evaluation."""
    densities = {each.title: _densities(results, each) for each in results.configurations}
    sparse = {title: each for title, each in densities.items() if each.size and each.min().min() < 1.0}
    if not sparse:
        raise NotDrawable("density over time needs the layers.csv of a finished run that did not send every entry")
    from matplotlib.colors import LogNorm

    figure, panels = style.new_figure(
        height=sum(0.7 + _LAYER_IN * len(each) for each in sparse.values()),
        rows=len(sparse),
        height_ratios=[len(each) for each in sparse.values()],
        sharex=True,
    )
    smallest = min(float(each[each > 0.0].min().min()) for each in sparse.values())
    colors: dict[str, Any] = {
        "cmap": "cividis",
        "norm": LogNorm(smallest, 1.0),
        "edgecolors": "face",
    }  # no seams between cells
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
        axes.set_title(style.wrapped(title, 70))
        axes.set_yticks([row + 0.5 for row in range(len(each))], each.index, fontsize=6)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set_ylabel("layer")
    style.name_axis(panels[-1], "x", "optimizer steps", "step")
    bar = figure.colorbar(mesh, ax=panels, label="entries sent (share)", aspect=40)
    style.write_ticks(bar.ax, "y")
    words = "; ".join(f"{title} {each.min().min():.2g} to {each.max().max():.2g}" for title, each in sparse.items())
    return Picture(figure=figure, alt=f"Heat maps of the share of each layer that was sent: {words}.")


def _densities(results: Results, configuration: Configuration) -> pd.DataFrame:
    """Return the mean density over seeds, with a row per layer in the model's order and a column per evaluation."""
    runs = {run["run_id"] for run in configuration.ok}
    layers = to_frame([row for row in results.layers if row["run_id"] in runs], LAYERS)
    ours = layers.dropna(subset=["density_mean"])
    table = ours.pivot_table(index="layer", columns="step", values="density_mean", aggfunc="mean", sort=False)
    return table.sort_index(axis="columns").dropna(axis="columns")
