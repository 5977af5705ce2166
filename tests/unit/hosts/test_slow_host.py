"""The stopped time of a slow host; tests/hosts checks that its processes are stopped, on shared CPUs."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from bench.hosts import supervisor


class Played:
    """Simulated time that passes only in waits, and the time in each state."""

    def __init__(self) -> None:
        self.now = 0.0
        self.state = signal.SIGCONT
        self.spent = dict.fromkeys((signal.SIGCONT, signal.SIGSTOP), 0.0)

    def wait(self, seconds: float) -> None:
        self.spent[self.state] += seconds
        self.now += seconds

    def signal(self, _: object, number: signal.Signals) -> None:
        self.state = number


@pytest.mark.parametrize("share", [0.05, 0.2, 0.45, 0.9])
def test_a_slow_host_is_stopped_for_the_rest_of_the_time(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played()

    class Released:
        wait = staticmethod(played.wait)

        def is_set(self) -> bool:
            return played.now > 10

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: played.now, sleep=played.wait))
    monkeypatch.setattr(supervisor, "_signal", played.signal)
    supervisor.limit_cpu("/", share, Released())  # this folder is no process's network namespace
    assert played.spent[signal.SIGCONT] / played.now == pytest.approx(share, rel=0.01)
