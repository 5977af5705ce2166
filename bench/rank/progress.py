"""Report a run's progress during training: to the launcher as lines of a file, and to a tracker if --track is given.

The trackers TensorBoard and MLflow get the numbers of every row of `metrics.csv`. Both write next to the run's own
files on this machine; nothing is sent over a network.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.core.config.run import RunConfig
from bench.core.run_folder import RunFolder
from bench.core.schema import METRICS

PROGRESS_EVERY_S = 0.25


class ProgressFile:
    """Writes a run's progress to a file, as one JSON object per line, at most a few times per second.

    Args:
        path: the file; None on ranks that do not write it.

    Attributes:
        last_row: the row of `metrics.csv` of the last evaluation; empty before the first evaluation.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a", encoding="utf-8") if path is not None else None
        self._reported_at = self._written_at = 0.0
        self._last_line: dict[str, Any] = {}
        self._samples = self._step = 0
        self._recent_exposed: list[float] = []
        self.last_row: dict[str, Any] = {}

    def count_wait(self, exposed_s: float | None) -> None:
        """Remember the seconds that one step waited for the exchange of gradients; None if they are unknown."""
        if exposed_s is not None and self._file is not None:
            self._recent_exposed.append(exposed_s)

    def report(
        self, *, step: int, total_steps: int, epoch: float, samples: int, loss: Callable[[], float | None]
    ) -> None:
        """Write a line of progress, if the last line is older than `PROGRESS_EVERY_S` or the run has done all steps.

        Args:
            step: optimizer steps done.
            total_steps: optimizer steps of the whole run.
            epoch: number of finished epochs, including the fraction of the current one.
            samples: number of samples that all ranks together have used so far.
            loss: returns this rank's latest loss, or None; called only for a line that is written, because reading a
                loss from a GPU waits for the GPU.
        """
        now = time.monotonic()
        if self._file is None or (now - self._reported_at < PROGRESS_EVERY_S and step < total_steps):
            return
        elapsed = now - self._reported_at if self._reported_at else None
        steps = max(1, step - self._step)
        waiting_share = None
        if elapsed and self._recent_exposed:
            waiting_share = steps * statistics.fmean(self._recent_exposed) / elapsed
        self._last_line = {
            "step": step,
            "total_steps": total_steps,
            "epoch": round(epoch, 3),
            "loss": loss(),
            "accuracy": self.last_row.get("test_accuracy"),
            "bits_per_byte": self.last_row.get("test_bits_per_byte"),
            "samples_per_s": (samples - self._samples) / elapsed if elapsed else None,
            # None if the share is above 1: too few waits were measured
            "waiting_share": waiting_share if waiting_share is None or waiting_share <= 1.0 else None,
            "eta_s": (total_steps - step) * elapsed / steps if elapsed else None,
        }
        self._write(self._last_line)
        self._reported_at, self._samples, self._step = now, samples, step
        self._recent_exposed = []

    def report_evaluation(self, row: dict[str, Any]) -> None:
        """Write a line with the results of an evaluation.

        Args:
            row: the evaluation's row of `metrics.csv`.
        """
        self.last_row = row
        if self._last_line:
            self._last_line |= {"epoch": row["epoch"], "step": row["step"]}
        names = ("epoch", "step", "train_loss", "test_accuracy", "test_bits_per_byte")
        self._write({"evaluated": {name: row[name] for name in names}})

    def repeat(self) -> None:
        """Write the last line again, so that the launcher sees during an evaluation that this rank is alive."""
        if self._last_line and time.monotonic() - self._written_at >= PROGRESS_EVERY_S:
            self._write(self._last_line)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            self._written_at = time.monotonic()


_NUMBERS = [
    column.name for column in METRICS if column.type in (int, float) and column.group not in ("identity", "origin")
]


def open_tracker(config: RunConfig, folder: RunFolder, step: int = 0) -> _TensorBoard | _MLflow | None:
    """Return the tracker that the configuration names; None if the configuration names no tracker.

    Only the rank that writes rows may call this function. The tracker's method `row` adds one row of `metrics.csv`, and
    `close` marks the run as finished.

    Args:
        config: the run's configuration.
        folder: the run's folder.
        step: the optimizer step from which the run resumes; 0 for a new run. TensorBoard replaces the values of later
            steps; MLflow keeps them, because it cannot replace values.
    """
    match config.track:
        case "tensorboard":
            return _TensorBoard(folder, step)
        case "mlflow":
            return _MLflow(config, folder)
        case _:
            return None


class _TensorBoard:
    def __init__(self, folder: RunFolder, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=step + 1)
        self.close = self._writer.close

    def row(self, row: Mapping[str, Any]) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"], walltime=None)
        self._writer.flush()


class _MLflow:
    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=f"sqlite:///{folder.path.parent.absolute() / 'mlflow.db'}")
        found = self._client.get_experiment_by_name("gradwire")
        experiment = found.experiment_id if found else self._client.create_experiment("gradwire")
        begun = self._client.search_runs([experiment], f"attributes.run_name = '{folder.run_id}'")
        run = begun[0] if begun else self._client.create_run(experiment, run_name=folder.run_id)
        self._run: str = run.info.run_id
        if not begun:
            for name, value in config.columns().items():
                if value is not None:
                    self._client.log_param(self._run, name, value)
        shown = (metric.step for metric in self._client.get_metric_history(self._run, "step"))
        self._shown_until = max(shown, default=0)

    def row(self, row: Mapping[str, Any]) -> None:
        if row["step"] <= self._shown_until:
            return  # written before the run was stopped; MLflow cannot replace values
        for name, value in _numbers(row).items():
            self._client.log_metric(self._run, name, value, step=row["step"])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(row[name]) for name in _NUMBERS if row.get(name) is not None}
