"""LiveLine: how far a job has come, on stderr: one line that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class LiveLine:
    """A context, in which the line is shown.

    Args:
        title: what is under way.

    Attributes:
        is_live: it is redrawn.
        title: as given.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._console = Console(stderr=True)
        self.is_live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            transient=True,
            disable=not self.is_live,
        )
        self._task = self._progress.add_task(title, total=None, text="starting processes")

    def __enter__(self) -> Self:
        if not self.is_live:
            self.say(f"{self.title}: starting")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def update(self, **changes: Any) -> None:
        """Redraw the line, with what `rich.progress.Progress.update` takes; nothing where it is not live."""
        # The thread that redraws starts here: after the job, which must be started by a process without threads.
        self._progress.start()
        self._progress.update(self._task, **changes)
