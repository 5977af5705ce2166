"""The rule that decides about a claim, and the figures that it uses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench.core.rows import RowWriter
from bench.report.targets import TIME
from benchmarks.published.claims import Bound, Claim, Stated, above, judge, undecided_sides, verdict
from benchmarks.published.figures import (
    Difference,
    Figure,
    Gain,
    Mean,
    Measure,
    SweepRuns,
    faster,
    mean_kilobytes,
    waiting_share,
)
from tests.testing.fake_rows import fake_row, fake_seeds, topk_seeds

DENSE, SPARSE = {"compressor": "none"}, {"compressor": "topk:*"}


def runs_of(folder: Path, *groups: list[dict[str, object]]) -> SweepRuns:
    path = folder / "made_up.csv"
    RowWriter(path).extend([row for group in groups for row in group])
    return SweepRuns.read(path)


def claim(measure: Measure | dict[str, Measure], bound: float = 1.0, reason: str = "") -> Claim:
    claimed = above(bound)
    return Claim(text="", source="", setup="", sweep="together", measure=measure, claimed=claimed, reason=reason)


@pytest.mark.parametrize(
    ("low", "high", "side", "expected"),
    [
        (1.1, 1.3, "above", "reproduced"),
        (0.7, 0.9, "above", "not reproduced"),
        (0.9, 1.3, "above", "undecided"),
        (1.0, 1.3, "above", "undecided"),  # a value at the bound is on neither side
        (0.7, 0.9, "below", "reproduced"),
        (1.1, 1.3, "below", "not reproduced"),
        (None, None, "above", "undecided"),
        (0.95, 1.05, "above", "same"),
        (0.89, 1.02, "above", "undecided"),
    ],
)
def test_only_an_interval_wholly_on_one_side_decides(
    low: float | None, high: float | None, side: str, expected: str
) -> None:
    figure = Figure(value=1.2, low=low, high=high, n=3, unit="factor")
    assert verdict(figure, Bound(side=side, value=1.0)) == expected  # type: ignore[arg-type]
    two_seeds = dataclasses.replace(figure, n=2)
    assert verdict(two_seeds, Bound(side=side, value=1.0)) == "undecided"  # type: ignore[arg-type]


def test_figures_are_paired_by_seed_and_carry_their_interval(tmp_path: Path) -> None:
    runs = runs_of(
        tmp_path,
        fake_seeds([100, 200, 400] * 2, accuracy=[0.5, 0.6, 0.7] * 2),
        topk_seeds([150, 300, 600] * 2, accuracy=[0.49, 0.59, 0.69] * 2),
    )
    speed = faster(SPARSE, DENSE).of(runs)
    assert (speed.value, speed.low, speed.high) == pytest.approx((1.5, 1.5, 1.5))  # although the seeds differ much
    points = Difference(which=SPARSE, than=DENSE).of(runs)
    assert (points.value, points.low, points.high) == pytest.approx((-0.01, -0.01, -0.01), abs=1e-9)
    assert judge(claim(faster(SPARSE, DENSE)), runs).verdict == "reproduced"
    assert judge(claim(Difference(which=SPARSE, than=DENSE), -0.005), runs).verdict == "not reproduced"


def test_a_share_of_a_step_counts_what_is_not_hidden(tmp_path: Path) -> None:
    row = {"step_time_s": 0.4, "exposed_s": 0.3}
    figure = Mean(which=DENSE, value=waiting_share).of(runs_of(tmp_path, fake_seeds([160] * 5, **row)))
    assert str(figure) == "75.0 [75.0, 75.0] %, 5 seeds"


def test_a_missed_target_counts_as_at_least_its_budget(tmp_path: Path) -> None:
    reached = topk_seeds([100, 100, 100], time_to_target_s=2.0, train_time_s=8.0)
    missed = fake_seeds([100, 100, 100], time_to_target_s=None, train_time_s=8.0)
    figure = Gain(which=SPARSE, than=DENSE, metric=TIME).of(runs_of(tmp_path, reached, missed))
    assert figure.value == pytest.approx(4.0)
    assert figure.note == "up to 8 s, where 0 of 3 and 3 of 3 seeds had reached it"


@pytest.mark.parametrize(
    ("missing", "expected"), [(None, "undecided (a seed of the better side missed the target)"), (3.0, "reproduced")]
)
def test_the_better_side_decides_only_where_all_its_seeds_reached_the_target(
    missing: float | None, expected: str, tmp_path: Path
) -> None:
    reached = topk_seeds([100] * 5, time_to_target_s=2.0, train_time_s=8.0)
    reached[0]["time_to_target_s"] = missing
    missed = fake_seeds([100] * 5, time_to_target_s=None, train_time_s=900.0)
    judged = judge(claim(Gain(which=SPARSE, than=DENSE, metric=TIME), 0.5), runs_of(tmp_path, reached, missed))
    assert judged.verdict == expected


def test_bytes_of_a_whole_training_count_each_epoch_with_its_own(tmp_path: Path) -> None:
    evaluations = [fake_row(step=step, payload_bytes_per_step=sent) for step, sent in ((10, 4000.0), (30, 1000.0))]
    (run,) = runs_of(tmp_path, evaluations).runs
    assert mean_kilobytes(run) == pytest.approx((10 * 4 + 20 * 1) / 30)


def test_claims_without_a_verdict_need_more_rows(tmp_path: Path) -> None:
    faster_topk = claim(faster(SPARSE, DENSE))
    few = runs_of(tmp_path, fake_seeds([100, 110, 90]), topk_seeds([150, 160, 140]))
    assert undecided_sides([faster_topk], few, "together") == [SPARSE, DENSE]
    assert undecided_sides([dataclasses.replace(faster_topk, counts=False)], few, "together") == [SPARSE, DENSE]
    assert undecided_sides([faster_topk], few, "hylo") == []
    assert undecided_sides([Stated(text="", source="", verdict="built", why="")], few, "together") == []
    (tmp_path / "more").mkdir()
    more = runs_of(tmp_path / "more", fake_seeds([100, 110, 90] * 2), topk_seeds([150, 160, 140] * 2))
    assert undecided_sides([faster_topk], more, "together") == []


def test_rows_that_are_missing_are_said(tmp_path: Path) -> None:
    measure = faster(SPARSE, DENSE)
    nothing = judge(claim(measure), SweepRuns.read(tmp_path / "none.csv"))
    assert (nothing.verdict, nothing.measured) == ("not measured", "no row: compressor topk:*")
    failed = runs_of(tmp_path, fake_seeds([100, 110]), topk_seeds([1, 1], status="failed"))
    assert judge(claim(measure), failed).measured == "every one failed: compressor topk:*"


def test_seeds_that_failed_and_are_left_out_are_said(tmp_path: Path) -> None:
    failed = [row | {"seed": seed} for seed, row in enumerate(topk_seeds([1, 1], status="failed"), start=4)]
    runs = runs_of(tmp_path, fake_seeds([100] * 5), topk_seeds([100] * 3), failed)
    assert judge(claim(faster(SPARSE, DENSE)), runs).measured.endswith("3 seeds; 2 that failed left out")


def test_a_figure_that_decides_nothing_is_shown_all_the_same(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, fake_seeds([100, 110, 120] * 2), topk_seeds([100, 110, 120] * 2))
    judged = judge(claim(faster(SPARSE, DENSE), reason="the data set is not stated"), runs)
    assert judged.measured.startswith("1.00")
    assert judged.verdict == "not testable here: the data set is not stated"
    compared = judge(dataclasses.replace(claim(faster(SPARSE, DENSE), 0.5), counts=False), runs)
    assert compared.verdict == "for comparison: reproduced"  # the document does not claim it


def test_a_configuration_that_is_not_one_is_an_error(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, topk_seeds([1, 2]), topk_seeds([1, 2], lr=0.5, config_id="other"))
    with pytest.raises(ValueError, match="several configurations"):
        runs.by_seed(SPARSE)


def test_a_claim_against_several_methods_is_refuted_by_one_and_needs_all(tmp_path: Path) -> None:
    slower, alike, open_ = {"optimizer": "adam"}, {"optimizer": "adabelief"}, {"optimizer": "lars"}
    speeds = {"sgd": [100, 200, 400] * 2, "adam": [50, 100, 201] * 2, "adabelief": [100, 201, 400] * 2}
    speeds["lars"] = [100, 100, 900] * 2
    groups = [fake_seeds(each, optimizer=name, config_id=name) for name, each in speeds.items()]
    runs = runs_of(tmp_path, *groups)
    ours: dict[str, str] = {"optimizer": "sgd"}
    against = {name: faster(ours, than) for name, than in (("slower", slower), ("alike", alike), ("open", open_))}

    def verdict_of(*names: str, bound: float = 1.0) -> str:
        return judge(claim({name: against[name] for name in names}, bound), runs).verdict

    assert verdict_of("slower") == "reproduced"
    assert verdict_of("slower", "alike") == "same"
    assert verdict_of("slower", "alike", "open").startswith("undecided (after 6 seeds")
    assert verdict_of("slower", "alike", bound=1.5) == "not reproduced"
    judged = judge(claim({name: against[name] for name in ("slower", "alike")}), runs)
    assert judged.measured.startswith("alike 1.00 [")
    assert judged.measured.endswith("; 6 seeds")
    sides = undecided_sides([claim(against)], runs, "together")
    assert sides == [ours, open_]  # only the open comparison gets more seeds
    assert undecided_sides([claim(against, bound=1.5)], runs, "together") == []  # refuted
