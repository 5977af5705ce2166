"""Links that follow a trace: against a simulation by milliseconds, constant rates, and monotonicity."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.extensions.predict.flows import Flows
from bench.extensions.predict.links import Links, TraceClock
from collectives import options
from collectives.base import Collective
from collectives.schedule.rounds import Layout
from collectives.schedule.waves import Lengths, Wave, waves_of
from tests.extensions.predict.test_flows import COSTS, NAMES, dense, one_rank_per_host

PACKET = 1500
TRACES = st.lists(st.integers(0, 40), min_size=1, max_size=30).map(lambda moments: [*sorted(moments), 41])


def pace(trace: Sequence[int]) -> TraceClock:
    return TraceClock(np.array(trace) / 1e3)


def mean_rate(trace: Sequence[int]) -> float:
    """Return the mean rate of a trace in bytes per second."""
    return PACKET * len(trace) / (trace[-1] / 1e3)


def following(n: int, up: Sequence[int], down: Sequence[int] | None = None, **more: float) -> Links:
    """Return hosts with one rank each, which all send by one trace and receive by another, or without a limit."""
    rates = np.full(n, mean_rate(up)), np.full(n, mean_rate(down) if down else np.inf)
    paces = {"up_paces": [pace(up)] * n, "down_paces": [pace(down)] * n if down else ()}
    return one_rank_per_host(*rates, np.full(n, more.pop("latency_s", 0.0)), **paces, **more)


def opportunities(trace: Sequence[int]) -> Iterable[int]:
    """Yield the packets that may pass in each millisecond; a period's last millisecond also begins the next one."""
    period = trace[-1]
    for now in itertools.count():
        ending = trace.count(period) if now and now % period == 0 else 0
        yield trace.count(now % period) + ending


def by_the_millisecond(trace: Sequence[int], messages: Sequence[tuple[int, int]]) -> list[int]:
    """Return the end in milliseconds of each (millisecond, bytes) message of a flow; messages share packets."""
    ends, waiting = [], list(messages)
    for now, packets in enumerate(opportunities(trace)):
        room = packets * PACKET
        while waiting and waiting[0][0] <= now and room:
            at, nbytes = waiting.pop(0)
            sent = min(room, nbytes)
            room -= sent
            if sent == nbytes:
                ends.append(now)
            else:
                waiting.insert(0, (at, nbytes - sent))
        if not waiting:
            return ends
    raise AssertionError


def arrivals(joined: Links, messages: Sequence[tuple[int, int]]) -> list[float]:
    """Return the arrivals in milliseconds of messages from the first rank to the second."""
    flows, ends = Flows(joined), []
    for at, nbytes in messages:
        flows.ready = np.maximum(flows.ready, [at / 1e3, 0.0])
        flows.run([Wave(np.array([0]), np.array([1]), np.array([nbytes]))])
        ends.append(float(flows.ready[1]) * 1e3)
    return ends


@settings(max_examples=80, deadline=None)
@given(trace=TRACES, messages=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60_000)), min_size=1, max_size=5))
def test_one_flow_ends_when_a_walk_through_the_milliseconds_says(
    trace: list[int], messages: list[tuple[int, int]]
) -> None:
    messages = sorted(messages)
    expected = by_the_millisecond(trace, messages)
    assert arrivals(following(2, trace), messages) == pytest.approx(expected, abs=1e-6)
    downwards = dataclasses.replace(following(2, trace, trace), up_rate=np.full(2, np.inf), up_paces=[None, None])
    assert arrivals(downwards, messages) == pytest.approx(expected, abs=1e-6)
    assert arrivals(following(2, trace, trace), messages) == pytest.approx(expected, abs=1e-6)


def test_what_comes_late_finds_a_downlink_by_its_own_trace() -> None:
    """The uplink is fast while the downlink is slow, and the reverse: a hundred packets wait between them."""
    up, down = [*[50] * 100, 100], [1, *[99] * 100, 100]
    assert arrivals(following(2, up, down), [(0, 101 * PACKET)]) == pytest.approx([100.0])
    assert arrivals(following(2, down, up), [(0, 101 * PACKET)]) == pytest.approx([150.0])


def test_messages_within_a_host_arrive_when_they_are_sent() -> None:
    flows = Flows(dataclasses.replace(following(1, [1, 2, 3]), host_of=np.zeros(2, dtype=int)))
    flows.ready = np.array([0.0105, 0.0])
    flows.run([Wave(np.array([0]), np.array([1]), np.array([50_000]))])
    assert flows.ready[1] == pytest.approx(0.0105, abs=1e-9)


@given(begin_s=st.floats(0, 1), nbytes=st.integers(1, 300_000), spacing_ms=st.integers(1, 5))
def test_a_constant_trace_is_the_constant_rate_to_within_an_opportunity(
    begin_s: float, nbytes: int, spacing_ms: int
) -> None:
    trace = [spacing_ms * number for number in range(1, 20)]
    (by_trace,) = arrivals(following(2, trace), [(begin_s * 1e3, nbytes)])  # type: ignore[list-item]
    assert by_trace - 1e3 * (begin_s + nbytes / mean_rate(trace)) == pytest.approx(0.0, abs=spacing_ms + 1e-6)


def ends_of(name: str, joined: Links) -> list[float]:
    """Return the ends of two successive sums; the second begins on each rank when its first has ended."""
    flows = Flows(joined)
    collective = options.build("collectives", Collective, name)
    for _ in range(2):
        flows.run(waves_of(collective, joined.num_ranks, Layout.dense(6000, key=(0,)), Lengths(dense)) or ())
        flows.ready = flows.ready + 0.01
    return flows.ready.tolist()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    n=st.integers(2, 7),
    traces=st.tuples(TRACES, TRACES),
    latency_s=st.floats(0, 0.05),
    times=st.integers(2, 3),
)
def test_more_opportunities_end_nothing_later(
    name: str, n: int, traces: tuple[list[int], list[int]], latency_s: float, times: int
) -> None:
    slow = following(n, *traces, latency_s=latency_s, **COSTS)
    up, down = (sorted(trace * times) for trace in traces)
    fast = following(n, up, down, latency_s=latency_s, **COSTS)
    assert (np.array(ends_of(name, fast)) <= np.array(ends_of(name, slow)) * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", NAMES)
def test_waves_in_one_go_are_the_same_messages_one_by_one(name: str) -> None:
    joined = following(5, [1, 2, 2, 9, 17], [3, 4, 4, 4, 8], latency_s=0.003, **COSTS)
    mixed = [[*paces[:3], None, pace([1, 30])] for paces in (joined.up_paces, joined.down_paces)]
    joined = dataclasses.replace(joined, up_paces=mixed[0], down_paces=mixed[1])
    waves = list(
        waves_of(options.build("collectives", Collective, name), 5, Layout.dense(6000, key=(0,)), Lengths(dense)) or ()
    )
    at_once, one_by_one = Flows(joined), Flows(joined)
    at_once.run(waves)
    one_by_one.run([Wave(*wave.messages()) for wave in waves])
    assert at_once.ready == pytest.approx(one_by_one.ready)
    assert at_once.sent == pytest.approx(one_by_one.sent)
