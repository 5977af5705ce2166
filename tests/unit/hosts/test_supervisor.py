"""The stopped time of a slow host; tests/hosts checks that its processes are stopped, on shared CPUs."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.hosts import supervisor


class Played:
    """Simulated time that passes only in sleeps, and the time in each state."""

    def __init__(self) -> None:
        self.now = 0.0
        self.state = signal.SIGCONT
        self.spent = dict.fromkeys((signal.SIGCONT, signal.SIGSTOP), 0.0)

    def sleep(self, seconds: float) -> None:
        if self.now > 10:
            raise TimeoutError
        self.spent[self.state] += seconds
        self.now += seconds

    def signal(self, _: object, number: signal.Signals) -> None:
        self.state = number


@pytest.mark.parametrize("share", [0.05, 0.2, 0.45, 0.9])
def test_a_slow_host_is_stopped_for_the_rest_of_the_time(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played()
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: played.now, sleep=played.sleep))
    monkeypatch.setattr(supervisor, "_signal", played.signal)
    with pytest.raises(TimeoutError):
        supervisor.limit_cpu(Path("/"), share)  # this folder is no process's network namespace
    assert played.spent[signal.SIGCONT] / played.now == pytest.approx(share, rel=0.01)
