"""Draw how speed depends on the bandwidth of the links, with break-even points, and on the number of ranks."""

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

from bench.core.errors import UsageError
from bench.report.columns import format_value
from bench.report.comparison import BASELINES_OF_SPEED, choose_baseline
from bench.report.groups import WORKLOAD, RunGroup
from bench.report.plots import style
from bench.report.plots.results import NotDrawable, Results, last_known
from bench.report.statistics import Effect, improvement
from bench.report.store import grouped

_WORKLOAD = [name for name in WORKLOAD if name not in ("uplink_bps", "downlink_bps")]
_MARGIN = 1.6  # the y axis ends at this factor beyond the points, because intervals of two seeds would be far longer


def draw_over_bandwidth(results: Results) -> style.Picture:
    """Draw the speed-up over the baseline against the bandwidth of the link, with one curve per configuration.

    The legend names the bandwidths at which a configuration breaks even, and a ring marks each on the line of factor 1.

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
            **style.line(*looks[title]),
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
            color=style.color(*looks[title]),
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


def break_even(points: Sequence[tuple[float, float]]) -> list[float]:
    """Return the bandwidths at which the speed-up is 1, interpolated linearly between logarithms.

    Args:
        points: pairs of a bandwidth in bit/s and the speed-up there as a factor, the lowest bandwidth first.
    """
    crossings = []
    for (left, gain_left), (right, gain_right) in itertools.pairwise(points):
        above, below = math.log(gain_left), math.log(gain_right)
        if above * below < 0.0:
            crossings.append(left * (right / left) ** (above / (above - below)))
    return crossings + [bandwidth for bandwidth, gain in points if gain == 1.0]


def _baselines(groups: Sequence[RunGroup], wanted: str | None) -> list[tuple[RunGroup, RunGroup]]:
    """Return pairs of a configuration and the baseline of its workload; workloads without a baseline are left out.

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
    """Return pairs of a link's bandwidth in bit/s and the speed-up over the baseline there, the slowest link first.

    Links on which one of the two has no measured speed are left out.
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
        sizes, means = list(curve), [sum(speeds) / len(speeds) for speeds in curve.values()]
        spread = [(mean, min(speeds), max(speeds)) for mean, speeds in zip(means, curve.values(), strict=True)]
        drawn[title] = axes.errorbar(
            sizes, means, yerr=style.whiskers(spread), **style.line(*look), elinewidth=0.8, capsize=2
        )
        style.tooltips(
            drawn[title].lines[0],
            *(f"{title}: {mean:,.0f} samples/s, {size:.0f} ranks" for size, mean in zip(sizes, means, strict=True)),
        )
        words.append(f"{title} {means[-1] / means[0]:.2f}x from {sizes[0]:.0f} to {sizes[-1]:.0f} ranks")
        if number == 0:
            ideal = [means[0] * size / sizes[0] for size in sizes]
            (line,) = axes.plot(sizes, ideal, color=style.GREY, linewidth=0.9)
    drawn[f"in proportion to the ranks, from {curves[0][0]}"] = line
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({size for _, _, curve in curves for size in curve}))
    style.name_axis(axes, "x", "ranks", "world_size")
    axes.set_ylim(bottom=0.0)
    style.name_axis(axes, "y", "speed", "samples_per_s")
    return style.with_legend(figure, drawn, f"Curves of samples per second against ranks: {'; '.join(words)}.")


def _speeds(group: RunGroup) -> dict[float, list[float]]:
    # Return samples per second of every seed, by world size; empty if there is only one world size.
    known = last_known(group).dropna(subset=["world_size", "samples_per_s"])
    by_size = known.astype({"world_size": float}).groupby("world_size")["samples_per_s"]
    speeds = {cast("float", size): each.tolist() for size, each in by_size}
    return speeds if len(speeds) > 1 else {}
