"""Rows in TensorBoard and MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.core.errors import UsageError
from bench.core.run_folder import RunFolder
from bench.launch.plan import check
from bench.rank.progress import open_tracker
from tests.testing.configs import make_config

ROWS: list[dict[str, Any]] = [
    {"run_id": "r", "step": 5, "status": "running", "test_accuracy": 0.5, "payload_bytes_per_step": 8.0, "seed": 1},
    {"run_id": "r", "step": 9, "status": "ok", "test_accuracy": 0.75, "payload_bytes_per_step": None, "seed": 1},
]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "test", "0123456789", 1)


def test_a_run_has_no_tracker_unless_it_asks_for_one(folder: RunFolder) -> None:
    assert open_tracker(make_config(), folder) is None


def test_tensorboard_shows_the_measured_numbers_at_their_steps(folder: RunFolder) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = open_tracker(make_config(track="tensorboard"), folder)
    assert tracker is not None
    for row in ROWS:
        tracker.row(row)
    tracker.close()
    events = accumulator.EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["payload_bytes_per_step", "step", "test_accuracy"]
    assert [(event.step, event.value) for event in events.Scalars("test_accuracy")] == [(5, 0.5), (9, 0.75)]
    assert [(event.step, event.value) for event in events.Scalars("payload_bytes_per_step")] == [(5, 8.0)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from its own libraries
def test_mlflow_has_the_run_with_its_options_in_a_local_store(folder: RunFolder) -> None:
    mlflow = pytest.importorskip("mlflow")
    config = make_config(track="mlflow")
    tracker = open_tracker(config, folder)
    assert tracker is not None
    for row in ROWS:
        tracker.row(row)
    tracker.close()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder.path.parent / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("gradwire").experiment_id])
    assert (run.info.run_name, run.info.status) == (folder.run_id, "FINISHED")
    assert run.data.params["compressor"] == config.compressor
    history = client.get_metric_history(run.info.run_id, "test_accuracy")
    assert [(metric.step, metric.value) for metric in history] == [(5, 0.5), (9, 0.75)]


def show(track: str, folder: RunFolder, rows: list[dict[str, Any]], after: int = 0) -> None:
    tracker = open_tracker(make_config(track=track), folder, after)
    assert tracker is not None
    for row in rows:
        tracker.row(row)
    tracker.close()


def test_a_run_that_goes_on_from_a_checkpoint_shows_each_step_once_in_tensorboard(folder: RunFolder) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    show("tensorboard", folder, ROWS)
    show("tensorboard", folder, ROWS[1:], after=7)
    events = accumulator.EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("test_accuracy")] == [(5, 0.5), (9, 0.75)]


def test_a_run_that_begins_again_before_its_first_checkpoint_shows_each_step_once_in_tensorboard(
    folder: RunFolder,
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    show("tensorboard", folder, ROWS[:1])
    show("tensorboard", folder, ROWS)
    events = accumulator.EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("test_accuracy")] == [(5, 0.5), (9, 0.75)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from its own libraries
def test_a_run_that_goes_on_from_a_checkpoint_is_one_run_in_mlflow(folder: RunFolder) -> None:
    mlflow = pytest.importorskip("mlflow")
    show("mlflow", folder, ROWS)
    show("mlflow", folder, [*ROWS[1:], ROWS[1] | {"step": 12}], after=7)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder.path.parent / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("gradwire").experiment_id])
    history = client.get_metric_history(run.info.run_id, "test_accuracy")
    assert [metric.step for metric in history] == [5, 9, 12]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from its own libraries
def test_a_run_that_begins_again_before_its_first_checkpoint_is_one_run_in_mlflow(folder: RunFolder) -> None:
    mlflow = pytest.importorskip("mlflow")
    show("mlflow", folder, ROWS[:1])
    show("mlflow", folder, ROWS)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder.path.parent / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("gradwire").experiment_id])
    history = client.get_metric_history(run.info.run_id, "test_accuracy")
    assert [metric.step for metric in history] == [5, 9]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"\(pip install 'gradwire\[mlflow\]'\)"):
        check(make_config(track="mlflow"))
