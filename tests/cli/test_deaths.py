"""A launcher that is killed, or stopped before or while its job starts."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.testing.invoke import execute, only_run, processes_of, rows, start, status

RUN = ("run", "--model", "linear", "--train-size", "256", "--test-size", "64", "--batch-size", "16", "--epochs", "5000")


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Return when the condition holds; fail if the process ends before."""
    while not condition():
        assert process.poll() is None
        time.sleep(0.005)


def kill(process: subprocess.Popen[str], folder: Path) -> None:
    """Kill the launcher, and return when its ranks have ended too."""
    process.kill()
    process.communicate()
    psutil.wait_procs(list(processes_of(folder)))


def test_the_next_command_names_a_run_whose_launcher_was_killed_and_keeps_its_rows(tmp_path: Path) -> None:
    process = start(*RUN, "--out", str(tmp_path / "out"), XDG_STATE_HOME=str(tmp_path / "state"))
    wait_until(lambda: list(tmp_path.glob("out/*/metrics.csv")) and len(rows(only_run(tmp_path / "out"))) > 1, process)
    folder = only_run(tmp_path / "out")
    other = execute("list", "optimizers", XDG_STATE_HOME=str(tmp_path / "state"))
    assert other.error == ""  # the run is still going on
    kill(process, folder)
    first, second = (execute("list", "optimizers", XDG_STATE_HOME=str(tmp_path / "state")) for _ in range(2))
    assert first.error == f"note: bench was killed during an earlier run; its rows so far are kept in {folder}\n"
    assert second.error == ""
    *before, last = rows(folder)
    assert {row["status"] for row in before} == {"running"}
    assert (last["status"], last["error"], last["model"], last["host"]) == (
        "interrupted", "bench was killed", "linear", before[0]["host"],
    )  # fmt: skip
    assert status(folder)["error"] == "bench was killed"
    assert int(last["step"]) > 0
    assert not (folder / "rendezvous").exists()
    assert list((tmp_path / "state" / "gradwire" / "jobs").iterdir()) == []


def handles(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Return whether the process has installed a handler for the signal."""
    lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
    caught = next(line for line in lines if line.startswith("SigCgt")).partition(":")[2]
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not show who handles what")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_anything_is_imported_is_one_sentence(number: signal.Signals, tmp_path: Path) -> None:
    process = start(*RUN, "--out", str(tmp_path / "out"))
    wait_until(lambda: handles(process, number), process)
    loaded = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
    process.send_signal(number)
    _, error = process.communicate()
    assert (process.returncode, error) == (130, "bench: interrupted\n")
    assert "pydantic" not in loaded
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(other, marks=pytest.mark.long) for other in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_signal_while_the_ranks_start_is_an_interrupted_run_with_its_row(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = start(*RUN, "--out", str(tmp_path / "out"))
    wait_until(lambda: list(tmp_path.glob("out/*/rendezvous")), process)
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)  # as `timeout` does; must not interrupt the clean-up after the first one
    _, error = process.communicate()
    folder = only_run(tmp_path / "out")
    assert process.returncode == 130
    assert "bench: stopped by the user; the rows so far are kept" in error
    assert (rows(folder)[-1]["status"], status(folder)["status"]) == ("interrupted", "interrupted")
    assert not (folder / "rendezvous").exists()
    assert not processes_of(folder)


def assert_says_when_stopped(*command: str, kept: str, folder: Path) -> None:
    """Fail unless a command that is stopped while its ranks work ends with this message and leaves the folder empty."""
    process = start(*command, cwd=folder, TMPDIR=str(folder))
    wait_until(lambda: list(folder.glob("bench-*/logs/*/attempt_0/0")), process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate()
    assert process.returncode == 130
    assert error.splitlines()[-1] == f"bench: stopped by the user; {kept}"
    assert not list(folder.glob("bench-*"))


def test_a_run_that_was_started_with_nohup_outlives_the_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(*RUN[:-2], "--steps", "5", "--out", str(tmp_path / "out"))
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_until(lambda: list(tmp_path.glob("out/*/rendezvous")), process)
    process.send_signal(signal.SIGHUP)
    _, error = process.communicate()
    assert process.returncode == 0, error
