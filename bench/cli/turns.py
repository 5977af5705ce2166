"""What a measurement in turns reports: rows that are kept, and whose turn it was, shown on stderr."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from bench.core.rows import RowWriter


class Turns:
    """The way through a measurement: a live line on a terminal, one plain line per part elsewhere.

    Args:
        title: what is measured.
        total: number of turns.
        describe: (part of the measurement, turn) in words, of what a worker reports as its turn.
        writer: of the file that rows are appended to; None: they are only kept.

    Attributes:
        rows: those that were measured so far, with what only people are shown.
    """

    def __init__(
        self, title: str, total: int, describe: Callable[[Any], tuple[str, str]], writer: RowWriter | None
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._title, self._total, self._describe, self._writer = title, total, describe, writer
        self._part = ""
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if not self._console.is_terminal:
            self._console.print(f"{self._title}: starting", highlight=False, soft_wrap=True)
        self._task = self._progress.add_task(self._title, total=self._total, text="starting processes")
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def take(self, report: Mapping[str, Any]) -> None:
        """Keep a row, or show that a turn has ended."""
        if "row" in report:
            self.rows.append({**report["row"], **report.get("extras", {})})
            if self._writer is not None:
                self._writer.append(report["row"])
            return
        part, turn = self._describe(report["turn"])
        if self._console.is_terminal and self._task is not None:
            # The thread that redraws starts here: after the job, which must be started by a process without threads.
            self._progress.start()
            self._progress.update(self._task, advance=1, text=f"{part}  {turn}".strip())
        elif part != self._part:
            self._console.print(f"measuring {part}", highlight=False, soft_wrap=True)
        self._part = part
