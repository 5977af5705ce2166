"""Read the reports that rank 0 of a running job appends to `progress.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class ProgressReader:
    """Reads the complete lines that were added since the last read.

    Attributes:
        last: the last report of a step; if an evaluation was reported after it, with the evaluation's epoch and step.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.last: dict[str, Any] = {}

    def new_lines(self) -> list[dict[str, Any]]:
        """Return the new reports, oldest first; a line that is still being written is left for the next call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                text = file.read()
        except FileNotFoundError:
            return []
        whole, newline, _ = text.rpartition(b"\n")
        self._position += len(whole) + len(newline)
        reports: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        for report in reports:
            if "step" in report:
                self.last = report
            else:
                evaluated = report.get("evaluated", {})
                self.last = self.last | {key: evaluated[key] for key in ("epoch", "step") if key in evaluated}
        return reports
