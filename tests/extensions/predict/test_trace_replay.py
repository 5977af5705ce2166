"""Steps over a trace: the mean of all steps in it, its tenths, and steps that represent many."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.core.errors import UsageError
from bench.extensions.predict.calibration import Validated
from bench.extensions.predict.links import Floats
from bench.extensions.predict.options import PredictConfig
from bench.extensions.predict.prediction import LEAST_STEPS, Prediction, replay
from bench.extensions.predict.request import ACK_SHARE, FRAME_PER_PAYLOAD, check, columns, predicted
from bench.extensions.predict.validation import notes
from tests.extensions.predict.calibrations import calibration


class Steps:
    """Steps whose duration depends on their start."""

    def __init__(self, seconds_at: Callable[[float], float]) -> None:
        self.begun: list[float] = []
        self._seconds_at = seconds_at

    def run(self, starts: Floats) -> tuple[Floats, Floats]:
        self.begun.append(float(starts.max()))
        return starts + self._seconds_at(self.begun[-1]), np.array([0.25, 0.75])


def slow_in_its_second_half(now: float) -> float:
    return 1.0 if now % 100 < 50 - 1e-9 else 2.0


def test_a_step_is_the_mean_over_the_trace_and_its_tenths_differ() -> None:
    """In the 100 s after the settling time, 50 steps are made in the first half and 25 in the second."""
    steps = Steps(slow_in_its_second_half)
    found = replay(steps.run, np.array([7.0, 6.5]), period_s=100.0, at_least_s=0.0, most_steps=500)
    assert steps.begun[0] == 100.0  # the trace starts again
    assert len(steps.begun) == 75
    assert found["step_time_s"] == pytest.approx(100 / 75)
    assert found["step_time_p95_s"] == pytest.approx(2.0)
    assert found["exposed_s"] == pytest.approx(0.5)
    slowest, fastest = found["slowest_window"], found["fastest_window"]
    assert (slowest.begin_s, slowest.end_s, slowest.step_time_s) == pytest.approx((50, 60, 2.0))
    assert (fastest.begin_s, fastest.end_s, fastest.step_time_s) == pytest.approx((0, 10, 1.0))


def test_short_steps_stand_for_those_that_would_follow() -> None:
    steps = Steps(lambda now: slow_in_its_second_half(now) / 100)
    found = replay(steps.run, np.zeros(2), period_s=100.0, at_least_s=0.0, most_steps=50)
    assert len(steps.begun) == 50
    assert found["step_time_s"] == pytest.approx(1 / 75)
    assert found["slowest_window"] is not None
    assert found["slowest_window"].begin_s >= 50 - 1e-9


def test_steps_longer_than_the_trace_have_no_tenths_of_it() -> None:
    found = replay(Steps(lambda now: 30.0).run, np.zeros(2), period_s=0.001, at_least_s=0.0, most_steps=500)
    assert found["step_time_s"] == pytest.approx(30.0)
    assert (found["slowest_window"], found["fastest_window"]) == (None, None)


def test_a_trace_of_few_steps_is_followed_several_times_and_wholly() -> None:
    steps = Steps(lambda now: 3.0 if now % 10 < 5 else 1.0)
    found = replay(steps.run, np.zeros(2), period_s=10.0, at_least_s=0.0, most_steps=500)
    assert len(steps.begun) == 3 * 6 > LEAST_STEPS
    assert found["step_time_s"] == pytest.approx(10 / 6)


def test_a_step_is_no_shorter_than_shared_cores_allow() -> None:
    found = replay(Steps(slow_in_its_second_half).run, np.zeros(2), period_s=100.0, at_least_s=4.0, most_steps=500)
    assert found["step_time_s"] == pytest.approx(4.0)
    assert found["exposed_s"] == pytest.approx(0.5 + (3 * 13 + 2 * 12) / 25, rel=0.05)


def step(**asked: Any) -> Prediction:
    return predicted(calibration(), check(PredictConfig(**asked), calibration()))


def written(path: Path, moments: Any) -> str:
    path.write_text("".join(f"{moment}\n" for moment in moments))
    return str(path)


BURSTS = [*range(1, 2000), *(moment for moment in range(2000, 4000) for _ in range(4)), 4000]
"""12 Mbit/s for two seconds, 48 Mbit/s for two."""


def mean_by_the_millisecond(trace: list[int], rounds: int) -> float:
    """Return the mean step of two ranks that halve and add buckets of 500 kB, ready after 0.25 s and 0.35 s.

    Both send at once by the same trace and receive without a limit; then they agree that all is finite, and update.
    """
    packets = np.bincount(np.array(trace) % trace[-1], minlength=trace[-1])  # a period's end starts the next
    now = steps = 0
    while now < rounds * trace[-1]:
        start = now
        for ready, messages in ((250, 2), (350, 2), (350, 1)):
            now = max(now, start + ready)
            for _ in range(messages):
                left = (8.0 if messages == 1 else 250_000.0) * FRAME_PER_PAYLOAD * (1 + ACK_SHARE)
                while left > 0:
                    left -= 1514.0 * packets[now % trace[-1]]
                    now += left > 0
        now, steps = now + 50, steps + 1
    return now / steps / 1000


def test_a_whole_prediction_is_a_plain_walk_through_the_trace(tmp_path: Path) -> None:
    prediction = step(collective="ring", hosts=2, uplink_trace=written(tmp_path / "bursts", BURSTS))
    walked = mean_by_the_millisecond(BURSTS, rounds=40)
    assert prediction.step_time_s == pytest.approx(walked, rel=0.01)
    assert prediction.bound_by == "network"


def test_a_constant_trace_is_the_constant_rate_and_the_same_bytes(tmp_path: Path) -> None:
    """Six successive messages, each delayed by less than an opportunity, one millisecond."""
    asked: dict[str, Any] = {"collective": "ring", "hosts": 3, "latency": "3ms"}
    by_trace = step(**asked, bandwidth_trace=written(tmp_path / "even", range(1, 1001)))
    by_rate = step(**asked, bandwidth="12.112mbit")
    assert by_trace.step_time_s == pytest.approx(by_rate.step_time_s, abs=(2 * 4 + 1) * 1e-3)
    for name in ("payload_bytes_per_step", "payload_bytes_max_per_step", "messages_per_step", "compression_ratio"):
        assert getattr(by_trace, name) == getattr(by_rate, name)


@pytest.mark.parametrize("collective", ["ring", "tree", "allgather", "server"])
def test_twice_the_opportunities_make_no_step_slower(tmp_path: Path, collective: str) -> None:
    dice = np.random.default_rng(5)
    trace = sorted([*dice.integers(0, 3000, 900).tolist(), 3000])
    asked: dict[str, Any] = {"hosts": 4, "collective": collective, "latency": "5ms"}
    steps = [
        step(**asked, bandwidth_trace=written(tmp_path / str(times), sorted(trace * times))).step_time_s
        for times in (1, 2, 4)
    ]
    assert all(slow >= fast for slow, fast in itertools.pairwise(steps))


def test_columns_name_the_trace_and_its_mean_rate(tmp_path: Path) -> None:
    path = written(tmp_path / "bursts", BURSTS)
    asked = check(PredictConfig(hosts=2, collective="ring", uplink_trace=path, downlink="1gbit"), calibration())
    row = columns(asked, calibration(), predicted(calibration(), asked))
    assert row["link_trace"].startswith("bursts (")
    assert (row["uplink_bps"], row["downlink_bps"]) == pytest.approx((1514 * 8 * len(BURSTS) / 4, 1e9))
    assert row["slowest_window"]["begin_s"] < 2 <= row["fastest_window"]["begin_s"]
    assert row["fastest_window"]["step_time_s"] < row["step_time_s"] < row["slowest_window"]["step_time_s"]
    constant = check(PredictConfig(hosts=2), calibration())
    assert "slowest_window" not in columns(constant, calibration(), predicted(calibration(), constant))


def test_hosts_of_a_file_may_differ_in_traces(tmp_path: Path) -> None:
    written(tmp_path / "bursts", BURSTS)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('[[host]]\ncount = 2\n[[host]]\nbandwidth_trace = "bursts"\n')
    slowed = step(cluster_file=str(cluster), collective="ring")
    assert slowed.step_time_s > step(hosts=3, collective="ring").step_time_s
    assert slowed.slowest_window is not None
    with pytest.raises(UsageError, match="leave out the trace"):
        check(PredictConfig(cluster_file=str(cluster)), calibration()).at_rate(1e6)


def test_only_a_trace_that_was_measured_is_within_the_validated_range(tmp_path: Path) -> None:
    path = written(tmp_path / "bursts", BURSTS)
    asked = check(PredictConfig(hosts=2, collective="ring", bandwidth_trace=path), calibration())
    cell = Validated(
        compressor="none", collective="ring", world_size=2, bandwidth_bps=asked.slowest_bps, latency_s=0.0,
        predicted_s=1.0, measured_s=1.0, error=0.0,
    )  # fmt: skip
    assert "bursts (" in notes(calibration(validated=(cell,)), asked)[0]
    by_it = Validated(**vars(cell) | {"link_trace": asked.link_trace})
    (known_error,) = notes(calibration(validated=(by_it,)), asked)
    assert known_error.startswith("Such step times were checked against 1 real run(s), whose ranks shared ")
    assert known_error.endswith("unlike these: off by 0.0% in the median, by 0.0% at most")
