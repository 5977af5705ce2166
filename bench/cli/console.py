"""Print results on stdout, as tables for people or JSON for programs, and progress and warnings on stderr."""

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

_WIDE = 100  # least columns of a terminal on which the bar is long
_TITLE = 24  # least columns that are kept for the title


class LiveLine:
    """Shows the progress of a job in one line on stderr; use it in a ``with`` statement.

    Args:
        title: name of the job.

    Attributes:
        is_live: True if stderr is a terminal, where the line is redrawn; otherwise only the lines of `say` are printed.
        title: name of the job.
    """

    def __init__(self, title: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn  # takes 30 ms, so only if it is needed

        self.title = title
        self._console = Console(stderr=True)
        self.is_live = self._console.is_terminal
        bar_width = 20 if self._console.width >= _WIDE else 10
        self._room = self._console.width - bar_width - len("  ")
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=bar_width),
            TextColumn("{task.fields[text]}", markup=False),
            console=self._console,
            transient=True,
            disable=not self.is_live,
        )
        description, text = fitted(title, ["starting processes"], self._room)
        self._task = self._progress.add_task(description, total=None, text=text)

    def __enter__(self) -> Self:
        if not self.is_live:
            self.say(f"{self.title}: starting")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line that stays, above the line with the progress."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def say_of_title(self, text: str) -> None:
        """Print a line that stays, with the title before the text; on a narrow terminal the title is shortened."""
        room = self._console.width - len(": ") if self.is_live else len(self.title) + len(text)
        self.say(": ".join(fitted(self.title, [text], room)))

    def update(self, parts: Sequence[str], **changes: Any) -> None:
        """Redraw the line with the progress; do nothing if stderr is not a terminal.

        Args:
            parts: texts to show, the most important first; those that do not fit are left out.
            changes: further arguments of `rich.progress.Progress.update`, such as ``completed``.
        """
        # Starts the thread that redraws; not earlier, because the job must be started by a process without threads.
        self._progress.start()
        description, text = fitted(self.title, parts, self._room)
        self._progress.update(self._task, description=description, text=text, **changes)


def fitted(title: str, parts: Sequence[str], room: int) -> tuple[str, str]:
    """Return the title and the joined parts, shortened so that both together have at most ``room`` columns.

    Args:
        title: the title; it is cut only if even the first part does not fit beside it.
        parts: texts, the most important first; the last ones are left out if they do not fit.
        room: number of columns.
    """
    kept = list(parts)
    while len(kept) > 1 and min(len(title), _TITLE) + len("  ".join(kept)) > room:
        kept.pop()
    text = _cut("  ".join(kept), room - min(len(title), _TITLE))
    return _cut(title, room - len(text)), text


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: max(0, room - 1)]}…"


_PIPED_WIDTH = 200


def stdout_console() -> Console:
    """Return a console on stdout; in a pipe or a file its lines are wide, so that `grep` finds complete rows."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_WIDTH
    return console


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))


def warn(sentence: str) -> None:
    """Print a warning on stderr; if stderr is not a terminal, the warning is one line."""
    console = Console(stderr=True)
    console.print(Text(f"warning: {sentence}", style="yellow"), soft_wrap=not console.is_terminal)


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
