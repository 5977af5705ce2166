"""A job's scratch folder is removed if it is not needed any more, and otherwise its path is printed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from bench.core.config.run import RanksConfig
from bench.core.errors import BenchError, Interrupted, RunFailed, UsageError
from bench.launch.jobs.failure import WatchdogTimeouts
from bench.launch.run import measure, scratch_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_job_that_ended_well_leaves_nothing(temporary: Path) -> None:
    with scratch_folder("sums") as folder:
        assert folder.path.name.startswith("bench-sums-")
        assert folder.logs.is_dir()
        assert folder.errors.is_dir()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "error", [UsageError("no"), Interrupted("no"), ValueError("no")], ids=lambda e: type(e).__name__
)
def test_what_no_log_explains_leaves_nothing(error: Exception, temporary: Path) -> None:
    with pytest.raises(type(error), match=r"^no$"), scratch_folder("sums"):
        raise error
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("error", [UsageError("no netem here"), RunFailed("tc said no")], ids=["usage", "failure"])
def test_a_start_that_fails_leaves_only_what_it_names(error: BenchError, temporary: Path) -> None:
    def start(_: object) -> NoReturn:
        raise error

    with pytest.raises(type(error), match=str(error)) as caught:
        measure("sums", RanksConfig(), start, WatchdogTimeouts(first_s=1, next_s=1), lambda _: None)
    left = [str(path) for path in temporary.iterdir()]
    assert [path for path in left if path in str(caught.value)] == left
    assert len(left) == isinstance(error, RunFailed)
