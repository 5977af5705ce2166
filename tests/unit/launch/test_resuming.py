"""Making a run's folder ready for another attempt."""

from __future__ import annotations

from pathlib import Path

from bench.core.run_folder import RunFolder
from bench.launch.resuming import prepare_folder


def test_logs_of_every_attempt_are_kept_though_the_count_of_attempts_is_lost(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for text in ("first", "second", "third"):
        folder.logs.mkdir(exist_ok=True)
        (folder.logs / "rank-0.log").write_text(text, encoding="utf-8")
        prepare_folder(folder)
        folder.resume.unlink()
    kept = sorted(tmp_path.glob("logs-before-*/rank-0.log"))
    assert [path.read_text(encoding="utf-8") for path in kept] == ["first", "second", "third"]
