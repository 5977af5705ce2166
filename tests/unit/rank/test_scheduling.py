"""Sharing of a CPU's cores among ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.rank import process

# The number of sched_getattr(2) follows that of sched_setattr; an old kernel answers with a slice of 0.
TAKE_TURNS = """
import ctypes, os, platform, threading
from bench.rank import process
from bench.rank.process import use_batch_scheduling
niceness = os.nice(3)
use_batch_scheduling()
seen = []
thread = threading.Thread(target=lambda: seen.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(os.sched_getscheduler(0) == os.SCHED_BATCH, seen == [os.SCHED_BATCH])
print(os.getpriority(os.PRIO_PROCESS, 0) == niceness)
answer = ctypes.create_string_buffer(process._SCHED_ATTR.size)
ctypes.CDLL(None).syscall(process._SCHED_SETATTR[platform.machine()] + 1, 0, answer, len(answer), 0)
print(process._SCHED_ATTR.unpack(answer.raw)[5])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="batch scheduling is Linux's")
def test_the_thread_and_those_it_starts_run_in_batch_at_the_same_niceness() -> None:
    ended = subprocess.run([sys.executable, "-c", TAKE_TURNS], capture_output=True, text=True, check=True)
    *kept, slice_ns = ended.stdout.split()
    assert kept == ["True", "True", "True"]
    assert slice_ns in ("0", "20000000")
    assert ended.stderr == ""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies are Linux's")
def test_a_policy_that_the_user_chose_is_kept() -> None:
    program = (
        "import os; from bench.rank.process import use_batch_scheduling; "
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); "
        "use_batch_scheduling(); print(os.sched_getscheduler(0) == os.SCHED_IDLE)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True"]


@pytest.mark.parametrize(
    ("numbers", "sentence"), [({}, "not supported"), ({"any": 0xFFFF}, "refused batch scheduling (Function not impl")]
)
def test_where_it_cannot_be_had_the_log_says_so(
    numbers: dict[str, int], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "_SCHED_SETATTR", numbers)
    monkeypatch.setattr(process.platform, "machine", lambda: "any")
    process.use_batch_scheduling()
    assert sentence in capsys.readouterr().err
