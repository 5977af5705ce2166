"""Prepare the rows of runs for pictures: group and label them as `bench compare` does."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeVar

from bench.core.columns import Column
from bench.core.errors import NothingToCompare
from bench.core.schema import METRICS
from bench.report.groups import SETTINGS, RunGroup, group_runs
from bench.report.plots.style import Methods, line
from bench.report.quality import ACCURACY, Metric
from bench.report.store import Row, Run, collect_runs, frame, grouped, one_per_seed
from bench.report.targets import bytes_sent

if TYPE_CHECKING:
    import pandas as pd


T = TypeVar("T", bound=Sized)


class NotDrawable(NothingToCompare):
    """The rows lack what a picture shows; the message says what is needed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """The rows from which pictures are drawn.

    Attributes:
        rows: rows as returned by ``store.read``.
        layers: rows as returned by ``store.read_layers``.
        baseline: the name of the baseline of speed-ups, as ``baseline.choose_baseline`` reads it; None stands for the
            default of `bench compare` for speeds.
    """

    rows: list[Row]
    layers: list[Row]
    baseline: str | None = None

    @functools.cached_property
    def configurations(self) -> list[RunGroup]:
        """The configurations with at least one successful run, in order of appearance."""
        return shortly_labelled([group for group in group_runs(self.runs) if group.ok])

    @functools.cached_property
    def quality(self) -> Metric:
        """The measure of models in pictures: accuracy if any configuration has it, else the first configuration's."""
        found = [group.quality for group in group_runs(self.runs)]
        return ACCURACY if ACCURACY in found or not found else found[0]

    @property
    def measured(self) -> list[RunGroup]:
        """The configurations whose models are measured by `quality`; pictures of quality show only these."""
        return [group for group in self.configurations if group.quality is self.quality]

    @property
    def left_out(self) -> list[str]:
        """A list with one sentence if pictures of `quality` leave out some configurations; otherwise an empty list."""
        if len(self.measured) == len(self.configurations):
            return []
        others = " and ".join(sorted({group.quality.noun for group in self.configurations} - {self.quality.noun}))
        return [f"pictures of {self.quality.noun} leave out the runs with {others}; give these runs alone to draw them"]

    def across(self, *varied: str) -> list[RunGroup]:
        """Return groups of runs; the runs of a group have equal settings except in the varied columns.

        Args:
            varied: names of the columns that a picture has on its axis, such as ``uplink_bps``.
        """
        runs, _ = one_per_seed(self.runs, SETTINGS)  # not config_id, which other versions of the code change
        kept = [name for name in SETTINGS if name not in varied]
        alike = list(grouped(runs, lambda run: tuple(run[name] for name in kept)).values())
        hidden = dict.fromkeys((*varied, "name"))
        labelled = [
            Run(rows=[run.last_known | hidden | {"config_id": str(number)}])
            for number, members in enumerate(alike)
            for run in members
        ]
        groups = [
            RunGroup(label=group.label, runs=members)
            for group, members in zip(group_runs(labelled), alike, strict=True)
        ]
        return shortly_labelled([group for group in groups if group.ok])

    def evaluations(self, group: RunGroup) -> pd.DataFrame:
        """Return the rows of a configuration's successful runs as a data frame.

        An added column ``bytes_sent`` holds the bytes that one rank has sent since the start of its run; NaN if
        unknown.
        """
        ours = to_frame([row for run in group.ok for row in run.rows])
        sent = [math.nan if each is None else each for run in group.ok for each in bytes_sent(run.rows)]
        return ours.assign(step=ours["step"].astype(float), bytes_sent=sent)

    @functools.cached_property
    def methods(self) -> Methods:
        """The colours and line styles of all methods, which are the same in every picture of these rows."""
        return Methods(list(dict.fromkeys(map(_method, self.runs))))

    def looks(self, groups: Sequence[RunGroup]) -> dict[str, dict[str, Any]]:
        """Return matplotlib's arguments for the curve of each group of one picture, by the group's title.

        The arguments are colour, line style and marker. Groups of the same method have the same colour, and differ in
        line style and marker.
        """
        indices = [self.methods.index(*_method(group.runs[0])) for group in groups]
        numbered = enumerate(zip(groups, indices, strict=True))
        return {group.title: line(index, indices[:number].count(index)) for number, (group, index) in numbered}

    def drawable(
        self, groups: Sequence[RunGroup], data_of: Callable[[RunGroup], T], needs: str
    ) -> list[tuple[str, dict[str, Any], T]]:
        """Return a tuple (title, look, data) for each group of a picture that has data.

        The look is a dict of matplotlib's arguments for the group's curve: colour, line style and marker.

        Args:
            groups: the groups of the picture.
            data_of: returns what to draw for a group, which is empty if the group has no data.
            needs: the message of the error; it says what the picture needs.

        Raises:
            NotDrawable: no group has data.
        """
        looks = self.looks(groups)
        found = [(group.title, looks[group.title], data) for group in groups if len(data := data_of(group))]
        if not found:
            raise NotDrawable(needs)
        return found

    @functools.cached_property
    def runs(self) -> list[Run]:
        """One run per configuration and seed, chosen by ``store.one_per_seed``."""
        return one_per_seed(collect_runs(self.rows))[0]


def _method(run: Run) -> tuple[str, ...]:
    return tuple(str(run[name]) for name in ("compressor", "collective", "optimizer", "strategy"))


def shortly_labelled(groups: list[RunGroup]) -> list[RunGroup]:
    """Return the groups with labels that are short enough for a legend.

    A label loses the columns that are the same in all groups and those that have the same values as an earlier column.
    The compressor always stays, and a single group keeps its whole label.
    """
    if len(groups) < 2:
        return groups
    columns: dict[tuple[Any, ...], str] = {}
    for name in groups[0].label:
        values = tuple(group.label[name] for group in groups)
        if name == "compressor" or len(set(values)) > 1:
            columns.setdefault(values, name)
    return [
        dataclasses.replace(group, label={name: group.label[name] for name in columns.values()}) for group in groups
    ]


def last_known(group: RunGroup, *, diverged: bool = False) -> pd.DataFrame:
    """Return a data frame with one row per successful run: the last known value of each column.

    Args:
        group: the runs.
        diverged: also include the runs whose training diverged.
    """
    return to_frame([run.last_known for run in (*group.ok, *(group.diverged if diverged else ()))])


def to_frame(rows: Sequence[Row], schema: Sequence[Column] = METRICS) -> pd.DataFrame:
    """Return rows as a data frame with the columns of the schema, in its order and with its types."""
    return frame(rows, {column.name: column.type for column in schema})
