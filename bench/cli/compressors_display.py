"""What `bench compressors` shows: whose turn it is while it measures, and the table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from bench.cli.console import print_json, stdout_console
from bench.core.compressors_config import CompressorsConfig
from bench.core.units import format_bytes
from bench.report.compressors_table import Row, compressors_table
from bench.report.tables import print_rich


class Turns:
    """The way through a measurement, on stderr: a live line on a terminal, one plain line elsewhere."""

    def __init__(self, config: CompressorsConfig) -> None:
        self._config = config
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
        title = f"{len(self._config.compressor_specs)} compressors x {self._config.repeats} turns"
        if not self._console.is_terminal:
            self._console.print(f"{title}: starting", highlight=False, soft_wrap=True)
        self._task = self._progress.add_task(title, total=self._config.num_turns, text="starting")
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, compressor: str) -> None:
        """A timed turn has ended."""
        if self._console.is_terminal and self._task is not None:
            # The thread that redraws starts here: after the process, which is best started without other threads.
            self._progress.start()
            self._progress.update(self._task, advance=1, text=compressor)


def print_rows(rows: Sequence[Row], config: CompressorsConfig, *, as_json: bool) -> None:
    """What was measured, on stdout."""
    if as_json:
        print_json(rows)
        return
    how = (
        f"{rows[0]['numel']:,} elements, {format_bytes(rows[0]['dense_bytes'])} in fp32; {config.device}, "
        f"threads: {config.threads}; medians of {config.repeats} turns, compressors alternating"
    )
    print_rich(compressors_table(rows, how), stdout_console())
