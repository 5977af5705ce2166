"""The launcher reads only complete lines, each once."""

from __future__ import annotations

from pathlib import Path

from bench.launch.jobs.failure import ProgressReader


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


def test_what_was_evaluated_was_reached(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    path.write_text(
        '{"step": 148, "epoch": 2.96, "loss": 0.5}\n{"evaluated": {"step": 150, "epoch": 3.0, "test_accuracy": 0.9}}\n'
    )
    reader = ProgressReader(path)
    reader.new_lines()
    assert reader.last == {"step": 150, "epoch": 3.0, "loss": 0.5}
