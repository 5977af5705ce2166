"""The launcher reads whole lines only, each once."""

from __future__ import annotations

from pathlib import Path

from bench.launch.progress import ProgressReader


def test_lines_are_read_once_and_a_half_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    reader = ProgressReader(path)
    assert reader.new_lines() == []
    path.write_bytes(b'{"step": 1}\n{"step"')
    assert reader.new_lines() == [{"step": 1}]
    assert reader.new_lines() == []
    with path.open("ab") as file:
        file.write(b': 2}\n{"evaluated": {}}\n')
    assert reader.new_lines() == [{"step": 2}, {"evaluated": {}}]
    assert reader.last == {"step": 2}
