"""`bench calibrate` and `bench predict` refuse unknown kernels before they do anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_refused_kernels import assert_refused
from tests.extensions.predict.calibrations import written

pytestmark = pytest.mark.usefixtures("planned_here")


@pytest.mark.parametrize("command", ["calibrate", "predict --validate sweep.toml"])
def test_kernels_that_there_are_not_are_refused(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    assert_refused(command, tmp_path, monkeypatch)
