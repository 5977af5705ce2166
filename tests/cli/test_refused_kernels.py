"""Unknown kernels: every command that computes with kernels refuses them in the same way, before it does anything."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from collectives.kernels import library
from tests.testing.invoke import REPOSITORY, invoke

pytestmark = pytest.mark.usefixtures("planned_here")


def assert_refused(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail unless a command refuses unknown kernels, in this folder with a sweep file, and writes nothing."""
    shutil.copy(REPOSITORY / "examples" / "sweep.toml", folder)
    before = set(folder.iterdir())
    monkeypatch.chdir(folder)
    monkeypatch.setattr(library, "found", library.found.__wrapped__)  # undo the cache of the process
    monkeypatch.setenv(library.VARIABLE, "fast")
    answer = invoke(*command.split())
    assert answer.code == 2
    assert answer.error == "GRADWIRE_KERNELS=fast: set it to native or reference, or leave it out"
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize(
    "command",
    [
        "run --steps 1",
        "run --steps 1 --dry-run",
        "sweep sweep.toml",
        "sweep sweep.toml --dry-run",
        "sweep sweep.toml --slurm",
        "doctor --no-smoke",
    ],
)
def test_kernels_that_there_are_not_are_refused(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(command, tmp_path, monkeypatch)
