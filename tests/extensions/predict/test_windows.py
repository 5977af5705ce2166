"""Windows after a silence: round trips by hand, and better conditions never delay a message."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.extensions.predict.links import LEAST_WINDOW_BYTES, SEGMENT_BYTES, SettlingWindows, Windows

ROUND_TRIP_S = 0.1
ENDS = np.array([0]), np.array([1])
NOBODY = np.array([], dtype=np.int64), np.array([], dtype=np.int64)


def leaves_in_s(
    nbytes: float, windows: Windows | None = None, *, per_byte_s: float = 0.0, round_trip_s: float = ROUND_TRIP_S
) -> float:
    of_message = (np.array([figure]) for figure in (nbytes, per_byte_s, round_trip_s))
    return float((windows or silent(60.0)).leaves_in_s(*ENDS, *of_message)[0])


def silent(silence_s: float, *before: float) -> Windows:
    """Return the connections of two ranks; the first sent these messages before the silence."""
    windows = Windows(2)
    for nbytes in before:
        leaves_in_s(nbytes, windows)
    windows.begin_step(silence_s)
    return windows


def settled_round_trips(
    *messages: tuple[float, float],
    silence_s: float = 0.0,
    steps: int = 5,
    round_trip_s: float = ROUND_TRIP_S,
    **link: float,
) -> list[float]:
    """Return the waits of a step's messages, in round trips, after the step was repeated.

    Args:
        messages: (bytes, round trips for which others continue after it) of each message.
        silence_s: silence before each step, in seconds.
        steps: number of steps.
        round_trip_s: round trip time of the link, in seconds.
        link: more arguments that describe the link.
    """
    windows = SettlingWindows(2)
    waits: list[float] = []
    for _ in range(steps):
        windows.begin_step(silence_s)
        waits.clear()
        for nbytes, others in messages:
            waits.append(leaves_in_s(nbytes, windows, round_trip_s=round_trip_s, **link) / round_trip_s)
            windows.end_wave(*ENDS, waits[-1] * round_trip_s)
            windows.end_wave(*NOBODY, others * round_trip_s)
    return waits


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
    leaves_in_s(1e6, windows)
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
    first, again, more = (leaves_in_s(nbytes, windows) for nbytes in (2e5, 2e5, 5e5))
    assert first == pytest.approx(3 * ROUND_TRIP_S)  # 14.5 + 29 + 58 + 116 kB
    assert again == 0
    assert more == pytest.approx(ROUND_TRIP_S)


@pytest.mark.parametrize(("silence_s", "round_trips"), [(0.1, 0), (0.2, 0), (0.3, 1), (0.6, 2), (0.9, 3)])
def test_settled_windows_are_halved_by_silence_between_steps_as_others(silence_s: float, round_trips: int) -> None:
    assert settled_round_trips((1e6, 0), silence_s=silence_s) == pytest.approx([round_trips])


@pytest.mark.parametrize(("others", "round_trips"), [(2, 0), (3, 0), (6, 1), (9, 2)])
def test_what_others_do_within_a_step_halves_the_window_of_every_message_anew(others: int, round_trips: int) -> None:
    """The window has grown to two messages, because the step has several; each lets it grow again."""
    waits = settled_round_trips((1e6, others), (1e6, others), (1e6, others), (1e6, 0))
    assert waits == pytest.approx([0] + 3 * [round_trips])


@pytest.mark.parametrize("short", [1, LEAST_WINDOW_BYTES, LEAST_WINDOW_BYTES + 1])
def test_silences_around_a_short_message_add_up_for_the_long_one(short: int) -> None:
    """A tree that sums something short and then something long has silent leaves while others continue."""
    assert settled_round_trips((short, 3), (1e6, 3))[1] == pytest.approx(2)


def test_silences_too_short_for_a_timeout_do_nothing_however_many_they_are_and_however_they_are_added_up() -> None:
    messages = [(1e3, 2.0)] * 20 + [(1e6, 0.0)]
    for steps in range(5, 60):
        assert settled_round_trips(*messages, steps=steps)[-1] == 0


def test_on_a_new_connection_a_window_grows_to_what_was_sent_and_no_further() -> None:
    """20 kB take a round trip; then 20, 40, ... 320 kB leave in one each, and the rest."""
    assert settled_round_trips((2e4, 0), (1e6, 0), steps=1) == pytest.approx([1, 5])


@pytest.mark.parametrize(("ranks", "round_trips"), [(2, 0), (6, 4)])
def test_what_is_slow_stays_slow(ranks: int, round_trips: int) -> None:
    """The ranks send one after another, in four round trips over new connections.

    While one other rank sends, a window is halved once; while five others send, it shrinks to its start.
    """
    windows = SettlingWindows(ranks)
    waits: list[float] = []
    for _ in range(5):
        windows.begin_step(0.0)
        for rank in range(ranks):
            ends = np.array([rank]), np.array([(rank + 1) % ranks])
            seconds = windows.leaves_in_s(*ends, np.array([3e5]), np.array([0.0]), np.array([ROUND_TRIP_S]))
            windows.end_wave(*ends, float(seconds[0]))
            waits.append(float(seconds[0]) / ROUND_TRIP_S)
    assert waits[:ranks] == pytest.approx(ranks * [4])
    assert waits[-ranks:] == pytest.approx(ranks * [round_trips])


def test_a_link_that_is_slower_than_the_window_never_rests() -> None:
    assert leaves_in_s(1e6, per_byte_s=1e-4) == pytest.approx(100.0)


@settings(max_examples=100, deadline=None)
@given(
    nbytes=st.lists(st.integers(0, 10_000_000), min_size=1, max_size=4),
    silence_s=st.floats(0, 5),
    per_byte_s=st.floats(0, 1e-4),
    round_trip_s=st.floats(0, 1),
    worse=st.floats(1, 3),
)
def test_nothing_better_makes_a_message_later(
    nbytes: list[int], silence_s: float, per_byte_s: float, round_trip_s: float, worse: float
) -> None:
    def of_all(silence_s: float, per_byte_s: float, round_trip_s: float, longer: float = 1.0) -> list[float]:
        windows = silent(silence_s)
        return [
            leaves_in_s(longer * length, windows, per_byte_s=per_byte_s, round_trip_s=round_trip_s) for length in nbytes
        ]

    given_s = of_all(silence_s, per_byte_s, round_trip_s)
    for other in (
        of_all(worse * silence_s, per_byte_s, round_trip_s),
        of_all(silence_s, worse * per_byte_s, round_trip_s),
        of_all(silence_s, per_byte_s, worse * round_trip_s),
    ):
        assert all(later >= now - 1e-9 for now, later in zip(given_s, other, strict=True))
    assert of_all(silence_s, per_byte_s, round_trip_s, worse)[0] >= given_s[0] - 1e-9
    assert all(seconds >= per_byte_s * length - 1e-9 for seconds, length in zip(given_s, nbytes, strict=True))
    if nbytes[0] <= LEAST_WINDOW_BYTES:
        assert given_s[0] == pytest.approx(per_byte_s * nbytes[0])


@settings(max_examples=100, deadline=None)
@given(
    messages=st.lists(st.tuples(st.integers(0, 10_000_000), st.integers(0, 12)), min_size=1, max_size=4),
    silence_s=st.floats(0, 5),
    per_byte_s=st.floats(0, 1e-6),
    round_trip_s=st.floats(1e-3, 1),
    worse=st.floats(1, 3),
)
def test_nothing_better_makes_a_settled_step_longer(
    messages: list[tuple[int, int]], silence_s: float, per_byte_s: float, round_trip_s: float, worse: float
) -> None:
    def step_s(silence_s: float, per_byte_s: float, round_trip_s: float) -> float:
        waits = settled_round_trips(*messages, silence_s=silence_s, per_byte_s=per_byte_s, round_trip_s=round_trip_s)
        return round_trip_s * (sum(waits) + sum(others for _, others in messages))

    given_s = step_s(silence_s, per_byte_s, round_trip_s)
    assert step_s(worse * silence_s, per_byte_s, round_trip_s) >= given_s - 1e-9
    assert step_s(silence_s, worse * per_byte_s, round_trip_s) >= given_s - 1e-9
    assert step_s(silence_s, per_byte_s, worse * round_trip_s) >= given_s - 1e-9
