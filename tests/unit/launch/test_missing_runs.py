"""Runs in a folder: finished runs are recognised, and each missing run is made once."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from bench.core.checkpoints import Checkpoints
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.core.files import locked
from bench.core.run_folder import RunFolder, write_json
from bench.launch.sweep_state import PastRun, by_digest, past_runs, run_missing
from tests.testing.checkpoints import add_checkpoint
from tests.testing.configs import make_config

CONFIGS = [make_config(seed=seed) for seed in (1, 2, 3)]


def begin(out: Path, config: RunConfig, status: str | None = None) -> RunFolder:
    folder = RunFolder.create(out, config.name, config.digest, config.seed)
    if status:
        write_json(folder.status, {"status": status, "error": ""})
    return folder


class Training:
    """A replacement for training that records its calls."""

    def __init__(self, out: Path, status: str = "ok") -> None:
        self.out, self.status = out, status
        self.trained: list[int] = []
        self.begun: list[Path | None] = []

    def __call__(self, config: RunConfig, begun: RunFolder | None) -> None:
        self.trained.append(config.seed)
        self.begun.append(begun and begun.path)
        time.sleep(0.02)
        begin(self.out, config, self.status)


def seen(out: Path) -> dict[str, PastRun]:
    return by_digest(past_runs(out))


@pytest.mark.parametrize(
    ("status", "state"),
    [("ok", "done"), ("failed", "failed"), ("timeout", "failed"), ("interrupted", "torn"), (None, "torn")],
)
def test_states(status: str | None, state: str, tmp_path: Path) -> None:
    begin(tmp_path, CONFIGS[0], status)
    assert [run.state for run in past_runs(tmp_path, CONFIGS[0].digest)] == [state]
    assert past_runs(tmp_path, CONFIGS[1].digest) == []


def test_a_run_that_is_done_stands_for_its_digest_and_foreign_folders_for_none(tmp_path: Path) -> None:
    done = begin(tmp_path, CONFIGS[0], "ok")
    begin(tmp_path, CONFIGS[0], "failed")
    begin(tmp_path, CONFIGS[0])
    (tmp_path / "notes-s1-of-mine").mkdir()
    assert {digest: run.folder.path for digest, run in seen(tmp_path).items()} == {CONFIGS[0].digest: done.path}


def test_what_is_missing_is_done_and_what_is_torn_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = begin(tmp_path, CONFIGS[1])
    torn.metrics.touch()
    training = Training(tmp_path)
    run_missing(CONFIGS, tmp_path, seen(tmp_path), training)
    assert training.trained == [1, 2, 3]
    assert not torn.metrics.exists()  # the new run's folder may have the same name
    assert f"{torn.path} was cut short" in capsys.readouterr().err
    assert {run.state for run in past_runs(tmp_path)} == {"done"}


def test_a_run_that_failed_goes_on_from_its_checkpoint_when_it_is_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(checkpoint_every=1)
    torn, failed = begin(tmp_path, config), begin(tmp_path, config, "failed")
    add_checkpoint(failed, config, step=7)
    torn.metrics.touch()
    training = Training(tmp_path)
    run_missing([config], tmp_path, seen(tmp_path), training)
    assert training.begun == [failed.path]
    assert f"{failed.path} failed; it is resumed from step 7" in capsys.readouterr().err
    assert not torn.metrics.exists()  # the other run's folder may have the same name


def test_a_torn_run_with_a_checkpoint_goes_on_and_an_older_one_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = begin(tmp_path, CONFIGS[1]), begin(tmp_path, CONFIGS[1], "interrupted")
    for folder in (older, newer):
        add_checkpoint(folder, CONFIGS[1], step=7)
    training = Training(tmp_path)
    run_missing(CONFIGS, tmp_path, seen(tmp_path), training)
    assert training.begun == [None, newer.path, None]
    assert not older.config.exists()
    assert f"{newer.path} was cut short; it is resumed from step 7" in capsys.readouterr().err


def test_what_is_still_under_way_is_not_removed(tmp_path: Path) -> None:
    under_way = begin(tmp_path, CONFIGS[0])
    with locked(under_way.path):
        run_missing(CONFIGS, tmp_path, seen(tmp_path), Training(tmp_path))
    assert under_way.path.exists()


def test_what_somebody_else_has_done_since_is_not_done_again(tmp_path: Path) -> None:
    before = seen(tmp_path)
    begin(tmp_path, CONFIGS[0], "ok")
    begin(tmp_path, CONFIGS[1], "failed")
    training = Training(tmp_path)
    run_missing(CONFIGS, tmp_path, before, training)
    assert training.trained == [3]


def test_what_was_under_way_and_has_ended_since_is_not_done_again(tmp_path: Path) -> None:
    under_way = begin(tmp_path, CONFIGS[0])
    before = seen(tmp_path)
    write_json(under_way.status, {"status": "ok", "error": ""})
    training = Training(tmp_path)
    run_missing(CONFIGS[:1], tmp_path, before, training)
    assert training.trained == []


def test_a_failed_run_is_tried_again_once(tmp_path: Path) -> None:
    begin(tmp_path, CONFIGS[0], "failed")
    before = seen(tmp_path)
    training = Training(tmp_path, status="failed")
    for _ in range(2):  # the second iteration is a sweep that was started at the same time
        run_missing(CONFIGS[:1], tmp_path, before, training)
    assert training.trained == [1]


def test_two_at_once_do_nothing_twice_and_end_when_all_is_done(tmp_path: Path) -> None:
    configs = [make_config(seed=seed) for seed in range(12)]
    trainings = [Training(tmp_path), Training(tmp_path)]
    left: list[int] = []

    def work(training: Training) -> None:
        run_missing(configs, tmp_path, {}, training)
        left.append(len(configs) - len(seen(tmp_path)))

    threads = [threading.Thread(target=work, args=(training,)) for training in trainings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(trainings[0].trained + trainings[1].trained) == list(range(12))
    assert all(training.trained for training in trainings)
    assert left == [0, 0]


def test_the_lock_of_one_that_ended_is_free(tmp_path: Path) -> None:
    def broken(config: RunConfig, begun: RunFolder | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_missing(CONFIGS, tmp_path, {}, broken)
    training = Training(tmp_path)
    run_missing(CONFIGS, tmp_path, {}, training)
    assert training.trained == [1, 2, 3]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write results to .*; choose another folder with --out"):
        run_missing(CONFIGS, tmp_path / "file", {}, Training(tmp_path))


def test_what_another_version_would_go_on_from_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torn = begin(tmp_path, CONFIGS[0])
    add_checkpoint(torn, CONFIGS[0], step=1)
    text = torn.config.read_text(encoding="utf-8")
    torn.config.write_text(text.replace('"seed"', '"seed_of_another_version"'), encoding="utf-8")
    training = Training(tmp_path)
    run_missing(CONFIGS[:1], tmp_path, seen(tmp_path), training)
    assert training.begun == [None]
    assert Checkpoints(torn).steps() == [1]
    assert "its folder is kept" in capsys.readouterr().err


def test_a_run_that_went_on_with_other_ranks_is_another_one(tmp_path: Path) -> None:
    other = begin(tmp_path, CONFIGS[0], "ok")
    write_json(other.resume, {"resumes": 1, "digest_before": CONFIGS[0].digest})
    training = Training(tmp_path)
    run_missing(CONFIGS[:1], tmp_path, seen(tmp_path), training)
    assert (training.trained, training.begun) == ([1], [None])
    assert other.status.exists()


def test_a_failed_run_that_went_on_since_and_failed_again_is_not_done_a_third_time(tmp_path: Path) -> None:
    failed = begin(tmp_path, CONFIGS[0], "failed")
    before = seen(tmp_path)
    write_json(failed.resume, {"resumes": 1})
    training = Training(tmp_path)
    run_missing(CONFIGS[:1], tmp_path, before, training)
    assert training.trained == []
