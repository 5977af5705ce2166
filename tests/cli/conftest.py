"""What tests of commands share."""

from __future__ import annotations

import pytest

from bench.launch.jobs.fork_server import ForkServer


@pytest.fixture
def planned_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned, and refused, in a process of its own is so in this one, which has imported torch already."""
    monkeypatch.setattr(ForkServer, "warm_up", lambda _server, _threads: None)
