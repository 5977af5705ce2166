"""Levels of density, composed times, and the decision that pairs of seeds allow."""

import dataclasses
import math
import statistics
from typing import Any

import pytest

from bench.core.schema import METRICS_BY_NAME
from bench.deciding.decision import (
    SHARED_PART,
    Evidence,
    best_of,
    decide,
    log_ratios,
    shared_error,
)
from bench.deciding.rates import crossing
from bench.deciding.step_times import MOST_LEVELS, LinkStepTimes, levels_of
from bench.deciding.study import DecideConfig
from bench.deciding.trajectory import Trajectory, trajectory_of
from bench.report.statistics import Effect, two_sided_quantile
from bench.report.store import Run
from tests.testing.fake_results import fake_text_run
from tests.testing.fake_rows import fake_row

RULE = DecideConfig()
TIMES = LinkStepTimes(nbytes=[100.0, 1000.0], seconds=[[[0.01, 0.1]], [[0.01, 0.1]], [[0.01, 0.1]]])


def run_of(accuracies: list[float], seed: int = 1, **values: object) -> Run:
    """Return a run that evaluates every 10 steps, with 1000 bytes per step before the first evaluation, then 100."""
    return Run(
        rows=[
            dict.fromkeys(METRICS_BY_NAME)
            | fake_row(
                seed=seed,
                step=10 * place,
                test_accuracy=accuracy,
                train_time_s=float(place),
                payload_bytes_per_step=1000.0 if place == 1 else 100.0,
                state_bytes_per_step=0.0,
                **{"status": "ok"} | values,
            )
            for place, accuracy in enumerate(accuracies, 1)
        ]
    )


def trajectory(steps: int, seed: int, accuracy: float = 0.95, *, reached: bool = True) -> Trajectory:
    """Return a training with steps of 100 bytes, at whose end the target is reached or missed."""
    return Trajectory(
        seed=seed,
        intervals=[(0, steps, 100.0)],
        start_s=0.0,
        num_to_target=1 if reached else None,
        accuracy=accuracy,
        train_time_s=1.0,
        run=run_of([accuracy], seed),
    )


def evidence(steps: list[int], times: LinkStepTimes = TIMES, accuracy: float = 0.95) -> Evidence:
    return Evidence(
        method="m", trajectories=[trajectory(n, seed, accuracy) for seed, n in enumerate(steps)], step_times=times
    )


def bounds(effect: Effect | None) -> tuple[float, float]:
    assert effect is not None
    assert effect.low is not None
    assert effect.high is not None
    return effect.low, effect.high


def test_a_trajectory_ends_at_its_target() -> None:
    found = trajectory_of(run_of([0.5, 0.9, 0.8, 0.95]), 0.9)
    assert found.intervals == [(0, 10, 1000.0), (10, 10, 100.0), (20, 10, 100.0), (30, 10, 100.0)]
    assert (found.num_to_target, found.steps, found.accuracy, found.train_time_s) == (
        2,
        {1000.0: 10, 100.0: 10},
        0.95,
        2.0,
    )
    missed = trajectory_of(run_of([0.5, 0.6]), 0.9)
    assert (missed.num_to_target, sum(missed.steps.values()), missed.train_time_s) == (None, 20, 2.0)
    diverged = trajectory_of(run_of([0.95], status="failed", error="training has diverged", error_kind="Diverged"), 0.9)
    assert (diverged.num_to_target, diverged.accuracy) == (None, None)


def test_the_first_steps_of_a_training_take_extra_time() -> None:
    run = run_of([0.5, 0.6, 0.9])
    for row, trained_s in zip(run.rows, (3.0, 4.0, 5.0), strict=True):  # 10 later steps take 1 s
        row |= {"train_time_s": trained_s, "payload_bytes_per_step": 100.0}
    assert trajectory_of(run, 0.9).start_s == pytest.approx(2.0)
    run.rows[0]["payload_bytes_per_step"] = 1000.0  # no later step sends as much
    assert trajectory_of(run, 0.9).start_s == 0.0
    assert trajectory_of(run_of([0.9]), 0.9).start_s == 0.0
    first = dataclasses.replace(trajectory(10, 1), start_s=2.0)
    alone = Evidence(method="m", trajectories=[first], step_times=TIMES).times[0].seconds
    assert alone == pytest.approx(evidence([10]).times[0].seconds + 2.0)


def test_steps_with_about_equal_bytes_are_one_level() -> None:
    intervals = [(0, 10, 1000.0), (10, 10, 100.0), (20, 10, 101.0), (30, 30, 99.0)]
    assert levels_of(intervals) == [30, 0]
    assert levels_of(intervals, is_one=True) == [30]


def test_there_are_at_most_eight_levels() -> None:
    levels = levels_of([(place, 1, 2.0**place) for place in range(20)])
    assert len(levels) == MOST_LEVELS
    assert levels_of([(0, 5, 0.0), (5, 5, 0.0)]) == [0]


def test_the_time_of_a_training_is_the_sum_of_its_steps() -> None:
    assert TIMES.training_s({100.0: 10, 1000.0: 5}) == pytest.approx(10 * 0.01 + 5 * 0.1)
    assert TIMES.training_s({550.0: 2}) == pytest.approx(2 * 0.055)  # half way between the levels
    uneven = LinkStepTimes(nbytes=[100.0], seconds=[[[1.0], [1.2], [0.8]], [[3.0]]])
    assert [uneven.training_s({100.0: 2}, job) for job in (0, 1, None)] == pytest.approx([2.0, 6.0, 4.0])


def test_a_seed_that_missed_the_target_is_never_faster() -> None:
    baseline = Evidence(
        method="b", trajectories=[trajectory(100, 1), trajectory(100, 2), trajectory(100, 3)], step_times=TIMES
    )
    candidate = Evidence(
        method="c",
        trajectories=[trajectory(50, 1), trajectory(50, 2, reached=False), trajectory(200, 3, reached=False)],
        step_times=TIMES,
    )
    assert log_ratios(baseline.times, candidate.times) == pytest.approx([math.log(2), 0.0, -math.log(2)])
    missing = Evidence(
        method="b", trajectories=[trajectory(100, 1, reached=False), trajectory(100, 2)], step_times=TIMES
    )
    assert log_ratios(missing.times, candidate.times) == [0.0]  # only the second seed makes a pair


def of_jobs(*jobs: list[float]) -> LinkStepTimes:
    return LinkStepTimes(nbytes=[100.0], seconds=[[[block] for block in blocks] for blocks in jobs])


def test_the_error_of_shared_step_times_is_that_of_their_ratio() -> None:
    slow, fast = of_jobs([0.02], [0.022], [0.018], [0.02]), of_jobs([0.01], [0.011], [0.009], [0.01])
    assert shared_error(evidence([10], slow), evidence([10], fast), 0.01) == pytest.approx(0.0, abs=1e-12)
    steady = of_jobs([0.01], [0.01], [0.01], [0.01])
    logs = [math.log(each / 0.01) for each in (0.02, 0.022, 0.018, 0.02)]
    expected = two_sided_quantile(0.01, 3) * statistics.stdev(logs) / 2
    assert shared_error(evidence([10], slow), evidence([10], steady), 0.01) == pytest.approx(expected)


def test_further_blocks_of_a_job_do_not_reduce_its_error() -> None:
    steady = of_jobs([0.01], [0.01], [0.01])
    errors = [
        shared_error(evidence([10], of_jobs(*([seconds] * blocks for seconds in (0.02, 0.022, 0.018)))), own, 0.01)
        for blocks, own in ((1, evidence([10], steady)), (50, evidence([10], of_jobs(*[[0.01] * 50] * 3))))
    ]
    assert errors[0] == pytest.approx(errors[1])
    one_job = of_jobs([0.02, 0.022, 0.018]), of_jobs([0.01] * 3)
    assert shared_error(evidence([10], one_job[0]), evidence([10], one_job[1]), 0.01) == math.inf


def test_decisions() -> None:
    baseline = evidence([100, 104, 98, 102, 100, 99])
    faster = decide(baseline, evidence([50, 51, 50, 49, 52, 50]), RULE)
    assert (faster.verdict, faster.num_seeds, faster.num_missed) == ("faster", 6, 0)
    low, high = bounds(faster.factor)
    assert low < 2.0 < high
    assert decide(baseline, evidence([200, 201, 203, 199, 205, 200]), RULE).verdict == "slower"
    assert decide(baseline, baseline, RULE).verdict == "same"
    assert decide(evidence([100, 104]), evidence([50, 51]), RULE).verdict == "open"


def test_the_step_times_take_their_part_of_alpha() -> None:
    noisy, steady = of_jobs([0.01], [0.03], [0.01], [0.02]), of_jobs([0.01], [0.01], [0.01], [0.01])
    pair = evidence([100] * 8, steady), evidence([60, 61, 60, 59, 62, 60, 61, 60], noisy)
    wide, narrow = decide(*pair, RULE), decide(pair[0], evidence([60, 61, 60, 59, 62, 60, 61, 60], steady), RULE)
    error = shared_error(*pair, RULE.alpha * SHARED_PART)
    assert wide.verdict == "open"
    assert narrow.verdict == "faster"
    low, high = bounds(wide.factor)
    assert math.log(high / low) > 2 * error


def test_a_method_that_misses_the_target_is_never_the_same() -> None:
    baseline, fast = evidence([100, 104, 98, 102, 100]), [50, 50, 50, 50, 50]
    never = Evidence(
        method="m", trajectories=[trajectory(n, seed, reached=False) for seed, n in enumerate(fast)], step_times=TIMES
    )
    decision = decide(baseline, never, RULE)
    assert (decision.verdict, decision.factor, decision.num_missed) == ("missed", None, 5)
    once = dataclasses.replace(never, trajectories=[trajectory(100, 0), *never.trajectories[1:]])
    assert decide(evidence([100] * 5), once, RULE).verdict == "open"
    assert decide(evidence([100] * 5), evidence([100] * 5), RULE).verdict == "same"


def _times(factor: float) -> Effect:
    return Effect(value=factor, low=None, high=None, p=None)


def test_the_best_method_is_faster_then_accurate() -> None:
    decisions = [
        dataclasses.replace(decide(evidence([100] * 5), evidence([50] * 5), RULE), **changes)
        for changes in (
            {"method": "a", "verdict": "open", "factor": _times(9.0)},
            {"method": "b", "verdict": "faster", "factor": _times(5.0), "accuracy_verdict": "below"},
            {"method": "c", "verdict": "faster", "factor": _times(2.0), "accuracy_verdict": "within"},
            {"method": "d", "verdict": "faster", "factor": _times(3.0), "accuracy_verdict": "within"},
        )
    ]
    assert best_of(decisions).method == "d"
    assert best_of(decisions[:2]).method == "b"


def test_accuracy_is_judged_beside_time() -> None:
    baseline = evidence([100] * 6, accuracy=0.95)
    assert decide(baseline, evidence([50] * 6, accuracy=0.948), RULE).accuracy_verdict == "within"
    assert decide(baseline, evidence([50] * 6, accuracy=0.92), RULE).accuracy_verdict == "below"
    assert decide(evidence([100] * 2), evidence([50] * 2), RULE).accuracy_verdict == "open"


@pytest.mark.parametrize(
    ("factors", "rate"), [([4.0, 2.0, 1.5], math.inf), ([2.0, 1.0, 0.5], 40e6), ([4.0, 2.0, 0.5], 80e6)]
)
def test_the_rate_up_to_which_a_method_is_faster(factors: list[float], rate: float) -> None:
    assert crossing([10e6, 40e6, 160e6], factors) == pytest.approx(rate)


def text_run(bits: list[float], seed: int = 1, **values: Any) -> Run:
    rows = fake_text_run(bits, seed=seed, payload_bytes_per_step=100.0, **values)
    return Run(rows=[dict.fromkeys(METRICS_BY_NAME) | row for row in rows])


def text_evidence(steps: list[int], bits: float | list[float], method: str = "m") -> Evidence:
    """Return trainings of a text with these numbers of steps of 100 bytes and these final bits per byte."""
    ends = bits if isinstance(bits, list) else [bits] * len(steps)
    found = [trajectory_of(text_run([each], seed), 2.1) for seed, each in enumerate(ends)]
    return Evidence(
        method=method,
        trajectories=[
            dataclasses.replace(each, intervals=[(0, number, 100.0)], num_to_target=1)
            for each, number in zip(found, steps, strict=True)
        ],
        step_times=TIMES,
    )


DENSE, FAST = [100, 104, 98, 102, 100, 99], [50, 51, 50, 49, 52, 50]
NOISE = [1.0, 1.001, 0.999, 1.0, 1.001, 0.999]


def test_a_trajectory_ends_at_few_enough_bits() -> None:
    found = trajectory_of(text_run([3.0, 2.4, 2.1, 2.0]), 2.4)
    assert (found.num_to_target, sum(found.steps.values()), found.accuracy) == (2, 20, 2.0)
    assert trajectory_of(text_run([3.0, 2.4]), 2.3).num_to_target is None


@pytest.mark.parametrize(
    ("bits", "verdict"), [(2.01, "within"), (1.9, "within"), (2.04, "above"), ([1.9, 2.2] * 3, "open")]
)
def test_the_margin_is_one_per_cent_more_bits(bits: float | list[float], verdict: str) -> None:
    assert decide(text_evidence(DENSE, 2.0), text_evidence(FAST, bits), RULE).accuracy_verdict == verdict


def test_the_change_is_a_ratio_of_geometric_means() -> None:
    theirs, ours = [2.0, 2.2, 2.1, 2.0, 2.1, 2.2], [2.1, 2.2, 2.1, 2.0, 2.2, 2.2]
    decision = decide(text_evidence(DENSE, theirs), text_evidence(FAST, ours), RULE)
    ratio = (math.prod(ours) / math.prod(theirs)) ** (1 / 6)
    low, high = bounds(decision.accuracy)
    assert low < ratio - 1.0 < high
    assert decision.accuracy
    assert decision.accuracy.value == pytest.approx(ratio - 1.0)
