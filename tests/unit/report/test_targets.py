from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from bench.core.errors import UsageError
from bench.report.comparison import Comparison, compare
from bench.report.comparison_table import comparison_table
from bench.report.groups import RunGroup
from bench.report.store import collect_runs
from bench.report.targets import BYTES, TIME, Need, Target, find_target, gain, mean_need, needs
from bench.report.verdict import caveats
from tests.testing.fake_rows import fake_row, fake_seeds, stored


def curve(seed: int, *accuracies: float, pace: float = 1.0, **values: Any) -> list[dict[str, Any]]:
    """Return a run that is evaluated every 10 steps, which take ``pace`` seconds."""
    given = {"run_id": f"{values.get('compressor')}-{seed}", "target_accuracy": None, "time_to_target_s": None} | values
    return [
        fake_row(seed=seed, step=10 * i, train_time_s=pace * i, test_accuracy=accuracy, **given)
        for i, accuracy in enumerate(accuracies, start=1)
    ]


def group(tmp_path: Path, *rows: dict[str, Any]) -> RunGroup:
    return RunGroup(label={"compressor": "none"}, runs=collect_runs(stored(tmp_path, rows)))


def seeds(*amounts: float, budget: float = math.inf) -> list[Need]:
    """Return one need per amount; an amount that is not below the budget is a miss."""
    return [
        Need(seed=seed, amount=amount if amount < budget else None, budget=budget)
        for seed, amount in enumerate(amounts, start=1)
    ]


def heading_to_text(comparison: Comparison, row: int) -> dict[str, str]:
    table = comparison_table(comparison)
    return {c.heading.replace("\n", " "): cell.text for c, cell in zip(table.columns, table.rows[row], strict=True)}


def test_the_first_evaluation_at_the_target_counts(tmp_path: Path) -> None:
    runs = group(tmp_path, *curve(1, 0.5, 0.9, 0.8, 0.95), *curve(2, 0.5, 0.6, 0.7, 0.8))
    target = Target(0.9)
    assert needs(runs, TIME, target) == [
        Need(seed=1, amount=2.0, budget=4.0),
        Need(seed=2, amount=None, budget=4.0),
    ]


def test_bytes_are_those_of_gradients_and_state_up_to_the_target(tmp_path: Path) -> None:
    rows = curve(1, 0.5, 0.9, 0.95, payload_bytes_per_step=100.0, state_bytes_per_step=5.0)
    rows[0]["payload_bytes_per_step"] = 1000.0  # the warm-up sends more
    assert needs(group(tmp_path, *rows), BYTES, Target(0.9)) == [
        Need(seed=1, amount=10 * 1005.0 + 10 * 105.0, budget=10 * 1005.0 + 20 * 105.0)
    ]


def test_the_target_that_the_run_was_given_needs_no_evaluations(tmp_path: Path) -> None:
    rows = [
        fake_row(seed=1, target_accuracy=0.9, time_to_target_s=3.0, train_time_s=9.0),
        fake_row(seed=2, target_accuracy=0.9, time_to_target_s=None, train_time_s=9.5),
    ]
    found = needs(group(tmp_path, *rows), TIME, Target())
    assert found == [Need(seed=1, amount=3.0, budget=9.0), Need(seed=2, amount=None, budget=9.5)]


def test_the_restricted_mean_is_the_area_under_kaplan_and_meiers_curve() -> None:
    source = np.random.default_rng(0)
    for _ in range(20):
        times = source.lognormal(2.0, 0.3, size=7)
        budget = float(np.quantile(times, 0.7))
        known = mean_need(seeds(*times, budget=budget))
        assert known is not None
        missed = times >= budget
        curve = stats.ecdf(stats.CensoredData.right_censored(np.minimum(times, budget), missed)).sf
        edges = [0.0, *(t for t in curve.quantiles if t < budget), budget]
        area = sum((b - a) * float(curve.evaluate(a)) for a, b in itertools.pairwise(edges))
        assert known.mean == pytest.approx(area)


def test_a_lower_bound_has_no_interval() -> None:
    known = mean_need(seeds(8.0, 9.0, 30.0, budget=20.0))
    assert known is not None
    assert (known.mean, known.low, known.high) == (pytest.approx(37 / 3), None, None)
    complete = mean_need(seeds(8.0, 9.0, 10.0))
    assert complete is not None
    assert complete.low is not None


def test_the_gain_is_paired_by_seed_up_to_the_smallest_budget() -> None:
    baseline, candidate = seeds(10.0, 12.0, 14.0, 25.0, budget=20.0), seeds(5.0, 6.5, 99.0, 8.0, budget=16.0)
    effect = gain(baseline, candidate[::-1])  # seeds are matched regardless of their order
    logs = np.log([10.0, 12.0, 14.0, 16.0]) - np.log([5.0, 6.5, 16.0, 8.0])
    reference = stats.ttest_1samp(logs, 0.0)
    interval = reference.confidence_interval(0.95)
    assert effect is not None
    assert effect.value == pytest.approx(math.exp(logs.mean()))
    assert (effect.low, effect.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))
    assert effect.p == pytest.approx(reference.pvalue)


def test_other_seeds_are_compared_without_pairs() -> None:
    other = [dataclasses.replace(need, seed=need.seed + 10) for need in seeds(5.0, 6.5, 8.0)]
    effect = gain(seeds(10.0, 12.0, 14.0), other)
    reference = stats.ttest_ind(np.log([10.0, 12.0, 14.0]), np.log([5.0, 6.5, 8.0]), equal_var=False)
    assert effect is not None
    assert effect.p == pytest.approx(reference.pvalue)


def test_nobody_at_the_target_tells_nothing_apart() -> None:
    assert gain(seeds(99.0, 99.0, budget=5.0), seeds(99.0, 99.0, budget=9.0)) is None
    assert gain(seeds(7.0, 8.0, 9.0), seeds(99.0, 99.0, 99.0, budget=5.0)) is None  # nor within the smaller budget
    unknown = [Need(seed=seed, amount=None, budget=None) for seed in (1, 2)]
    assert gain(seeds(7.0, 8.0), unknown) is None


def test_who_reaches_the_target_less_often_is_never_called_faster(tmp_path: Path) -> None:
    rows = [row for seed in (1, 2, 3, 4) for row in curve(seed, 0.5, 0.6, 0.9, pace=4.0 + seed / 100)]
    quick = [row for seed in (1, 2, 3) for row in curve(seed, 0.91, 0.92, pace=2.5 + seed / 100, compressor="topk")]
    quick += curve(4, 0.5, 0.6, pace=2.6, compressor="topk")
    comparison = compare(stored(tmp_path, [*rows, *quick]), metric=TIME, targets=["0.9"])
    assert comparison.rows[1].gain.verdict == "unclear"
    cells = heading_to_text(comparison, 1)
    assert cells["verdict"] == "unclear, miss"
    assert cells["time to 90 % [95% CI]"] == "≥3.19 s (3/4)"  # 2.51, 2.52, 2.53 and, for the miss, 2 x 2.6
    assert any("missed 90 %: topk (1 of 4 seeds)" in sentence for sentence in caveats(comparison))


def test_missing_every_time_is_slower_once_the_budget_says_so(tmp_path: Path) -> None:
    rows = [row for seed in (1, 2, 3) for row in curve(seed, 0.91, 0.92, 0.93, pace=1 + seed / 100)]
    rows += [row for seed in (1, 2, 3) for row in curve(seed, 0.1, 0.2, 0.3, pace=1.0, compressor="randomk")]
    comparison = compare(stored(tmp_path, rows), metric=TIME, targets=["0.9"])
    assert comparison.rows[1].gain.verdict == "slower"
    assert heading_to_text(comparison, 1)["time to 90 % [95% CI]"] == "≥3 s (0/3)"


@pytest.mark.parametrize("last", [0.92, 0.5])
def test_equal_runs_are_the_same_with_and_without_misses(tmp_path: Path, last: float) -> None:
    rows = [row for seed in (1, 2, 3) for row in curve(seed, 0.5, 0.91, 0.92, pace=1 + seed / 50)]
    rows += curve(4, 0.5, last, last)
    other = [row | {"compressor": "topk", "config_id": "b", "run_id": f"b{row['seed']}"} for row in rows]
    comparison = compare(stored(tmp_path, [*rows, *other]), metric=TIME, targets=["0.9"])
    assert comparison.rows[1].gain.verdict == "same"


def test_what_lies_beyond_the_budget_of_one_side_only_is_not_the_same(tmp_path: Path) -> None:
    reached = [fake_row(seed=seed, time_to_target_s=7.9 + seed / 1000, train_time_s=8.0) for seed in (1, 2, 3)]
    missed = fake_row(seed=4, time_to_target_s=None, train_time_s=8.0)
    slower = [fake_row(seed=seed, time_to_target_s=8.7, train_time_s=8.8, compressor="topk") for seed in (1, 2, 3, 4)]
    row = compare(stored(tmp_path, [*reached, missed, *slower]), metric=TIME).rows[1]
    assert row.gain.effect is not None
    assert row.gain.effect.value == pytest.approx(1.0, abs=0.01)
    assert row.gain.verdict == "unclear"


def test_several_targets_stand_side_by_side(tmp_path: Path) -> None:
    rows = [row for seed in (1, 2, 3) for row in curve(seed, 0.7, 0.8, 0.9, 0.97, pace=2 + seed / 100)]
    rows += [
        row for seed in (1, 2, 3) for row in curve(seed, 0.7, 0.8, 0.85, 0.9, pace=1 + seed / 50, compressor="topk")
    ]
    comparison = compare(stored(tmp_path, rows), metric=TIME, targets=["0.8", "best-1"])
    cells = heading_to_text(comparison, 1)
    assert cells["time to 80 % [95% CI]"].startswith("2.08 s [")
    assert cells["time to 96 %"] == "≥4.16 s (0/3)"
    assert cells["speed-up vs none [95% CI] to 96 %"] == "unclear"
    assert cells["bytes to 80 %"] == "~20 MB"  # by formula
    assert any(
        note == "best-1 is 96.00%: 1 point below the mean final accuracy of none + native, 97.00% over 3 seeds"
        for note in comparison_table(comparison).notes
    )
    alone = compare(stored(tmp_path, rows), metric=TIME, targets=["0.8"])
    assert alone.rows[1].gain.p is not None
    assert comparison.rows[1].gain.p == pytest.approx(2 * alone.rows[1].gain.p)  # corrected for two targets


def test_one_evaluation_says_little_of_the_time_to_another_target(tmp_path: Path) -> None:
    rows = fake_seeds([1.0, 2.0], train_time_s=10.0, step=10)
    comparison = compare(stored(tmp_path, rows), metric=TIME, targets=["0.9"])
    assert any("evaluated only once" in sentence for sentence in caveats(comparison))


@pytest.mark.parametrize("text", ["", "worst", "0", "1.1", "nan", "best", "best-"])
def test_what_is_no_target_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        UsageError,
        match=r"is not a target; write the accuracy to reach, above 0 and at most 1, or best-1: 1 point below",
    ):
        find_target(text, group(tmp_path, fake_row()))


def diverged(seed: int, **values: Any) -> list[dict[str, Any]]:
    """Return a run whose loss was NaN after 20 steps."""
    lost = {
        "status": "failed",
        "error": "the loss is nan at step 21",
        "error_kind": "Diverged",
    }
    rows = curve(seed, 0.1, 0.5, None, **values)  # type: ignore[arg-type]
    return [row | lost for row in rows[:2]] + [rows[2] | lost | {"train_time_s": None, "step": 21}]


@pytest.mark.parametrize("metric", [TIME, BYTES])
def test_who_diverged_would_have_missed_with_any_budget(tmp_path: Path, metric: str) -> None:
    runs = [curve(1, 0.5, 0.95, 0.96), diverged(2), curve(3, 0.1, 0.2, 0.3, status="failed", error="rank 1 was killed")]
    known = needs(group(tmp_path, *itertools.chain(*runs)), metric, Target(0.9))
    assert [(need.seed, need.amount is None, need.budget == math.inf) for need in known] == [
        (1, False, False),
        (2, True, True),
    ]
    mean = mean_need(known)
    assert mean is not None
    assert (mean.mean, mean.low) == (known[0].amount, None)


def test_a_side_that_diverges_is_not_sooner(tmp_path: Path) -> None:
    dense = [curve(seed, 0.5, 0.5, 0.5, 0.95, compressor="none") for seed in (1, 2, 3, 4)]
    sparse = [curve(seed, 0.5, 0.95, 0.95, 0.95, compressor="topk", collective="allgather") for seed in (1, 2)]
    lost = [diverged(seed, compressor="topk", collective="allgather") for seed in (3, 4)]
    comparison = compare(stored(tmp_path, list(itertools.chain(*dense, *sparse, *lost))), metric=TIME, targets=["0.9"])
    assert comparison.rows[1].gain.verdict == "unclear"
    assert heading_to_text(comparison, 1)["verdict"].startswith("unclear")


def test_by_the_time_to_a_target_who_reached_it_more_often_stands_first(tmp_path: Path) -> None:
    once = [curve(1, 0.95, pace=1.0, compressor="sign"), *(curve(seed, 0.5, compressor="sign") for seed in (2, 3))]
    always = [curve(seed, 0.5, 0.95, pace=9.0, compressor="topk") for seed in (1, 2, 3)]
    dense = [curve(seed, 0.5, 0.95, pace=20.0, compressor="none") for seed in (1, 2, 3)]
    rows = stored(tmp_path, list(itertools.chain(*dense, *once, *always)))
    comparison = compare(rows, metric=TIME, targets=["0.9"], sort=TIME)
    assert [row.group.label["compressor"] for row in comparison.candidates] == ["topk", "sign"]


def test_bytes_are_not_known_where_steps_were_counted_anew(tmp_path: Path) -> None:
    """With fewer ranks there are more steps, with more ranks fewer: both times the number of steps made is unknown."""
    for step, ranks in ((15, 4), (30, 1)):
        rows = curve(1, 0.5, 0.95)
        rows[1] |= {"step": step, "world_size": ranks}
        assert needs(group(tmp_path, *rows), BYTES, Target(0.9)) == []
        assert needs(group(tmp_path, *rows), TIME, Target(0.9))[0].amount == 2.0


def test_what_is_counted_as_missed_is_in_the_same_cells_whether_bytes_are_known_or_not(tmp_path: Path) -> None:
    rows = [row for seed in (1, 2) for row in curve(seed, 0.5, 0.95, payload_bytes_per_step=None)]
    raw = {}
    for cell in comparison_table(compare(stored(tmp_path, rows), metric=TIME, targets=["0.9"])).rows[0]:
        raw |= cell.raw
    assert (raw["num_reached_0.9"], raw["num_missed_0.9"]) == (2, 0)
    assert raw["bytes_to_target_0.9"] is None


def test_every_target_has_its_time_whatever_the_metric(tmp_path: Path) -> None:
    rows = [row for seed in (1, 2) for row in curve(seed, 0.5, 0.95, 0.96)]
    comparison = compare(stored(tmp_path, rows), metric="samples_per_s", targets=["0.9", "0.96"])
    cells = heading_to_text(comparison, 0)
    assert (cells["time to 90 %"], cells["time to 96 %"]) == ("2 s", "3 s")


def test_a_target_that_everybody_has_from_the_start_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no training is needed to reach that, so subtract less"):
        compare(stored(tmp_path, fake_seeds([1.0, 2.0])), metric=TIME, targets=["best-99.5"])


def test_seeds_that_would_do_follow_from_those_that_an_effect_rests_on(tmp_path: Path) -> None:
    """One seed is left, and one diverged: together they have a spread."""
    rows = [row for seed in (1, 2, 3) for row in curve(seed, 0.5, 0.95, 0.96, pace=1 + seed / 10)]
    other = {"compressor": "topk", "collective": "allgather"}
    rows += [*curve(3, 0.5, 0.95, 0.96, pace=1.1, **other), *diverged(1, **other)]
    comparison = compare(stored(tmp_path, rows), metric=TIME, targets=["0.9"])
    assert comparison.rows[1].gain.verdict == "unclear"
    assert comparison.rows[1].gain.held_back or any("(2 seeds; " in sentence for sentence in caveats(comparison))
