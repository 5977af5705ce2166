"""Draw the speed of training, and the quantities that it depends on.

The pictures show the parts of a step's time, the speed-up against the bandwidth of the links with break-even points,
the speed against the number of ranks, and the share of each layer that was sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench.core.errors import UsageError
from bench.core.schema import LAYERS
from bench.report.baseline import BASELINES_OF_SPEED, choose_baseline
from bench.report.columns import format_value
from bench.report.groups import WORKLOAD, RunGroup
from bench.report.plots import style
from bench.report.plots.results import NotDrawable, Results, last_known, to_frame
from bench.report.statistics import Effect, break_even, improvement
from bench.report.store import grouped

if TYPE_CHECKING:
    import pandas as pd

_BAR = 0.38
_NAME_WIDTH = 34  # characters beside the bars
_LINE_IN = 0.15
_ABOVE, _BELOW = -_BAR / 2, _BAR / 2  # offsets of the bar of a step, and of the bar of its exchange
# For each part: its bar, shade and hatch. Parts do not differ in colour, because a colour stands for a method.
_PARTS: dict[str, tuple[float, dict[str, Any]]] = {
    "forward and backward": (_ABOVE, {"alpha": 0.85, "hatch": ""}),
    "exposed exchange": (_ABOVE, {"alpha": 0.5, "hatch": "////"}),
    "optimizer and rest": (_ABOVE, {"alpha": 0.2, "hatch": ""}),
    "busy encoding": (_BELOW, {"alpha": 0.5, "hatch": "...."}),
    "busy exchanging": (_BELOW, {"alpha": 0.2, "hatch": "xxxx"}),
}


def draw_step(results: Results) -> style.Picture:
    """Draw two bars per configuration: the upper shows the parts of a step, the lower the parts of its exchange.

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
                facecolor=look["color"],
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
    """Return the mean seconds over seeds of each part of a step, by name; empty if the parts were not measured.

    The times of encoding and exchanging are included only if the backend reports them.
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


_WORKLOAD = [name for name in WORKLOAD if name not in ("uplink_bps", "downlink_bps")]
_MARGIN = 1.6  # the y axis ends at this factor beyond the points, because intervals of two seeds would be far longer


def draw_over_bandwidth(results: Results) -> style.Picture:
    """Draw the speed-up over the baseline against the bandwidth of the link, with one curve per configuration.

    The legend names the bandwidths at which a configuration breaks even; rings mark these points where the speed-up
    is 1.

    Raises:
        NotDrawable: there are fewer than two configurations or two bandwidths, or no link on which the baseline and
            another configuration ran.
    """
    groups = results.across("uplink_bps", "downlink_bps")
    bandwidths = sorted({value for group in groups for value in group.values("uplink_bps")})
    if len(groups) < 2 or len(bandwidths) < 2:
        raise NotDrawable(
            "speed-up against bandwidth needs two configurations over two links that differ in uplink_bps: "
            "`bench run --hosts 2 --bandwidth RATE`"
        )
    baselines_of = _baselines(groups, results.baseline)
    gains = {group.title: _gains(baseline, group) for group, baseline in baselines_of if group is not baseline}
    gains = {title: each for title, each in gains.items() if each}
    beside = " / ".join(dict.fromkeys(baseline.title for _, baseline in baselines_of))
    if not gains:
        raise NotDrawable(
            f"speed-up against bandwidth needs a link on which both {beside} and another configuration ran"
        )
    from matplotlib.ticker import LogLocator

    figure, (axes,) = style.new_figure(title=f"Speed-up over {style.wrapped(beside, 60)}")
    axes.axhline(1.0, color=style.INK, linewidth=0.9)
    curves, words = {}, []
    looks = results.looks(groups)
    for title, each in gains.items():
        at = break_even([(bandwidth, effect.value) for bandwidth, effect in each])
        even = " and ".join(format_value("uplink_bps", bandwidth) for bandwidth in at)
        curve = axes.errorbar(
            [bandwidth for bandwidth, _ in each],
            [effect.value for _, effect in each],
            yerr=style.whiskers([(effect.value, effect.low, effect.high) for _, effect in each]),
            **looks[title],
            elinewidth=0.8,
            capsize=2,
        )
        axes.plot(
            at,
            [1.0] * len(at),
            linestyle="",
            marker="o",
            markersize=9,
            fillstyle="none",
            color=looks[title]["color"],
        )
        style.tooltips(
            curve.lines[0],
            *(f"{title}: {effect.value:.2f}x at {format_value('uplink_bps', rate)}" for rate, effect in each),
        )
        curves[f"{title} ({f'breaks even at {even}' if at else 'no break-even point here'})"] = curve
        words.append(f"{title} {each[0][1].value:.2f}x to {each[-1][1].value:.2f}x, {even or 'no break-even'}")
    values = [1.0, *(effect.value for each in gains.values() for _, effect in each)]
    axes.set(xscale="log", xticks=bandwidths, yscale="log", ylim=(min(values) / _MARGIN, max(values) * _MARGIN))
    style.name_axis(axes, "x", "bandwidth of the link", "uplink_bps")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    style.write_ticks(axes, "y")
    axes.set_ylabel("speed-up in samples per second (factor)")
    return style.with_legend(figure, curves, f"Curves of speed-up, slowest to fastest link: {'; '.join(words)}.")


def _baselines(groups: Sequence[RunGroup], wanted: str | None) -> list[tuple[RunGroup, RunGroup]]:
    """Return a tuple (configuration, baseline of its workload) for every configuration whose workload has a baseline.

    Configurations that differ only in the links have the same workload.

    Raises:
        UsageError: no configuration matches the wanted baseline.
    """
    choose_baseline(groups, wanted, BASELINES_OF_SPEED)
    found = []
    for of_one in grouped(groups, lambda group: tuple(group.runs[0][name] for name in _WORKLOAD)).values():
        with contextlib.suppress(UsageError):  # this workload lacks the baseline
            baseline, _ = choose_baseline(of_one, wanted, BASELINES_OF_SPEED)
            found += [(group, baseline) for group in of_one]
    return found


def _gains(baseline: RunGroup, group: RunGroup) -> list[tuple[float, Effect]]:
    """Return tuples (bandwidth of a link in bit/s, speed-up over the baseline on this link), the slowest link first.

    Links on which the baseline or the group has no measured speed are left out.
    """
    ours, theirs = (
        grouped([run for run in each.ok if run["samples_per_s"]], lambda run: (run["uplink_bps"], run["downlink_bps"]))
        for each in (group, baseline)
    )
    gains = []
    for link in sorted((link for link in ours if link[0] is not None), key=lambda link: (link[0], link[1] or 0.0)):
        sides = ([run["samples_per_s"] for run in side.get(link, [])] for side in (theirs, ours))
        if effect := improvement(*sides, higher_is_better=True):
            gains.append((link[0], effect))
    return gains


def draw_over_ranks(results: Results) -> style.Picture:
    """Draw samples per second against the number of ranks, with one curve per configuration.

    A grey line shows perfect scaling of the first configuration: speed in proportion to the ranks.

    Raises:
        NotDrawable: no configuration ran with two numbers of ranks.
    """
    groups = results.across("world_size", "hosts", "ranks_per_host", "replicas", "threads")
    curves = results.drawable(groups, _speeds, "scaling needs a configuration that ran with two values of --world-size")
    figure, (axes,) = style.new_figure(title="Samples per second against the number of ranks")
    drawn: dict[str, Any] = {}
    words = []
    for number, (title, look, curve) in enumerate(curves):
        sizes, means = curve.index.tolist(), curve["mean"].tolist()
        whiskers = style.whiskers([*map(tuple, curve.to_numpy())])
        drawn[title] = axes.errorbar(sizes, means, yerr=whiskers, **look, elinewidth=0.8, capsize=2)
        style.tooltips(
            drawn[title].lines[0],
            *(f"{title}: {mean:,.0f} samples/s, {size:.0f} ranks" for size, mean in zip(sizes, means, strict=True)),
        )
        words.append(f"{title} {means[-1] / means[0]:.2f}x from {sizes[0]:.0f} to {sizes[-1]:.0f} ranks")
        if number == 0:
            ideal = [means[0] * size / sizes[0] for size in sizes]
            (line,) = axes.plot(sizes, ideal, color=style.GREY, linewidth=0.9)
    drawn[f"perfect scaling of {curves[0][0]}"] = line
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({size for _, _, curve in curves for size in curve.index}))
    style.name_axis(axes, "x", "ranks", "world_size")
    axes.set_ylim(bottom=0.0)
    style.name_axis(axes, "y", "speed", "samples_per_s")
    return style.with_legend(figure, drawn, f"Curves of samples per second against ranks: {'; '.join(words)}.")


def _speeds(group: RunGroup) -> pd.DataFrame:
    # Mean, lowest and highest samples per second over seeds, by world size; empty if there is only one world size.
    known = last_known(group).dropna(subset=["world_size", "samples_per_s"]).astype({"world_size": float})
    speeds = known.groupby("world_size")["samples_per_s"].agg(["mean", "min", "max"])
    return speeds if len(speeds) > 1 else speeds[:0]


_LAYER_IN = 0.13


def draw_density(results: Results) -> style.Picture:
    """Draw heat maps of the share of each layer that was sent.

    Each configuration that did not send every entry has one heat map, with a row per layer and a cell per evaluation.

    Raises:
        NotDrawable: no finished run has a ``layers.csv`` with a share below 1.
    """
    from matplotlib.colors import LogNorm

    sparse = {
        title: each
        for title, _, each in results.drawable(
            results.configurations,
            lambda group: _densities(results, group),
            "density over time needs the layers.csv of a finished run that did not send every entry",
        )
    }
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
    table = (
        to_frame([row for row in results.layers if row["run_id"] in runs], LAYERS)
        .dropna(subset=["density_mean"])
        .pivot_table(index="layer", columns="step", values="density_mean", aggfunc="mean", sort=False)
        .sort_index(axis="columns")
        .dropna(axis="columns")
    )
    return table if table.size and table.min().min() < 1.0 else table[:0]
