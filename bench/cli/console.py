"""Print results on stdout, as tables for people or JSON for programs."""

import contextlib
import contextvars
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

_PIPED_WIDTH = 200
_KEPT: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("kept", default=None)


def stdout_console() -> Console:
    """Return a console on stdout; in a pipe or a file its lines are wide, so that `grep` finds complete rows."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_WIDTH
    return console


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    if (kept := _KEPT.get()) is None:
        print(json.dumps(value, indent=2))
    else:
        kept.append(value)


@contextlib.contextmanager
def kept_json() -> Iterator[list[Any]]:
    """Keep the values of `print_json` in a list, instead of printing them, while the block is executed."""
    kept: list[Any] = []
    token = _KEPT.set(kept)
    try:
        yield kept
    finally:
        _KEPT.reset(token)


def plain_table(title: str | None = None, columns: Sequence[Column | str] = (), *, show_footer: bool = False) -> Table:
    """Return an empty table with a line below its headings and no frame."""
    return Table(
        *columns,
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_footer=show_footer,
    )


def table_of(left: Sequence[str], right: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of texts.

    Args:
        left: headings of the first columns, whose cells are left-aligned.
        right: headings of the other columns, whose cells are right-aligned.
        rows: the texts of each row's cells.
    """
    columns = [Column(heading, overflow="fold") for heading in left]
    columns += [Column(heading, justify="right", overflow="fold") for heading in right]
    table = plain_table(columns=columns)
    for row in rows:
        table.add_row(*map(escape, row))
    return table
