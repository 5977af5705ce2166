"""`bench place` stopped by a signal."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.cli.test_deaths import wait_until
from tests.testing.invoke import REPOSITORY, start


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no folder that shows what is left")
def test_a_measurement_of_shared_memory_that_is_stopped_leaves_none() -> None:
    process = start("place", "--model", "linear", "--devices", str(REPOSITORY / "examples" / "cxl.toml"))
    own = psutil.Process(process.pid)
    held: list[str] = []

    def measures() -> list[str]:
        held[:] = [file.path for file in own.open_files() if file.path.startswith("/dev/shm/")]
        return held

    wait_until(measures, process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate()
    assert process.returncode == 130, error
    assert not any(Path(path).exists() for path in held)
