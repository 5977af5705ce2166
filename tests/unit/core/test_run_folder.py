"""JSON files of a run: whole or not there."""

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
    write_text = Path.write_text

    def half_of(path: Path, text: str, encoding: str) -> None:
        write_text(path, text[: len(text) // 2], encoding)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_text", half_of)
    with pytest.raises(OSError, match="No space left"):
        write_json(tmp_path / "status.json", {"status": "ok"})
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    assert read_json(tmp_path / "status.json") == {"status": "running"}
