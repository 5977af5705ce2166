"""What `bench collectives` shows: whose turn it is while it measures, and the table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from bench.cli.console import print_json, stdout_console
from bench.core.collectives_config import CollectivesConfig
from bench.core.units import format_bytes
from bench.hosts.cluster import Cluster
from bench.report.collectives_table import Row, collectives_table, with_ratios
from bench.report.tables import print_rich


class Turns:
    """The way through a sweep, on stderr: a live line on a terminal, one plain line per size elsewhere."""

    def __init__(self, config: CollectivesConfig) -> None:
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
        self._size = 0

    def __enter__(self) -> Self:
        pairs, sizes, n = len(self._config.pairs), len(self._config.sizes_bytes), self._config.world_size
        title = f"{n} ranks, {sizes} sizes x {pairs} pairs x {self._config.rounds} rounds"
        if not self._console.is_terminal:
            self._console.print(f"{title}: starting", highlight=False, soft_wrap=True)
        self._task = self._progress.add_task(title, total=self._config.num_turns, text="starting processes")
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.stop()

    def show(self, turn: tuple[str, str, int]) -> None:
        """A turn has ended."""
        collective, compressor, size = turn
        if self._console.is_terminal and self._task is not None:
            # The thread that redraws starts here: after the job, which must be started by a process without threads.
            self._progress.start()
            self._progress.update(self._task, advance=1, text=f"{format_bytes(size)}  {compressor} on {collective}")
        elif size != self._size:
            self._console.print(f"measuring {format_bytes(size)}", highlight=False, soft_wrap=True)
        self._size = size

    def stop(self) -> None:
        """Clear the live line, so that what follows stands alone."""
        self._progress.stop()


def print_rows(rows: Sequence[Row], config: CollectivesConfig, *, as_json: bool) -> None:
    """What was measured, on stdout."""
    compared = with_ratios(rows)
    if as_json:
        print_json(compared)
    elif rows:
        how = (
            f"{config.rounds} rounds of {config.iters} sums, pairs taking turns; {config.device}, "
            f"{config.threads} threads per rank; slowest rank's time, median over rounds"
        )
        if config.cluster is not None:
            how += "; " + "; ".join(Cluster.from_dict(config.cluster).describe())
        print_rich(collectives_table(compared, how), stdout_console())
