"""`bench tune` refuses unknown kernels as the other commands do."""

from pathlib import Path

import pytest

from tests.cli.test_refused_kernels import assert_refused


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize("command", ["tune --rates 0.1", "tune --rates 0.1 --dry-run"])
def test_kernels_that_there_are_not_are_refused(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(command, tmp_path, monkeypatch)
