"""Checkpoints on the disk: complete or absent, and refused in one sentence if training cannot continue from them."""

from __future__ import annotations

import errno
import json
import operator
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.core.checkpoints import Checkpoints, Manifest, cut_rows, row_bytes
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.core.run_folder import RunFolder
from tests.testing.checkpoints import content
from tests.testing.configs import make_config


@pytest.fixture
def config() -> RunConfig:
    return make_config(checkpoint_every=1)


@pytest.fixture
def folder(tmp_path: Path, config: RunConfig) -> RunFolder:
    folder = RunFolder.create(tmp_path, "test", config.digest, 1)
    folder.metrics.write_text("step\n1\n")
    return folder


def make(folder: RunFolder, config: RunConfig, step: int) -> Manifest:
    """Write a checkpoint of two ranks."""
    checkpoints = Checkpoints(folder)
    files = {rank: checkpoints.write(step, rank, content(b"abc" * (rank + 1))) for rank in range(2)}
    manifest = Manifest(
        digest=config.digest, run_id=folder.run_id, step=step, world_size=2, files=files, rows=row_bytes(folder)
    )
    checkpoints.complete(manifest)
    return manifest


def test_a_file_gets_the_rights_that_the_umask_leaves(folder: RunFolder) -> None:
    checkpoints = Checkpoints(folder)
    before = os.umask(0o027)
    try:
        checkpoints.write(9, 0, lambda path: path.touch(0o600))  # as safetensors does
    finally:
        os.umask(before)
    assert checkpoints.file(9, 0).stat().st_mode & 0o777 == 0o640


def test_there_is_a_checkpoint_once_its_manifest_is_written_and_the_last_one_is_kept(
    folder: RunFolder, config: RunConfig
) -> None:
    checkpoints = Checkpoints(folder)
    manifest = make(folder, config, 9)
    checkpoints.write(10, 0, content(b"x"))
    assert checkpoints.steps() == [9]
    assert checkpoints.check(9, config) == manifest
    assert manifest.files[1].nbytes == checkpoints.file(9, 1).stat().st_size == 6
    make(folder, config, 10)
    assert checkpoints.steps() == [10, 9]
    checkpoints.write(11, 1, content(b"x"))  # by a rank that is ahead
    checkpoints.remove(operator.lt, 10)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step-000000010", "step-000000011"]
    checkpoints.remove(operator.ne, 10)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000000010"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full_leaves_nothing_of_the_file_and_the_checkpoint_before(
    call: str, folder: RunFolder, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(folder, config, 9)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os if call == "fsync" else Path, call, full)
    with pytest.raises(OSError, match="No space left"):
        make(folder, config, 10)
    monkeypatch.undo()
    assert not list(folder.checkpoints.glob("step-000000010/*"))
    Checkpoints(folder).check(9, config)


def cut(folder: RunFolder) -> None:
    os.truncate(Checkpoints(folder).file(9, 1), 3)


def without_rows(folder: RunFolder) -> None:
    os.truncate(folder.metrics, 2)


def foreign(folder: RunFolder) -> None:
    (Checkpoints(folder).at(9) / "manifest.json").write_text('{"epochs": 3}')


def half_a_manifest(folder: RunFolder) -> None:
    manifest = Checkpoints(folder).at(9) / "manifest.json"
    os.truncate(manifest, manifest.stat().st_size // 2)


def with_other_values(folder: RunFolder) -> None:
    manifest = Checkpoints(folder).at(9) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"rows": [], "step": "last"}))


def of_another_form(folder: RunFolder) -> None:
    manifest = Checkpoints(folder).at(9) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 0, "version": "0.0.9"}))


def of_another_run(folder: RunFolder) -> None:
    make(folder, make_config(lr=0.2), 9)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut, r"rank-1.safetensors is cut or missing \(it had 6 bytes\); put it back, or start the run again"),
        (without_rows, "metrics.csv lacks rows that were there at the checkpoint; put the file back, or start"),
        (foreign, "manifest.json is not a checkpoint's manifest .*; remove .*step-000000009, and training resumes"),
        (half_a_manifest, "manifest.json is not a checkpoint's manifest"),
        (with_other_values, r"manifest.json is not a checkpoint's manifest \(step: Input should be a valid integer"),
        (
            of_another_form,
            "was written by gradwire 0.0.9 in format 0, and this version reads format 6; resume the run",
        ),
        (of_another_run, "belongs to run .*, but config.json here has digest .*; put the run's own config.json and"),
    ],
)
def test_what_training_cannot_go_on_from_is_refused_in_one_sentence(
    damage: Callable[[RunFolder], None], sentence: str, folder: RunFolder, config: RunConfig
) -> None:
    make(folder, config, 9)
    damage(folder)
    with pytest.raises(UsageError, match=sentence) as refusal:
        Checkpoints(folder).check(9, config)
    assert "\n" not in str(refusal.value)


def test_rows_after_a_checkpoint_are_cut_and_files_that_came_later_are_emptied(folder: RunFolder) -> None:
    before = row_bytes(folder)
    folder.metrics.write_text("step\n1\n2\n")
    folder.layers.write_text("layer\na\n")
    cut_rows(folder, before)
    assert folder.metrics.read_text() == "step\n1\n"
    assert folder.layers.read_text() == ""
