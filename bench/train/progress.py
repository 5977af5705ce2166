"""Lines of progress for the launcher, which shows them and sees from them that the run is alive."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRESS_EVERY_S = 0.25


class Progress:
    """Write lines of progress, at most a few times per second.

    Args:
        path: the file; None on all ranks but the one that writes.

    Attributes:
        accuracy: accuracy at the last evaluation; None before the first.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a", encoding="utf-8") if path is not None else None
        self._reported_at = self._written_at = 0.0
        self._last_line: dict[str, Any] = {}
        self._samples = self._step = 0
        self._recent_exposed: list[float] = []
        self.accuracy: float | None = None

    def count_wait(self, exposed_s: float | None) -> None:
        """Take note of what one step waited for the exchange; None if unknown."""
        if exposed_s is not None and self._file is not None:
            self._recent_exposed.append(exposed_s)

    def report(
        self, *, step: int, total_steps: int, epoch: float, samples: int, loss: Callable[[], float | None]
    ) -> None:
        """Write where training is, unless the last line is too recent.

        Args:
            step: optimizer steps done.
            total_steps: optimizer steps of the whole run.
            epoch: finished epochs, including the fraction of the current one.
            samples: samples that all ranks together have used so far.
            loss: returns this rank's latest loss; slow on a GPU, which it waits for.
        """
        now = time.monotonic()
        if self._file is None or (now - self._reported_at < PROGRESS_EVERY_S and step < total_steps):
            return
        elapsed = now - self._reported_at if self._reported_at else None
        steps = max(1, step - self._step)
        self._last_line = {
            "step": step,
            "total_steps": total_steps,
            "epoch": round(epoch, 3),
            "loss": loss(),
            "accuracy": self.accuracy,
            "samples_per_s": (samples - self._samples) / elapsed if elapsed else None,
            "waiting_share": self._waiting_share(steps, elapsed),
            "eta_s": (total_steps - step) * elapsed / steps if elapsed else None,
        }
        self._write(self._last_line)
        self._reported_at, self._samples, self._step = now, samples, step
        self._recent_exposed = []

    def report_evaluation(self, row: dict[str, Any]) -> None:
        """Write the results of an evaluation."""
        self.accuracy = row["test_accuracy"]
        if self._last_line:
            self._last_line |= {"epoch": row["epoch"], "step": row["step"]}
        self._write({"evaluated": {name: row[name] for name in ("epoch", "step", "train_loss", "test_accuracy")}})

    def repeat(self) -> None:
        """Repeat the last line, so that the launcher sees a sign of life during an evaluation."""
        if self._last_line and time.monotonic() - self._written_at >= PROGRESS_EVERY_S:
            self._write(self._last_line)

    def _waiting_share(self, steps: int, elapsed_s: float | None) -> float | None:
        """Return the share of `elapsed_s` that this rank waited; None if unknown, or above 1 from too few readings."""
        if not elapsed_s or not self._recent_exposed:
            return None
        share = steps * statistics.fmean(self._recent_exposed) / elapsed_s
        return share if share <= 1.0 else None

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            self._written_at = time.monotonic()
