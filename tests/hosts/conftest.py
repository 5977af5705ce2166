"""Virtual hosts: skipped with the reason if they are not permitted; every test leaves the machine as it was."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.hosts.support import hosts_supported


def machine_state() -> dict[str, str]:
    """Return the state that a job on virtual hosts must not change."""
    return {
        "links": subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout,
        "namespaces": subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout,
        "mounts": Path("/proc/self/mounts").read_text(encoding="utf-8"),
    }


def processes_of(run_dir: Path) -> dict[int, str]:
    """Return ids and command lines of all processes with a run's folder among their arguments."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # the process has ended
                continue
            if str(run_dir) in line:
                found[int(folder.name)] = line
    return found


def wait_for_end_of(run_dir: Path, timeout_s: float = 5.0) -> None:
    """Return when no process of the run is left; fail if one remains."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_of(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == {}


@pytest.fixture(autouse=True)
def _permitted_and_clean(tmp_path: Path) -> Iterator[None]:
    supported, reason = hosts_supported()
    if not supported:
        pytest.skip(f"virtual hosts do not work here: {reason}")
    before = machine_state()
    yield
    wait_for_end_of(tmp_path)
    assert machine_state() == before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests on virtual hosts one after another even if tests run in parallel, because they measure links."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("virtual hosts"))
