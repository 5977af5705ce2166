"""Notes on running jobs, and the clean-up of those whose launcher has ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.core.run_folder import RunFolder, write_json
from bench.launch.jobs.failure import clear_away, noted


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "gradwire" / "jobs"


def leave_note(notes: Path, command: str, folder: Path) -> None:
    """Write a note as a launcher that is killed leaves it."""
    notes.mkdir(parents=True)
    (notes / "note").write_text(json.dumps({"command": command, "path": str(folder)}), encoding="utf-8")


def test_a_job_under_way_is_left_alone_and_leaves_no_note(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = notes.parent
    with noted("collectives", folder):
        assert notes.stat().st_mode & 0o777 == 0o700
        assert len(list(notes.iterdir())) == 1
        clear_away()
        assert folder.exists()
    assert list(notes.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_without_a_place_for_notes_the_job_goes_on(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    with noted("run", notes):
        pass
    clear_away()


def test_a_run_whose_configuration_cannot_be_read_is_named(
    notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(tmp_path / "out", "test", "0123456789", 1)
    folder.config.write_text("{", encoding="utf-8")
    leave_note(notes, "run", folder.path)
    clear_away()
    said = capsys.readouterr().err
    assert "note: bench was killed during an earlier run; a last row that records this could not be written" in said
    assert str(folder.path) in said
    assert list(notes.iterdir()) == []


def test_the_folder_of_a_run_that_was_killed_before_it_had_a_configuration_is_removed(
    notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(tmp_path / "out", "test", "0123456789", 1)
    leave_note(notes, "run", folder.path)
    clear_away()
    said = capsys.readouterr().err
    assert said == f"note: bench was killed before a run started; its empty folder {folder.path} is removed\n"
    assert not folder.path.exists()


@pytest.mark.parametrize("exists", [True, False], ids=["it had ended", "its folder is gone"])
def test_of_a_run_that_needs_nothing_nothing_is_said(
    exists: bool, notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if exists:
        write_json(RunFolder(tmp_path).status, {"status": "ok"})
    leave_note(notes, "run", tmp_path if exists else tmp_path / "gone")
    clear_away()
    assert capsys.readouterr().err == ""
    assert list(notes.iterdir()) == []


@pytest.mark.parametrize("text", ['{"command": "run", "pa', "[]", "{}", "\udcff"])
def test_a_note_that_tells_of_no_job_is_removed(text: str, notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes.mkdir(parents=True, exist_ok=True)
    (notes / "damaged").write_text(text, encoding="utf-8", errors="surrogateescape")
    clear_away()
    assert "is not a note of a job and is removed" in capsys.readouterr().err
    assert list(notes.iterdir()) == []


def test_a_user_without_a_home_has_no_notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    clear_away()
    with noted("run", tmp_path):
        pass
