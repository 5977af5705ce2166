"""Windows after a silence: round trips by hand, and that nothing better makes a message later."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.costs.links.windows import LEAST_WINDOW_BYTES, SEGMENT_BYTES, Windows

ROUND_TRIP_S = 0.1
ENDS = np.array([0]), np.array([1])


def leaves_in_s(
    nbytes: float, windows: Windows | None = None, *, byte_s: float = 0.0, round_trip_s: float = ROUND_TRIP_S
) -> float:
    of_message = (np.array([figure]) for figure in (nbytes, byte_s, round_trip_s))
    return float((windows or silent(60.0)).leaves_in_s(*ENDS, *of_message)[0])


def send(nbytes: float, windows: Windows, *, then_silent_s: float = 0.0) -> float:
    """Until it has left; others go on for so long."""
    seconds = leaves_in_s(nbytes, windows)
    windows.end_wave(*ENDS, 0.0, then_silent_s)
    return seconds


def silent(silence_s: float, *before: float) -> Windows:
    """Connections of two ranks, the first of which sent these messages before it was silent."""
    windows = Windows(2, are_new=False)
    windows.begin_step(0.0)
    for nbytes in before:
        send(nbytes, windows)
    windows.begin_step(silence_s)
    return windows


@pytest.mark.parametrize(("segments", "round_trips"), [(0, 0), (10, 0), (11, 1), (30, 1), (31, 2), (70, 2), (71, 3)])
def test_ten_segments_leave_at_once_and_then_twice_as_many_each_round_trip(segments: int, round_trips: int) -> None:
    assert leaves_in_s(segments * SEGMENT_BYTES) == pytest.approx(round_trips * ROUND_TRIP_S)


@pytest.mark.parametrize("before", [(), (1e6,), (1e3,) * 9, (1e6, 1e3)])
@pytest.mark.parametrize(("silence_s", "round_trips"), [(0.1, 0), (0.2, 0), (0.3, 1), (0.6, 2), (0.9, 3), (1.2, 4)])
def test_the_window_is_halved_for_every_timeout_of_silence(
    silence_s: float, round_trips: int, before: tuple[float, ...]
) -> None:
    grown = len(before) > 1 and sum(before) >= 2 * max(before)
    expected_s = max(0, round_trips - grown) * ROUND_TRIP_S
    assert leaves_in_s(1e6, silent(silence_s, *before)) == pytest.approx(expected_s)


def test_what_is_said_of_one_step_does_not_hold_for_the_next_but_one() -> None:
    windows = silent(0.6, 1e6, 1e6)
    send(1e6, windows)
    windows.begin_step(0.6)
    assert leaves_in_s(1e6, windows) == pytest.approx(2 * ROUND_TRIP_S)


@pytest.mark.parametrize(
    ("silence_s", "round_trip_s", "expected_s"), [(0.5, 0.2, 0.2), (0.5, 0.4, 0.3), (0.9, 0.2, 0.4)]
)
def test_a_longer_delay_saves_no_timeout(silence_s: float, round_trip_s: float, expected_s: float) -> None:
    """After 0.5 s two timeouts have passed with a round trip of 0.05 s, one with 0.2 or 0.3 s, and none with 0.4 s."""
    assert leaves_in_s(1e6, silent(silence_s), round_trip_s=round_trip_s) == pytest.approx(expected_s)


def test_what_was_sent_since_need_not_be_waited_for_again() -> None:
    windows = silent(60.0)
    first, again, more = (send(nbytes, windows) for nbytes in (2e5, 2e5, 5e5))
    assert first == pytest.approx(3 * ROUND_TRIP_S)  # 14.5 + 29 + 58 + 116 kB
    assert again == 0
    assert more == pytest.approx(ROUND_TRIP_S)


@pytest.mark.parametrize(("pause_s", "round_trips"), [(0.2, 0), (0.3, 1), (0.6, 2), (0.9, 3)])
def test_a_pause_within_a_step_halves_the_window_too(pause_s: float, round_trips: int) -> None:
    windows = silent(0.0, 1e6)
    assert send(1e6, windows, then_silent_s=pause_s) == 0
    assert send(1e6, windows) == pytest.approx(round_trips * ROUND_TRIP_S)


def test_pauses_add_up_around_messages_that_let_no_window_grow() -> None:
    """As where a tree sums something short and then something long: leaves are silent while the others go on."""
    windows, needs = silent(0.0), []
    for _ in range(3):
        send(LEAST_WINDOW_BYTES, windows, then_silent_s=0.3)
        needs.append(send(1e6, windows, then_silent_s=0.3))
        windows.begin_step(0.0)
    assert needs == pytest.approx([ROUND_TRIP_S, 2 * ROUND_TRIP_S, 2 * ROUND_TRIP_S])


def test_pauses_too_short_for_a_timeout_break_nothing_however_many_they_are() -> None:
    windows = silent(0.1)
    for _ in range(10):
        assert send(LEAST_WINDOW_BYTES, windows, then_silent_s=0.1) == 0
    assert send(1e6, windows) == 0


def test_new_connections_begin_with_ten_segments_and_have_grown_by_the_next_step() -> None:
    windows = Windows(2, are_new=True)
    windows.begin_step(0.0)
    assert send(3e5, windows) == pytest.approx(4 * ROUND_TRIP_S)
    windows.begin_step(0.0)
    assert send(3e5, windows) == 0


def test_a_link_that_is_slower_than_the_window_never_rests() -> None:
    assert leaves_in_s(1e6, byte_s=1e-4) == pytest.approx(100.0)


@settings(max_examples=100, deadline=None)
@given(
    nbytes=st.lists(st.integers(0, 10_000_000), min_size=1, max_size=4),
    silence_s=st.floats(0, 5),
    byte_s=st.floats(0, 1e-4),
    round_trip_s=st.floats(0, 1),
    pauses=st.integers(1, 6),
    worse=st.floats(1, 3),
)
def test_nothing_better_makes_a_message_later(
    nbytes: list[int], silence_s: float, byte_s: float, round_trip_s: float, pauses: int, worse: float
) -> None:
    def of_all(silence_s: float, byte_s: float, round_trip_s: float, longer: float = 1.0) -> list[float]:
        windows = silent(silence_s)
        seconds = []
        for length in nbytes:
            seconds.append(leaves_in_s(longer * length, windows, byte_s=byte_s, round_trip_s=round_trip_s))
            windows.end_wave(*ENDS, seconds[-1], 1.03 * pauses * round_trip_s)  # none lasts just a timeout
        return seconds

    given_s = of_all(silence_s, byte_s, round_trip_s)
    for other in (
        of_all(worse * silence_s, byte_s, round_trip_s),
        of_all(silence_s, worse * byte_s, round_trip_s),
        of_all(silence_s, byte_s, worse * round_trip_s),
    ):
        assert all(later >= now - 1e-9 for now, later in zip(given_s, other, strict=True))
    assert of_all(silence_s, byte_s, round_trip_s, worse)[0] >= given_s[0] - 1e-9
    assert all(seconds >= byte_s * length - 1e-9 for seconds, length in zip(given_s, nbytes, strict=True))
    if nbytes[0] <= LEAST_WINDOW_BYTES:
        assert given_s[0] == pytest.approx(byte_s * nbytes[0])
