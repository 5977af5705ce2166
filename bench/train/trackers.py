"""Trackers: write the numbers of every row for TensorBoard or MLflow as well, if the user asks for it.

Both write next to the run's own files on this machine; nothing is sent over a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from bench.core.config.run import RunConfig
from bench.core.run_folder import RunFolder
from bench.core.schema.metrics import METRICS

_NUMBERS = [
    column.name for column in METRICS if column.type in (int, float) and column.group not in ("identity", "origin")
]


class Tracker(Protocol):
    """A tool that also shows the run's rows."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Add one row of `metrics.csv`."""

    def close(self) -> None:
        """Mark the run as finished."""


def open_tracker(config: RunConfig, folder: RunFolder, step: int = 0) -> Tracker | None:
    """Return the tracker that the configuration names, or None; call only on the rank that writes rows.

    Args:
        config: the run's configuration.
        folder: the run's folder.
        step: the step from which the run resumes, or 0. TensorBoard replaces what it has of later steps; MLflow keeps
            it, because it cannot replace values.
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

    def row(self, row: Mapping[str, Any]) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"], walltime=None)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _MLflow:
    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=f"sqlite:///{folder.path.parent.absolute() / 'mlflow.db'}")
        found = self._client.get_experiment_by_name("gradwire")
        experiment = found.experiment_id if found else self._client.create_experiment("gradwire")
        begun = self._client.search_runs([experiment], f"attributes.run_name = '{folder.run_id}'")
        self._run: str = begun[0].info.run_id if begun else self._begin(experiment, config, folder)
        shown = self._client.get_metric_history(self._run, "step") if begun else []
        self._shown_until = max((metric.step for metric in shown), default=0)

    def _begin(self, experiment: str, config: RunConfig, folder: RunFolder) -> str:
        run: str = self._client.create_run(experiment, run_name=folder.run_id).info.run_id
        for name, value in config.columns().items():
            if value is not None:
                self._client.log_param(run, name, value)
        return run

    def row(self, row: Mapping[str, Any]) -> None:
        if row["step"] <= self._shown_until:
            return  # written before the run was stopped; MLflow cannot replace values
        for name, value in _numbers(row).items():
            self._client.log_metric(self._run, name, value, step=row["step"])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the row's measured numbers by column name."""
    return {name: float(row[name]) for name in _NUMBERS if row.get(name) is not None}
