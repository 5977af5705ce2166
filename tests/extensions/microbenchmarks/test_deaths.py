"""A measurement whose launcher is killed or stopped."""

from __future__ import annotations

from pathlib import Path

from tests.cli.test_deaths import assert_says_when_stopped, kill, wait_until
from tests.testing.invoke import execute, start

SUMS = ("collectives", "--sizes", "4kB", "--collectives", "ring", "--iters", "5000", "--rounds", "1000")


def test_the_next_command_removes_the_temporary_folder_of_a_killed_one(tmp_path: Path) -> None:
    variables = {"XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path)}
    process = start(*SUMS, **variables)
    wait_until(lambda: list(tmp_path.glob("bench-collectives-*/logs/*/*/*/stdout.log")), process)
    (folder,) = tmp_path.glob("bench-collectives-*")
    kill(process, folder)
    said = execute("list", "optimizers", **variables).error
    assert said == f"note: `bench collectives` was killed earlier; its temporary folder {folder} is removed\n"
    assert not folder.exists()


def test_a_signal_says_what_is_true_of_a_measurement(tmp_path: Path) -> None:
    assert_says_when_stopped(
        "compressors", "--repeats", "100000", kept="no row was finished, so none is kept", folder=tmp_path
    )
