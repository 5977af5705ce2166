"""A short part of the attack, with a fixed seed; `make attack` runs all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.testing.invoke import REPOSITORY

# The other parts take too long here.
SLICES = [("inputs", 25), ("plugins", 2), ("sockets", 1), ("kills", 2)]


@pytest.mark.long
@pytest.mark.parametrize(("part", "tries"), SLICES)
def test_a_slice_of_it_finds_nothing(part: str, tries: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.attack", "--only", part, "--tries", str(tries), "--seed", "12", "--minutes", "4"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 12: 0 failures" in done.stdout
