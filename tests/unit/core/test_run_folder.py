"""JSON files of a run: complete or absent."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bench.core.run_folder import read_json, write_json


def test_a_full_disk_keeps_the_old_file_and_leaves_no_half_of_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "status.json", {"status": "running"})

    def no_room(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(OSError, match="No space left"):
        write_json(tmp_path / "status.json", {"status": "ok"})
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    assert read_json(tmp_path / "status.json") == {"status": "running"}


@pytest.mark.parametrize("text", ["[]", '"ok"', '{"status": ', ""])
def test_a_file_that_holds_no_object_holds_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(text, encoding="utf-8")
    assert read_json(tmp_path / "status.json") is None
