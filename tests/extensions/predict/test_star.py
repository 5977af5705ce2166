"""Links that meet at a server: fair shares, and messages that arrive at the right times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.extensions.predict.contention import Star, fair_shares
from bench.extensions.predict.links import Links
from tests.extensions.predict.test_flows import one_rank_per_host

HOSTS = st.lists(st.tuples(st.integers(0, 3), st.floats(1, 100)), min_size=1, max_size=6)


def links(rates: Sequence[float], **more: float) -> Links:
    return one_rank_per_host(np.array(rates), np.array(rates), np.zeros(len(rates)), **more)


def come_at(joined: Links, messages: Sequence[tuple[float, str, int, float]]) -> list[float]:
    """Return the arrival in seconds of each message: (send time, "push" or "answer", rank, bytes)."""
    env = simpy.Environment()
    star = Star(env, joined, root=0)
    times = [0.0] * len(messages)

    def send(number: int, at: float, way: str, rank: int, nbytes: float) -> Any:
        yield env.timeout(at)
        yield star.send(rank, nbytes, to_server=way == "push")
        times[number] = env.now

    for number, message in enumerate(messages):
        env.process(send(number, *message))
    env.run()
    return times


def test_flows_share_a_link_evenly_and_leave_what_one_cannot_use_to_the_others() -> None:
    one_each = np.array([1, 1, 1])
    assert fair_shares(one_each, np.full(3, 90.0), 90.0).tolist() == [30, 30, 30]
    assert fair_shares(one_each, np.array([10.0, 90.0, 90.0]), 90.0).tolist() == [10, 40, 40]
    assert fair_shares(one_each, np.array([10.0, 20.0, 30.0]), 90.0).tolist() == [10, 20, 30]
    assert fair_shares(np.array([2, 0, 1]), np.array([10.0, 90.0, 90.0]), 90.0).tolist() == [5, 0, 80]
    assert not fair_shares(np.zeros(3, dtype=np.int64), np.full(3, 90.0), 90.0).any()


@settings(max_examples=60, deadline=None)
@given(hosts=HOSTS, shared=st.floats(1, 100))
def test_nobody_could_have_more_but_from_one_who_has_no_more(hosts: list[tuple[int, float]], shared: float) -> None:
    count, own = (np.array(column) for column in zip(*hosts, strict=True))
    rates = fair_shares(count, own, shared)
    assert (rates * count <= own * (1 + 1e-9)).all()
    assert (rates * count).sum() <= shared * (1 + 1e-9)
    is_shared_full = (rates * count).sum() >= shared * (1 - 1e-9)
    for rate, flows, link in zip(rates, count, own, strict=True):
        is_own_full = rate * flows >= link * (1 - 1e-9)
        assert not flows or is_own_full or (is_shared_full and rate >= rates[count > 0].max() * (1 - 1e-9))


def test_messages_that_are_under_way_at_once_take_turns_at_the_servers_link() -> None:
    """1000 bytes alone for 0.5 s, then together with others: 500 left at 500 bytes per second."""
    assert come_at(links([1000.0] * 3), [(0.0, "push", 1, 1000), (0.5, "push", 2, 1000)]) == [1.5, 2.0]


def test_a_rank_sends_one_message_after_the_other() -> None:
    assert come_at(links([1000.0] * 3), [(0.0, "push", 1, 1000), (0.0, "push", 1, 500)]) == [1.0, 1.5]


def test_answers_have_the_servers_other_direction_to_themselves() -> None:
    assert come_at(links([1000.0] * 3), [(0.0, "push", 1, 1000), (0.0, "answer", 2, 1000)]) == [1.0, 1.0]


def test_what_comes_is_acknowledged_over_the_link_of_what_leaves() -> None:
    """While an answer arrives at 1000 bytes per second, acknowledgements of a tenth of it go back."""
    pushed, answered = come_at(links([1000.0] * 2, ack_share=0.1), [(0.0, "push", 1, 900), (0.0, "answer", 1, 900)])
    assert (pushed, answered) == (pytest.approx(1.0), pytest.approx(1.0))


def test_a_link_without_a_limit_and_a_way_within_a_host_take_no_time() -> None:
    assert come_at(links([np.inf] * 2), [(0.0, "push", 1, 1e9)]) == [pytest.approx(0.0, abs=1e-5)]
    together = Links(host_of=np.array([0, 0]), up_rate=np.ones(1), down_rate=np.ones(1), latency_s=np.ones(1))
    assert come_at(together, [(0.0, "push", 1, 1e9)]) == [0.0]


def test_acknowledgements_of_fast_answers_leave_half_of_a_slow_link_to_pushes() -> None:
    fast, slow = np.array([1e4, 100.0, 100.0]), np.array([100.0, 1e4, 1e4])
    hosts = {"host_of": np.arange(3), "latency_s": np.zeros(3), "ack_share": 0.05}
    both = [(0.0, "push", 1, 100.0), (0.0, "answer", 2, 1e6)]
    assert come_at(Links(up_rate=fast, down_rate=slow, **hosts), both)[0] == pytest.approx(2.0)
