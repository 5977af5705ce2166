"""The cost of carrying messages, estimated from the slow-down of ranks that compute at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

import pytest

from bench.extensions.predict import message_costs
from bench.extensions.predict.calibration import MessageCosts
from bench.extensions.predict.message_costs import MESSAGE_BYTES, carry_byte_s, forwarded_byte_s
from tests.testing.memory_transport import run_threads


class Scripted:
    """A rank that computes 100 products per second at rest and 50 during messages, with two outliers."""

    def __init__(self) -> None:
        self._beside = [0.0, 50.0, 50.0, 50.0, 1000.0]
        self._is_at_rest = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is nothing to stop."""

    def __call__(self, work: Callable[[], object]) -> tuple[float, float]:
        work()
        self._is_at_rest = not self._is_at_rest
        return (100.0 if self._is_at_rest else self._beside.pop()), 0.1


class Busy:
    """A forwarder that is busy for 0.01 s between any `start` and `stop`."""

    def __init__(self) -> None:
        self.cpu_s = 0.0

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        self.cpu_s += 0.01


def test_what_ranks_lose_beside_messages_is_carried_but_for_what_they_do_for_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four ranks lose half of two cores for 0.1 s, with twelve messages."""
    monkeypatch.setattr(message_costs, "computing", Scripted)
    monkeypatch.setattr(message_costs, "EXCHANGES", 5)
    monkeypatch.setattr(message_costs, "REST_S", 0.0)
    monkeypatch.setattr(message_costs.environment, "usable_cores", lambda: 2)
    costs = MessageCosts(message_s=1e-4, per_byte_s=1e-9)
    expected = (2 * 0.1 * 0.5 / 12 - 2 * (1e-4 + 1e-9 * MESSAGE_BYTES)) / MESSAGE_BYTES
    assert run_threads(lambda transport: carry_byte_s(transport, costs), 4) == pytest.approx([expected] * 4)
    dear = MessageCosts(message_s=1.0)
    assert run_threads(lambda transport: carry_byte_s(transport, dear), 4) == [0.0] * 4


def test_the_forwarders_time_is_that_of_all_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_costs, "ForwarderUse", Busy)
    monkeypatch.setattr(message_costs, "EXCHANGES", 5)
    assert run_threads(forwarded_byte_s, 3) == pytest.approx([0.01 / (6 * MESSAGE_BYTES)] * 3)


def test_a_rank_counts_what_it_computes_until_it_is_told_to_end() -> None:
    with message_costs.computing() as per_s:
        counted_per_s, seconds = per_s(lambda: time.sleep(0.05))
    assert counted_per_s * seconds >= 1
    assert not any(thread.name == "computing" for thread in threading.enumerate())
