"""Write the summary page: the systems and the usual methods, their needs to the target, and which one to use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from bench.report.columns import format_value
from bench.report.groups import RunGroup
from bench.report.plots import style
from bench.report.statistics import FEWEST_SEEDS, MeanEstimate
from bench.report.targets import BYTES, TIME, Need, Target, mean_need, needs, num_reached
from benchmarks.published.claims import RULE
from benchmarks.published.figures import UNIT_OF, Gain, Missing, SweepRuns, Which
from benchmarks.published.page import NOTHING, TEXTS, interval_text, markdown_table, origin, outcome, write_text
from benchmarks.published.parts import System
from benchmarks.published.setups import LINKS, METHODS

SWEEP = "together"
DENSE = "dense fp32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One method on one link, with the time and bytes that its seeds needed to the target."""

    method: str
    time: Sequence[Need]
    bytes: Sequence[Need]
    accuracy: MeanEstimate | None

    @property
    def reached(self) -> bool:
        """True if every seed reached the target."""
        return bool(self.time) and num_reached(self.time) == len(self.time)


def write_summary(
    systems: Sequence[System], runs: Mapping[str, SweepRuns], folder: Path, *, quick: bool = False
) -> None:
    """Write the summary page and its picture."""
    together = runs[SWEEP]
    entries = {link: entries_of(together, bandwidth) for link, bandwidth in LINKS.items()}
    text = Template((TEXTS / "summary.md").read_text(encoding="utf-8"))
    page = text.substitute(
        rule=RULE,
        verdicts=verdicts_table(systems, runs),
        table="\n\n".join(link_table(link, entries[link], together) for link in LINKS),
        recommended="\n".join(f"- {recommendation(link, entries[link], together)}" for link in LINKS),
        picture=_picture(entries, folder),
        origin=origin([SWEEP], runs),
    )
    write_text(page, folder / "README.md", quick=quick)


def verdicts_table(systems: Sequence[System], runs: Mapping[str, SweepRuns]) -> str:
    """Return a table of the number of claims by system and verdict."""
    columns = (
        "reproduced", "not reproduced", "same", "undecided", "not measured", "not testable here", "built",
        "for comparison",
    )  # fmt: skip
    rows = []
    for system in systems:
        verdicts = (outcome(claim, runs).verdict for claim in system.claims)
        found = [verdict.partition(":")[0].partition(" (")[0] for verdict in verdicts]
        rows.append([f"[{system.name}]({system.name}.md)", *(str(found.count(each)) for each in columns)])
    return markdown_table(["System", *columns], rows)


def link_table(link: str, entries: Sequence[Entry], runs: SweepRuns) -> str:
    """Return a table of time and bytes to the target on one link."""
    rows = []
    for entry in entries:
        seeds = f"{num_reached(entry.time)} of {len(entry.time)}" if entry.time else NOTHING
        accuracy = NOTHING if entry.accuracy is None else interval_text("test_accuracy", entry.accuracy)
        sooner = NOTHING if entry.method == DENSE else _gain_text(runs, entry.method, DENSE, link)
        rows.append(
            [entry.method, seeds, _need_text(entry.time, TIME), sooner, _need_text(entry.bytes, BYTES), accuracy]
        )
    heading = [
        link,
        "seeds at target",
        "time to target",
        "sooner than dense",
        "bytes sent to target",
        "final accuracy, %",
    ]
    return markdown_table(heading, rows)


def recommendation(link: str, entries: Sequence[Entry], runs: SweepRuns) -> str:
    """Return the method with the shortest mean time, and those that the interval does not distinguish from it."""
    reached = [entry for entry in entries if entry.reached]
    if not reached:
        return f"**{link}**: no method reached the target with every seed, so nothing is recommended."
    ranked = sorted((e for e in reached if len(e.time) >= FEWEST_SEEDS), key=lambda entry: _mean(entry.time))
    if not ranked:
        return f"**{link}**: fewer than {FEWEST_SEEDS} seeds, so nothing is recommended."
    best, *others = ranked
    alike = [entry.method for entry in others if not _surely_slower(runs, entry.method, best.method, link)]
    gain = "" if best.method == DENSE else f", {_gain_text(runs, best.method, DENSE, link)} sooner than dense"
    beside = (
        f"; not told apart from it: {', '.join(alike)}" if alike else "; all others that reached it are surely slower"
    )
    return f"**{link}**: {best.method}{gain}{beside}."


def entries_of(runs: SweepRuns, bandwidth: Which) -> list[Entry]:
    entries = []
    for method, which in METHODS.items():
        try:
            found = list(runs.by_seed({**which, **bandwidth}).values())
        except Missing:
            found = []
        group = RunGroup(label={}, runs=found)
        entries.append(
            Entry(
                method=method,
                time=needs(group, TIME, Target()),
                bytes=needs(group, BYTES, Target()),
                accuracy=group.estimate("test_accuracy"),
            )
        )
    return entries


def _estimate(seeds: Sequence[Need]) -> MeanEstimate:
    known = mean_need(seeds)
    assert known is not None
    return known


def _mean(seeds: Sequence[Need]) -> float:
    return _estimate(seeds).mean


def _need_text(seeds: Sequence[Need], metric: str) -> str:
    known = mean_need(seeds)
    if known is None:
        return NOTHING
    column = UNIT_OF[metric]
    if num_reached(seeds) < len(seeds):
        return f"more than {format_value(column, known.mean)}"
    return interval_text(column, known)


def _gain(runs: SweepRuns, method: str, than: str, link: str) -> Gain:
    bandwidth = LINKS[link]
    return Gain(which={**METHODS[method], **bandwidth}, than={**METHODS[than], **bandwidth}, metric=TIME)


def _gain_text(runs: SweepRuns, method: str, than: str, link: str) -> str:
    try:
        figure = _gain(runs, method, than, link).of(runs)
        return figure.text if figure.decides else f"{figure.text} of what is known"
    except Missing:
        return NOTHING


def _surely_slower(runs: SweepRuns, method: str, best: str, link: str) -> bool:
    figure = _gain(runs, best, method, link).of(runs)
    return figure.low is not None and figure.low > 1.0


def _picture(entries: Mapping[str, Sequence[Entry]], folder: Path) -> str:
    if not any(entry.reached for several in entries.values() for entry in several):
        return "(No picture: no method reached the target with every seed.)"
    with style.applied():
        style.save(_draw(entries), folder / "summary.svg")
    return "![Time and bytes to the target, by method and link](summary.svg)"


def _draw(entries: Mapping[str, Sequence[Entry]]) -> style.Picture:
    """Draw a row per method and a mark per link on which every seed reached the target."""
    from matplotlib.ticker import LogLocator

    names = list(METHODS)
    figure, panels = style.new_figure(height=0.9 + 0.26 * len(names), columns=2, sharey=True)
    marks = {}
    for axes, metric, label in zip(
        panels, (TIME, BYTES), ("time to target", "bytes sent per rank to target"), strict=True
    ):
        for index, (link, several) in enumerate(entries.items()):
            needed = {e.method: e.time if metric == TIME else e.bytes for e in several if e.reached}
            places = [names.index(method) + 0.22 * (index - 1) for method in needed]  # each link has its own line
            known = [_estimate(seeds) for seeds in needed.values()]
            axes.hlines(
                places,
                [e.mean if e.low is None else max(e.low, e.mean / 10) for e in known],
                [e.mean if e.high is None else e.high for e in known],
                color=style.marker(index)["color"], linewidth=1.0,
            )  # fmt: skip
            (marks[link],) = axes.plot([e.mean for e in known], places, linestyle="", **style.marker(index))
        style.name_axis(axes, "x", label, UNIT_OF[metric], log=True)
        if axes.get_xscale() == "log":
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    panels[0].set_title("Time and bytes to the target")
    words = "; ".join(
        f"{link}: "
        + ", ".join(f"{e.method} {format_value('train_time_s', _mean(e.time))}" for e in several if e.reached)
        for link, several in entries.items()
    )
    return style.with_legend(figure, marks, f"Marks of mean time and bytes to the target. {words}.")
