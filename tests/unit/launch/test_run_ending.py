"""Runs that end badly: without output for too long, or never started."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.core.config.run import RunConfig
from bench.core.errors import RunFailed, UsageError
from bench.core.rows import RowWriter
from bench.core.run_folder import RunFolder, read_json, write_json
from bench.launch import run
from bench.launch.jobs import torchrun
from bench.launch.jobs.failure import record_ending
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.jobs.torchrun import Ending
from bench.launch.plan import plan
from tests.testing.checkpoints import add_checkpoint
from tests.testing.configs import make_config
from tests.testing.invoke import rows, status

REPORT = {"rank": 0, "time": 1.0, "message": "rank 1 is late", "type": "TransportError", "lost_a_peer": True}


@pytest.mark.parametrize(
    ("report", "ending", "sentence"),
    [
        (REPORT, "failed", "rank 0: rank 1 is late"),
        (None, "timeout", "no step ended within 7 s; raise --timeout if the link is that slow"),
    ],
    ids=["a rank knew", "nobody knew"],
)
def test_a_silent_run_is_explained(
    report: dict[str, Any] | None, ending: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(_config: object, folder: RunFolder, _server: object) -> None:
        if report:
            write_json(folder.errors / "rank-0.json", report)

    monkeypatch.setattr(torchrun, "launch", launch)
    monkeypatch.setattr(torchrun, "watch", lambda *_: Ending(exit_code=1, silent_s=7.0))
    result = run.execute(make_config(), tmp_path, lambda _: None, ForkServer(TRAIN))
    assert (result.status, result.error) == (ending, sentence)


@pytest.mark.parametrize(
    ("node_rank", "was_heard", "sentence"),
    [
        (0, False, "the 2 machines did not meet at h:29500 within 7 s; start the same command on each of them, or "
         "raise --timeout"),
        (1, False, "the 2 machines did not meet at h:29500 within 7 s; start the same command on each of them, or "
         "raise --timeout"),
        (0, True, "no step ended within 7 s; raise --timeout if the link is that slow"),
        (1, True, "machine 0 has not answered for 7 s, and a rank here did not end by itself"),
    ],
)  # fmt: skip
def test_machines_that_do_not_meet_or_lose_each_other_say_so(
    node_rank: int, was_heard: bool, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "check_port", lambda _: None)
    monkeypatch.setattr(torchrun, "launch", lambda *_: None)
    monkeypatch.setattr(torchrun, "watch", lambda *_: Ending(exit_code=1, silent_s=7.0, was_heard=was_heard))
    config = make_config(nnodes=2, node_rank=node_rank, rdzv_endpoint="h:29500")
    result = run.execute(config, tmp_path, lambda _: None, ForkServer(TRAIN))
    assert (result.status, result.error) == ("timeout", sentence)


def refuse_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object) -> None:
        raise error

    monkeypatch.setattr(torchrun, "launch", launch)


def test_a_run_that_is_not_possible_here_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_with(UsageError("no netem here"), monkeypatch)
    with pytest.raises(UsageError, match="no netem here"):
        run.execute(make_config(), tmp_path, lambda _: None, ForkServer(TRAIN))
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_fails_is_a_failed_run_with_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_with(RunFailed("tc said no"), monkeypatch)
    result = run.execute(make_config(), tmp_path, lambda _: None, ForkServer(TRAIN))
    assert (result.status, result.error) == ("failed", "tc said no")
    assert rows(result.folder.path)[-1]["error"] == "tc said no"
    assert status(result.folder.path)["status"] == "failed"


OWN_ERROR = {"rank": 1, "time": 1.0, "message": "ValueError: broken", "type": "ValueError", "lost_a_peer": False}


@pytest.mark.parametrize(
    ("report", "max_restarts", "num_losses", "ending"),
    [
        (REPORT, 2, 2, ("ok", [0, 1, 2])),
        (None, 2, 2, ("ok", [0, 1, 2])),
        (REPORT, 1, 2, ("failed", [0, 1])),
        (REPORT, 0, 1, ("failed", [0])),
        (OWN_ERROR, 2, 1, ("failed", [0])),
    ],
    ids=["a rank knew", "nobody knew", "too often", "not asked for", "an error of its own"],
)
def test_a_job_that_lost_a_rank_is_started_again_as_often_as_it_may(
    report: dict[str, Any] | None,
    max_restarts: int,
    num_losses: int,
    ending: tuple[str, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[int] = []

    def launch(_config: object, folder: RunFolder, _server: object) -> None:
        assert not list(folder.errors.iterdir())
        assert not folder.status.exists()
        started.append((read_json(folder.resume) or {"resumes": 0})["resumes"])
        if len(started) <= num_losses and report:
            write_json(folder.errors / "rank-0.json", report)

    monkeypatch.setattr(torchrun, "launch", launch)
    monkeypatch.setattr(torchrun, "watch", lambda *_: Ending(exit_code=int(len(started) <= num_losses)))
    config = make_config(checkpoint_every=1, max_restarts=max_restarts)
    result = run.execute(config, tmp_path, lambda _: None, ForkServer(TRAIN))
    assert (result.status, started) == ending
    kind = "ValueError" if report == OWN_ERROR else None
    assert (result.summary.get("error_kind"), status(result.folder.path).get("error_kind")) == (kind, kind)


def test_a_network_that_fails_when_it_is_made_anew_is_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def launch(_config: object, folder: RunFolder, _server: object) -> None:
        started.append(len(started))
        if len(started) == 2:
            raise RunFailed("the supervisor of the virtual hosts was killed by SIGKILL")

    monkeypatch.setattr(torchrun, "launch", launch)
    monkeypatch.setattr(torchrun, "watch", lambda *_: Ending(exit_code=int(len(started) == 1)))
    config = make_config(checkpoint_every=1, max_restarts=2)
    assert run.execute(config, tmp_path, lambda _: None, ForkServer(TRAIN)).status == "ok"
    assert started == [0, 1, 2]


def test_a_full_disk_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(torchrun, "launch", lambda *asked: started.append(asked))
    monkeypatch.setattr(torchrun, "watch", lambda *_: Ending(exit_code=1))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    config = make_config(checkpoint_every=1, max_restarts=2)
    result = run.execute(config, tmp_path, lambda _: None, ForkServer(TRAIN))
    assert ("is full" in result.error, len(started)) == (True, 1)


@pytest.mark.parametrize("silent_s", [None, 7.0])
def test_who_is_lost_when_all_is_done_takes_nothing_along(
    silent_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(_config: object, folder: RunFolder, _server: object) -> None:
        write_json(folder.status, {"status": "ok", "error": "", "test_accuracy": 0.5})

    monkeypatch.setattr(torchrun, "launch", launch)
    monkeypatch.setattr(torchrun, "watch", lambda *_: Ending(exit_code=1, silent_s=silent_s))
    result = run.execute(make_config(), tmp_path, lambda _: None, ForkServer(TRAIN))
    assert (result.status, result.summary["test_accuracy"]) == ("ok", 0.5)
    assert status(result.folder.path)["status"] == "ok"


def test_who_is_lost_again_before_it_begins_had_come_as_far_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(_config: object, folder: RunFolder, _server: object) -> None:
        if not folder.metrics.exists():
            RowWriter(folder.metrics).append({"run_id": folder.run_id, "epoch": 2.0, "step": 40})

    monkeypatch.setattr(torchrun, "launch", launch)
    monkeypatch.setattr(torchrun, "watch", lambda *_: Ending(exit_code=1))
    config = make_config(checkpoint_every=1, max_restarts=1)
    result = run.execute(config, tmp_path, lambda _: None, ForkServer(TRAIN))
    assert (result.status, result.summary["step"], result.summary["epoch"]) == ("failed", 40, 2.0)


def test_a_run_that_cannot_go_on_here_is_still_one_that_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(checkpoint_every=1)
    folder = RunFolder.create(tmp_path, "test", config.digest, 1)
    add_checkpoint(folder, config, step=1)
    write_json(folder.status, {"status": "interrupted", "step": 3})
    refuse_with(UsageError("no netem here"), monkeypatch)
    patient = dataclasses.replace(config, timeout_s=77.0)
    with pytest.raises(UsageError, match="no netem here"):
        run.resume(folder, lambda _: None, ForkServer(TRAIN), patient)
    assert run.configuration_of(folder) == patient
    assert (status(folder.path)["status"], status(folder.path)["error"]) == ("interrupted", "no netem here")
    assert [row["resumes"] for row in rows(folder.path)] == ["1"]


@pytest.mark.parametrize(
    ("length", "warned"), [({"steps": 7}, True), ({"steps": 7, "eval_every": 2}, False), ({"epochs": 7}, False)]
)
def test_a_target_that_is_looked_at_once_is_told_of(length: dict[str, int], warned: bool) -> None:
    config = plan(RunConfig(dataset="digits", target_accuracy=0.9, **length))
    assert any("does not measure the time to the target; add" in note for note in config.notes) == warned


def test_a_whole_number_of_epochs_is_the_same_however_it_is_written() -> None:
    assert RunConfig(eval_every=1.0).digest == RunConfig(eval_every=1).digest
    assert str(RunConfig(eval_every=1.0).columns()["eval_every"]) == "1"


@pytest.mark.parametrize(("length", "warned"), [({"steps": 7}, True), ({"epochs": 7}, True), ({"epochs": 8}, False)])
def test_checkpoints_that_never_come_are_told_of(length: dict[str, int], warned: bool) -> None:
    config = plan(RunConfig(dataset="digits", checkpoint_every=7, **length))
    sentence = "--checkpoint-every 7 makes no checkpoint in a run of 7"
    assert any(sentence in note for note in config.notes) == warned


@pytest.mark.parametrize(("steps", "warned"), [(9, True), (10, False)])
def test_a_profile_that_leaves_no_step_to_be_timed_is_told_of(steps: int, warned: bool) -> None:
    config = plan(RunConfig(dataset="digits", steps=steps, profile=5))  # three steps warm up, and one the profiler
    assert any("--profile 5 leaves none of 9 steps" in note for note in config.notes) == warned


def test_when_bench_itself_ends_its_run_has_a_last_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(*_: object) -> Ending:
        raise SystemExit(1)  # as rich does if its output is closed

    monkeypatch.setattr(torchrun, "launch", lambda *_: object())
    monkeypatch.setattr(torchrun, "watch", watch)
    with pytest.raises(SystemExit):
        run.execute(make_config(), tmp_path, lambda _: None, ForkServer(TRAIN))
    (folder,) = tmp_path.iterdir()
    assert (status(folder)["status"], rows(folder)[-1]["status"]) == ("interrupted", "interrupted")
    assert "bench itself ended with SystemExit" in status(folder)["error"]


def test_a_run_that_ended_well_did_so_whoever_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(_config: object, folder: RunFolder, _server: object) -> object:
        write_json(folder.status, {"status": "ok", "error": "", "test_accuracy": 0.5})
        return object()

    def watch(*_: object) -> Ending:
        raise SystemExit(1)

    monkeypatch.setattr(torchrun, "launch", launch)
    monkeypatch.setattr(torchrun, "watch", watch)
    with pytest.raises(SystemExit):
        run.execute(make_config(), tmp_path, lambda _: None, ForkServer(TRAIN))
    (folder,) = tmp_path.iterdir()
    assert status(folder)["status"] == "ok"


def test_how_a_run_ended_is_kept_though_its_row_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(_config: object, folder: RunFolder, _server: object) -> None:
        folder.metrics.write_text("columns,of,another,version\n1,2,3,4\n", encoding="utf-8")

    monkeypatch.setattr(torchrun, "launch", launch)
    monkeypatch.setattr(torchrun, "watch", lambda *_: Ending(exit_code=1))
    result = run.execute(make_config(), tmp_path, lambda _: None, ForkServer(TRAIN))
    assert "(this last row could not be written)" in result.error
    assert status(result.folder.path)["status"] == "failed"


@pytest.mark.parametrize(("resumes", "wall_time_s"), [(1, 3600.0), (0, 3620.0)], ids=["of this time", "before"])
def test_what_went_before_counts_in_a_last_row(resumes: int, wall_time_s: float, tmp_path: Path) -> None:
    config = make_config()
    folder = RunFolder.create(tmp_path, "test", config.digest, 1)
    write_json(folder.resume, {"resumes": 1})
    RowWriter(folder.metrics).append({"run_id": folder.run_id, "step": 1, "wall_time_s": 3600.0, "resumes": resumes})
    record_ending(config, folder, "failed", "rank 1 was killed", 20.0)
    assert float(rows(folder.path)[-1]["wall_time_s"]) == wall_time_s
