"""Virtual hosts: skipped with the reason if they are not permitted; every test leaves the machine as it was."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.hosts.support import hosts_supported


def machine_state() -> dict[str, str]:
    """Return the state that virtual hosts must not change."""
    return {
        "links": subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout,
        "namespaces": subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout,
        "mounts": Path("/proc/self/mounts").read_text(encoding="utf-8"),
    }


# Environment variable of all processes that a test starts, with the test's temporary folder as value.
MARK = "BENCH_TEST_FOLDER"


def processes_of(folder: Path) -> dict[int, str]:
    """Return ids and command lines of all processes that the test with this temporary folder has started."""
    return {
        process.pid: " ".join(process.info["cmdline"] or [])
        for process in psutil.process_iter(["cmdline", "environ"])
        if (process.info["environ"] or {}).get(MARK) == str(folder)
    }


def wait_for_end_of(folder: Path, timeout_s: float = 60.0) -> None:
    """Return when no process of the test is left; fail if one remains."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == {}


@pytest.fixture(autouse=True)
def _permitted_and_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    supported, reason = hosts_supported()
    if not supported:
        pytest.skip(f"virtual hosts do not work here: {reason}")
    monkeypatch.setenv(MARK, str(tmp_path))
    before = machine_state()
    yield
    wait_for_end_of(tmp_path)
    assert machine_state() == before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests on virtual hosts one after another even if tests run in parallel, because they measure links."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("virtual hosts"))
