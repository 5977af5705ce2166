"""Prepare rows for pictures, grouped and labelled as in `bench compare`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeVar

from bench.core.errors import NothingToCompare
from bench.core.schema.column import Column
from bench.core.schema.metrics import METRICS
from bench.report.groups import SETTINGS, RunGroup, group_runs
from bench.report.plots.style import Look, Methods
from bench.report.store import Row, Run, collect_runs, grouped, one_per_seed
from bench.report.targets import bytes_sent

if TYPE_CHECKING:
    import pandas as pd


T = TypeVar("T", bound=Sized)
Drawable = tuple[str, Look, T]

_METHOD = ("compressor", "collective", "optimizer", "strategy")


class NotDrawable(NothingToCompare):
    """The rows lack what a picture shows; the message says what."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """The rows that pictures are drawn from.

    Attributes:
        rows: rows as returned by ``store.read``.
        layers: rows as returned by ``store.read_layers``.
        baseline: the name of the baseline of a speed-up (``baseline.choose``); None: the default of `bench compare` for
            speeds.
    """

    rows: list[Row]
    layers: list[Row]
    baseline: str | None = None

    @functools.cached_property
    def configurations(self) -> list[RunGroup]:
        """The configurations with at least one successful run, in order of appearance."""
        return shortly_labelled([group for group in group_runs(self.runs) if group.ok])

    def across(self, *varied: str) -> list[RunGroup]:
        """Return configurations whose runs may differ in the varied columns, which a picture has on its axis."""
        runs, _ = one_per_seed(self.runs, SETTINGS)  # other versions of the code gave them another config_id
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
        """Return the rows of a configuration's successful runs, with ``bytes_sent`` per rank since the start."""
        ours = to_frame([row for run in group.ok for row in run.rows])
        sent = [math.nan if each is None else each for run in group.ok for each in bytes_sent(run.rows)]
        return ours.assign(step=ours["step"].astype(float), bytes_sent=sent)

    @functools.cached_property
    def methods(self) -> Methods:
        """The looks of all methods, so that each has the same colour in every picture of these rows."""
        return Methods(map(_method, self.runs))

    def looks(self, groups: Sequence[RunGroup]) -> dict[str, Look]:
        """Return the look of each group of a picture, by its title."""
        return self.methods.looks({group.title: _method(group.runs[0]) for group in groups})

    def drawable(self, groups: Sequence[RunGroup], data_of: Callable[[RunGroup], T], needs: str) -> list[Drawable[T]]:
        """Return title, look and data of each group of a picture that has data.

        Raises:
            NotDrawable: no group has; ``needs`` says what the picture needs.
        """
        looks = self.looks(groups)
        found = [(group.title, looks[group.title], data) for group in groups if len(data := data_of(group))]
        if not found:
            raise NotDrawable(needs)
        return found

    @functools.cached_property
    def runs(self) -> list[Run]:
        """The run that counts of each configuration and seed."""
        return one_per_seed(collect_runs(self.rows))[0]


def _method(run: Run) -> tuple[str, ...]:
    return tuple(str(run[name]) for name in _METHOD)


def shortly_labelled(groups: list[RunGroup]) -> list[RunGroup]:
    """Return the groups with labels short enough for a legend, without shared values and redundant columns.

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
    """Return one row of last known values per successful run, and with ``diverged`` also per diverged run."""
    return to_frame([run.last_known for run in (*group.ok, *(group.diverged if diverged else ()))])


# Nullable types: an int or bool column with an empty cell must not turn into floats or objects.
_DTYPES = {int: "Int64", float: "float64", bool: "boolean", str: "object"}


def to_frame(rows: Sequence[Row], schema: Sequence[Column] = METRICS) -> pd.DataFrame:
    """Return the rows as a data frame with the schema's columns, order and types."""
    import pandas as pd

    return pd.DataFrame(
        {
            column.name: pd.Series([row.get(column.name) for row in rows], dtype=_DTYPES[column.type])
            for column in schema
        }
    )
