"""A short slice of the attack with bad command lines and files; `make attack` runs all of it."""

from __future__ import annotations

import subprocess
import sys

from tests.testing.invoke import REPOSITORY


def test_a_slice_of_it_finds_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.attack.inputs", "--seed", "12", "--cases", "40"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "40 cases, 0 failures" in done.stdout
