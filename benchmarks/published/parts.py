"""The parts of a page: claims, tables and pictures, each with the sweep that its rows come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from bench.report.store import Run
from benchmarks.published.claims import Claim, Stated
from benchmarks.published.figures import Which


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table of means over seeds with intervals, one row per configuration.

    Attributes:
        title: the heading.
        sweep: the sweep that the rows come from.
        rows: configurations with their names.
        columns: columns of `metrics.csv`.
        derived: further columns by heading, each with a function that computes its value from a run.
        note: a text below the table.
    """

    title: str
    sweep: str
    rows: Sequence[tuple[str, Which]]
    columns: Sequence[str]
    derived: Mapping[str, Callable[[Run], float | None]] = dataclasses.field(default_factory=dict)
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """A picture that `bench plot` draws.

    Attributes:
        kind: the kind of `bench plot`.
        name: the file name without suffix.
        sweep: the sweep that the rows come from.
        only: the configurations to draw; empty: all.
    """

    kind: str
    name: str
    sweep: str
    only: Sequence[Which] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """One published system and its page.

    Attributes:
        name: the name of the page and of its text in `texts/`.
        claims: claims in the order of the document.
    """

    name: str
    claims: Sequence[Claim | Stated]
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()

    @property
    def sweeps(self) -> list[str]:
        """The distinct sweeps that the page needs."""
        measured = [claim for claim in self.claims if isinstance(claim, Claim)]
        parts: list[Claim | Table | Drawing] = [*measured, *self.tables, *self.drawings]
        return list(dict.fromkeys(part.sweep for part in parts))
