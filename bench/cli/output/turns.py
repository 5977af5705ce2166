"""Turns, which collects the rows of a measurement and shows its progress on stderr."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from bench.cli.output.live_line import LiveLine
from bench.core.errors import Interrupted
from bench.core.rows import RowWriter


class Turns(LiveLine):
    """Rows and progress of a measurement in which components take turns.

    Args:
        title: subject of the measurement.
        total: number of turns.
        describe: turns a worker's report of a turn into texts: (part of the measurement, turn).
        writer: appends the rows to a file; None: no file.

    Attributes:
        rows: rows measured so far, including values that are only shown and not written to the file.
    """

    def __init__(
        self, title: str, total: int, describe: Callable[[Any], tuple[str, str]], writer: RowWriter | None
    ) -> None:
        super().__init__(title)
        self.rows: list[dict[str, Any]] = []
        self._total, self._describe, self._writer = total, describe, writer
        self._part = ""

    @override
    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        error = raised[1]
        if isinstance(error, Interrupted):
            raise Interrupted(f"{error}; {self._kept()}") from None

    def _kept(self) -> str:
        """Return the end of a message about an interrupted measurement: what happens to its rows."""
        if not self.rows:
            return "no row was finished, so none is kept"
        return f"the rows so far are {'shown' if self._writer is None else f'kept in {self._writer.path}'}"

    def take(self, report: Mapping[str, Any]) -> None:
        """Handle a worker's report: keep its row, or show the turn that ended."""
        if "row" in report:
            self.rows.append({**report["row"], **report.get("extras", {})})
            if self._writer is not None:
                self._writer.append(report["row"])
            return
        part, turn = self._describe(report["turn"])
        self.update([f"{part}  {turn}".strip()], total=self._total, advance=1)
        if part != self._part and not self.is_live:
            self.say(f"measuring {part}")
        self._part = part
