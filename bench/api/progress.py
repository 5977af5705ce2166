"""Print progress, notes and warnings on stderr."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Self

from rich.console import Console
from rich.text import Text

from bench.core.config.run import RunConfig
from bench.core.units import format_seconds
from bench.core.waiting import waiting
from bench.report.quality import quality_of

_WIDE = 100  # the bar is long if the terminal has at least this many columns
_TITLE = 24  # at least this many columns are kept for the title


class LiveLine:
    """Shows the progress of a job in one line on stderr; use it in a ``with`` statement.

    Args:
        title: name of the job.
        quiet: print nothing.

    Attributes:
        is_live: True if stderr is a terminal, on which the line is redrawn. If False, only the lines of `say` are
            printed.
        title: name of the job.
    """

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        from rich.progress import BarColumn, Progress, TextColumn  # takes 30 ms, so only if it is needed

        self.title = title
        self._console = _stderr(quiet=quiet)
        self.is_live = self._console.is_terminal and not quiet
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
        waiting.end()
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
        # Start the thread that redraws only now, because a process without threads must start the job.
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


# For each key of a progress report, a function that formats its value; the most important key first.
_PROGRESS: dict[str, Callable[[float], str]] = {
    "eta_s": lambda value: f"{format_seconds(value)} left",
    "epoch": "epoch {:.1f}".format,
    "accuracy": "accuracy {:.1%}".format,
    "bits_per_byte": "bits per byte {:.2f}".format,  # in place of the accuracy
    "loss": "loss {:.3f}".format,
    "samples_per_s": "{:,.0f} samples/s".format,
    "waiting_share": "waiting {:.0%}".format,
}


class Display(LiveLine):
    """A line on stderr that shows the progress of one run."""

    def report(self, line: dict[str, Any]) -> None:
        """Show one report of rank 0: the results of an evaluation, or the progress of the training."""
        if "evaluated" in line:
            row = line["evaluated"]
            quality = quality_of([row])
            self.say_of_title(
                f"epoch {row['epoch']:.4g}  step {row['step']}  loss {row['train_loss']:.4f}  "
                f"{quality.noun} {quality.format(row[quality.column])}"
            )
        else:
            hidden = "accuracy" if line.get("bits_per_byte") is not None else ""
            known = [
                text(line[name]) for name, text in _PROGRESS.items() if line.get(name) is not None and name != hidden
            ]
            self.update(known, total=line["total_steps"], completed=line["step"])


def print_notes(configs: Sequence[RunConfig]) -> None:
    """Print on stderr the notes that these configurations contain for the user; equal notes are printed only once."""
    for sentence in dict.fromkeys(note for config in configs for note in config.notes):
        print(f"note: {sentence}", file=sys.stderr)


def warn(sentence: str) -> None:
    """Print a warning on stderr; if stderr is not a terminal, the warning is one line."""
    console = _stderr()
    console.print(Text(f"warning: {sentence}", style="yellow"), soft_wrap=not console.is_terminal)


def _stderr(*, quiet: bool = False) -> Console:
    # In Jupyter, stderr claims to be a terminal; print plain lines there too.
    force_terminal = False if Console().is_jupyter else None
    return Console(stderr=True, quiet=quiet, force_jupyter=False, force_terminal=force_terminal)
