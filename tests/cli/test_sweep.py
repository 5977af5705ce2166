"""`bench sweep` with real runs: stopped and continued, started twice, with failures among the runs."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.api.progress import LiveLine
from bench.core.schema import METRICS
from tests.testing.invoke import Answer, invoke, processes_of, rows, start

SWEEP = """
[base]
model = "linear"
train-size = 256
test-size = 64
batch-size = 16
epochs = 6
threads = 1
seeds = "1-2"
[matrix]
compressor = ["none", "topk"]
"""
REPEATING = [column.name for column in METRICS if column.deterministic]

pytestmark = pytest.mark.usefixtures("forked_here")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(SWEEP, encoding="utf-8")
    return path


def finished(out: Path) -> list[Path]:
    return sorted(path.parent for path in out.glob("*/status.json"))


def all_rows(out: Path) -> list[list[str]]:
    """Return the reproducible columns of the rows of all runs."""
    return sorted([row[name] for name in REPEATING] for path in out.glob("*/metrics.csv") for row in rows(path.parent))


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None
        time.sleep(0.005)


def sweep(file: Path, out: Path, *more: str) -> Answer:
    return invoke("sweep", str(file), "--out", str(out), *more)


def test_killed_and_continued_it_ends_with_the_rows_of_an_undisturbed_one(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert sweep(file, undisturbed).code == 0
    process = start("sweep", str(file), "--out", str(killed))
    wait_until(lambda: finished(killed) and len(list(killed.glob("*/metrics.csv"))) > len(finished(killed)), process)
    process.kill()
    process.communicate()
    psutil.wait_procs(list(processes_of(killed)))
    before = finished(killed)
    assert 0 < len(before) < 4
    answer = sweep(file, killed)
    assert answer.code == 0, answer.error
    assert "was cut short; it is removed and run again" in answer.error
    assert set(before) < set(finished(killed))
    assert all_rows(killed) == all_rows(undisturbed)


def test_two_at_once_run_nothing_twice(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    both = [start("sweep", str(file), "--out", str(out), "--json") for _ in range(2)]
    for process in both:
        text, error = process.communicate()
        assert process.returncode == 0, error
        assert [run["status"] for run in json.loads(text)] == ["done"] * 4
    assert len(finished(out)) == 4


def test_a_failure_is_a_row_and_the_others_are_run_and_it_is_tried_again_when_asked(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    file.write_text(
        """
        [base]
        train-size = 256
        test-size = 64
        batch-size = 16
        epochs = 2
        threads = 1
        nonfinite = "raise"
        [matrix]
        compressor = ["none", "topk"]
        [[include]]
        lr = 1e12
        """,
        encoding="utf-8",
    )
    first, second = sweep(file, out), sweep(file, out)
    assert "1 to do now" in sweep(file, out, "--retry-failed", "--dry-run").error
    third = sweep(file, out, "--retry-failed")
    assert [answer.code for answer in (first, second, third)] == [3, 3, 3]
    assert "1 of 3 runs failed, one of them with: " in first.error
    assert first.error == second.error
    assert "2 done; 1 failed (--retry-failed runs them again); 0 to do now" in sweep(file, out, "--dry-run").error
    statuses = [json.loads((folder / "status.json").read_text(encoding="utf-8")) for folder in finished(out)]
    assert sorted(status["status"] for status in statuses) == ["failed", "failed", "ok", "ok"]
    failed = next(folder for folder in finished(out) if rows(folder)[-1]["status"] == "failed")
    assert rows(failed)[-1]["error"] in first.error


def test_limits_and_single_runs_and_plans(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "4 runs of 2 configurations; 0 done; 4 to do now, duration not known yet" in (
        sweep(file, out, "--dry-run").error
    )
    assert not out.exists()
    assert sweep(file, out, "--only", "2", "--json").code == 0
    assert sweep(file, out, "--limit", "1").code == 0
    rest = sweep(file, out, "--dry-run", "--json")
    assert [run["status"] for run in json.loads(rest.out)] == ["done", "missing", "done", "missing"]
    assert "2 done; 2 to do now, about " in rest.error
    line = sweep(file, out, "--slurm").out
    assert " --array=1,3 " in line
    assert len(finished(out)) == 2


def test_a_run_that_is_not_in_the_plan_is_refused(file: Path, tmp_path: Path) -> None:
    both = sweep(file, tmp_path, "--only", "1", "--slurm")
    assert (both.code, "--slurm submits all runs" in both.error) == (2, True)
    answer = sweep(file, tmp_path, "--only", "4")
    assert (answer.code, answer.error) == (2, "--only 4 is not the number of a run; the 4 runs are numbered from 0")


def test_brackets_in_what_is_said_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    said = "failed: [/__w/pytorch/gloo/tcp/pair.cc:1] refused [base]"
    LiveLine("a sweep").say(said)
    assert capsys.readouterr().err.strip() == said
