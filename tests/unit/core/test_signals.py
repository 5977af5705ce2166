"""Signals that ask the program to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from bench.core import processes
from bench.core.errors import Interrupted


@pytest.mark.parametrize("number", processes.NUMBERS)
def test_inside_the_block_the_first_one_interrupts_and_the_others_do_nothing(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in processes.NUMBERS]
    said = []
    with processes.interruptible():
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            for each in processes.NUMBERS:
                os.kill(os.getpid(), each)
            said.append("tidied up")
    assert said == ["tidied up"]
    assert [signal.getsignal(each) for each in processes.NUMBERS] == before


def test_what_the_block_lets_pass_is_an_interrupted_program() -> None:
    with pytest.raises(Interrupted), processes.interruptible():
        os.kill(os.getpid(), signal.SIGTERM)


def after(*statements: str) -> subprocess.CompletedProcess[str]:
    program = "; ".join(["import os, signal", "from bench.core import processes", *statements, "print('alive')"])
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("number", processes.NUMBERS)
def test_outside_of_a_block_it_is_one_sentence(number: signal.Signals) -> None:
    done = after("processes.end_at_once()", f"os.kill(os.getpid(), {number:d})")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "bench: interrupted\n")


def test_what_is_ignored_stays_ignored() -> None:
    send = "os.kill(os.getpid(), signal.SIGHUP)"
    done = after("signal.signal(signal.SIGHUP, signal.SIG_IGN)", "processes.end_at_once()", send)
    assert (done.returncode, done.stdout) == (0, "alive\n")
