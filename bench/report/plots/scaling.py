"""Draw samples per second against the number of ranks."""

from __future__ import annotations

from typing import Any

from bench.report.configurations import Configuration
from bench.report.plots import style
from bench.report.plots.picture import Picture
from bench.report.plots.results import NotDrawable, Results, last_known


def draw(results: Results) -> Picture:
    """Draw one curve per configuration, and the line of perfect scaling."""
    groups = results.across("world_size", "hosts", "ranks_per_host", "replicas", "threads")
    curves = {group.title: _curve(group) for group in groups}
    curves = {title: curve for title, curve in curves.items() if len(curve) > 1}
    if not curves:
        raise NotDrawable("scaling needs a configuration that ran with two values of --world-size")
    figure, (axes,) = style.new_figure()
    drawn: dict[str, Any] = {}
    words = []
    looks = results.looks(groups)
    for number, (title, curve) in enumerate(curves.items()):
        sizes, means = list(curve), [sum(speeds) / len(speeds) for speeds in curve.values()]
        spread = [(mean, min(speeds), max(speeds)) for mean, speeds in zip(means, curve.values(), strict=True)]
        drawn[title] = axes.errorbar(
            sizes, means, yerr=style.whiskers(spread), **style.line(*looks[title]), elinewidth=0.8, capsize=2
        )
        style.tooltips(
            drawn[title].lines[0],
            *(f"{title}: {mean:,.0f} samples/s, {size:.0f} ranks" for size, mean in zip(sizes, means, strict=True)),
        )
        words.append(f"{title} {means[-1] / means[0]:.2f}x from {sizes[0]:.0f} to {sizes[-1]:.0f} ranks")
        if number == 0:
            ideal = [means[0] * size / sizes[0] for size in sizes]
            (line,) = axes.plot(sizes, ideal, color=style.GREY, linewidth=0.9)
    drawn[f"in proportion to the ranks, from {next(iter(curves))}"] = line
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({size for curve in curves.values() for size in curve}))
    axes.set_title("Samples per second against the number of ranks")
    style.name_axis(axes, "x", "ranks", "world_size")
    axes.set_ylim(bottom=0.0)
    style.name_axis(axes, "y", "speed", "samples_per_s")
    style.legend(figure, drawn)
    return Picture(figure=figure, alt=f"Curves of samples per second against ranks: {'; '.join(words)}.")


def _curve(group: Configuration) -> dict[float, list[float]]:
    """Return the samples per second of every seed, by world size."""
    known = last_known(group).dropna(subset=["world_size", "samples_per_s"])
    sizes = sorted(known["world_size"].astype(float).unique().tolist())
    return {size: known.loc[known["world_size"] == size, "samples_per_s"].tolist() for size in sizes}
