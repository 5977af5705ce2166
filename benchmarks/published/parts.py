"""Parts of a page: claims, tables and pictures, each with the sweep whose rows it comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from bench.report.runs import Run
from benchmarks.published.claims import Claim, Stated
from benchmarks.published.figures import Which


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Means over seeds of some columns, a row per configuration.

    Attributes:
        title: its heading.
        sweep: whose rows.
        rows: configurations, each with its name.
        columns: of `metrics.csv`; a mean with its interval each.
        derived: further ones, by what they show, with what computes them from a run.
        note: a sentence below it.
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
        kind: of `bench plot`.
        name: of the file, without suffix.
        sweep: whose rows.
        only: which of its configurations; empty: all.
    """

    kind: str
    name: str
    sweep: str
    only: Sequence[Which] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """One published system and its page.

    Attributes:
        name: of its page and of its text in `texts/`.
        claims: in the document's order.
    """

    name: str
    claims: Sequence[Claim | Stated]
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()

    @property
    def sweeps(self) -> list[str]:
        """The sweeps that the page needs, each once."""
        measured = [claim for claim in self.claims if isinstance(claim, Claim)]
        parts: list[Claim | Table | Drawing] = [*measured, *self.tables, *self.drawings]
        return list(dict.fromkeys(part.sweep for part in parts))
