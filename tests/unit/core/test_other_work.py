"""CPU time of other programs, compared with a program whose CPU time is known."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from bench.core.counters import OtherWork, launcher_of_rank

SPIN = "while True: pass"
NO_PROCESS = 2**22 + 1  # larger than any process id


def test_a_program_counts_as_other_work_unless_the_run_has_started_it() -> None:
    """Both measure the same cores over the same time, so they differ only by the program's CPU time."""
    program = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        with_it, without = OtherWork(root=program.pid), OtherWork(root=NO_PROCESS)
        for work in (with_it, without):
            work.start()
        began, used_before = time.monotonic(), psutil.Process(program.pid).cpu_times().user
        time.sleep(1.0)
        for work in (with_it, without):
            work.stop()
        took_s = psutil.Process(program.pid).cpu_times().user - used_before
        share = took_s / (time.monotonic() - began) / len(os.sched_getaffinity(0))
        assert with_it.share is not None
        assert without.share is not None
        assert without.share - with_it.share == pytest.approx(share, abs=0.1)
        assert share > 0.0
    finally:
        program.kill()
        program.wait()


def test_nothing_is_known_before_any_time_has_passed() -> None:
    assert OtherWork(root=os.getpid()).share is None


def test_a_ranks_launcher_is_two_processes_above() -> None:
    code = "from bench.core.counters import launcher_of_rank as l; print(l())"
    server = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    said = subprocess.run([sys.executable, "-c", server], capture_output=True, text=True, check=True)
    assert int(said.stdout) == os.getpid()
    assert launcher_of_rank() > 0
