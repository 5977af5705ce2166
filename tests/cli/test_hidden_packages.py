"""A user's module with the name of one of our packages: a sentence says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.invoke import REPOSITORY


@pytest.fixture
def hiding(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Write a module of the user, and return its path as the message names it."""
    path = tmp_path / str(request.param)
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise AssertionError('it was imported')", encoding="utf-8")
    return str(path.parent if path.stem == "__init__" else path)


def python(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that searches the folder for modules first."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "hiding", ["compressors/__init__.py", "bench.py", "collectives/__init__.py", "compressors.py"], indirect=True
)
def test_the_command_names_it(hiding: str, tmp_path: Path) -> None:
    done = python("from gradwire.command import main; main()", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"bench: {hiding} hides the package ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("hiding", ["collectives/__init__.py"], indirect=True)
@pytest.mark.parametrize("program", ["from gradwire import attach", "from gradwire.optim import Dion"])
def test_a_script_is_told(hiding: str, program: str, tmp_path: Path) -> None:
    done = python(program, tmp_path)
    assert f"ImportError: {hiding} hides the package " in done.stderr


def test_a_script_may_have_a_bench_of_its_own_and_imports_what_it_uses(tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text("", encoding="utf-8")
    lazy = "import sys, gradwire.optim; assert 'torch' not in sys.modules"
    done = python(f"{lazy}; from gradwire import attach; from gradwire.optim import *", tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_user_with_other_modules_is_told_nothing(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    program = "import sys; from gradwire.command import main; sys.argv = ['bench', '-h']; main()"
    assert "Usage: bench" in python(program, tmp_path).stdout
