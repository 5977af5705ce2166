"""TCP's windows: which messages wait for them, and for how long."""

from __future__ import annotations

import numpy as np
import pytest

from bench.costs.flows import Flows
from bench.costs.links import Links
from bench.costs.windows import INITIAL_BYTES, TIMEOUT_S, Windows
from collectives.rounds.waves import Wave

RTT_S = 0.1


def stall_s(windows: Windows, begin: float, nbytes: int, byte_s: float = 0.0) -> float:
    """Of one message from rank 0 to rank 1."""
    stalls = windows.stall_s(
        np.array([0]),
        np.array([1]),
        begin=np.array([begin]),
        nbytes=np.array([nbytes]),
        byte_s=np.array([byte_s]),
        rtt_s=np.array([RTT_S]),
    )
    return float(stalls[0])


@pytest.mark.parametrize(("windows_full", "flights"), [(1, 1), (1.1, 2), (3, 2), (3.1, 3), (7, 3), (7.1, 4)])
def test_a_new_connection_doubles_what_it_sends_each_round_trip(windows_full: float, flights: int) -> None:
    nbytes = int(windows_full * INITIAL_BYTES)
    assert stall_s(Windows(2), 0.0, nbytes) == pytest.approx((flights - 1) * RTT_S)


def test_a_link_that_is_busy_all_the_time_does_not_wait() -> None:
    assert stall_s(Windows(2), 0.0, 10 * INITIAL_BYTES, byte_s=RTT_S / INITIAL_BYTES) == 0.0
    half = 0.5 * RTT_S / INITIAL_BYTES  # the first flight takes half a round trip, the second a whole one
    assert stall_s(Windows(2), 0.0, 10 * INITIAL_BYTES, byte_s=half) == pytest.approx(0.5 * RTT_S)


def test_a_window_stays_open_until_the_connection_is_silent() -> None:
    windows, nbytes = Windows(2), 4 * INITIAL_BYTES
    ends = stall_s(windows, 0.0, nbytes)
    assert ends == pytest.approx(2 * RTT_S)
    assert stall_s(windows, ends + 0.9 * TIMEOUT_S, nbytes) == 0.0
    assert stall_s(windows, ends + 2.0 * TIMEOUT_S, nbytes) == pytest.approx(RTT_S)  # half of it is left
    assert stall_s(windows, 1e6, nbytes) == pytest.approx(2 * RTT_S)


def test_short_messages_do_not_keep_it_open_for_long_ones() -> None:
    """Each comes after more than a timeout, and by the next long one the window is that of a new connection."""
    windows, nbytes = Windows(2), 2 * INITIAL_BYTES
    stall_s(windows, 0.0, nbytes)
    assert stall_s(windows, 0.4, 8) == 0.0
    assert stall_s(windows, 0.5, nbytes) == pytest.approx(RTT_S)


def test_connections_and_directions_are_told_apart() -> None:
    windows = Windows(3)
    stall_s(windows, 0.0, 3 * INITIAL_BYTES)
    both = windows.stall_s(
        np.array([[0], [1]]),
        np.array([0, 1]),
        begin=np.array([[0.1], [0.1]]),
        nbytes=np.array([[0, 3], [3, 0]]) * INITIAL_BYTES,
        byte_s=np.zeros((2, 2)),
        rtt_s=np.full((2, 2), RTT_S),
    )
    np.testing.assert_allclose(both, [[0.0, 0.0], [RTT_S, 0.0]])


@pytest.mark.parametrize("each_to_each", [True, False])
def test_sums_wait_for_windows_where_links_have_a_latency(each_to_each: bool) -> None:
    """Two ranks send each other two windows: one round trip more, on links without a limit; nothing without latency."""
    ends = []
    for latency_s in (0.0, RTT_S / 2):
        unlimited = np.full(2, np.inf)
        flows = Flows(Links.of_hosts(unlimited, unlimited, np.full(2, latency_s)))
        ranks = np.arange(2)
        nbytes = np.full((2, 2) if each_to_each else 2, 2 * INITIAL_BYTES)
        targets = ranks if each_to_each else ranks[::-1]
        flows.run([Wave(ranks, targets, nbytes, each_to_each=each_to_each)])
        ends.append(float(flows.ready.max()))
    assert ends == pytest.approx([0.0, 1.5 * RTT_S])
