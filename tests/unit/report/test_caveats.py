"""Notes that a reader needs before trusting a comparison."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench.report.comparison_table import shared_settings
from bench.report.verdict import cautions, caveats
from tests.testing.fake_rows import fake_row, fake_seeds, topk_seeds
from tests.unit.report.compared import DENSE, TOPK, cells, compared


def test_a_group_that_mixes_configurations_says_so(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [*DENSE, *TOPK], by=["model"])
    assert any("averages runs that differ in compressor, collective" in sentence for sentence in caveats(comparison))


def test_runs_that_stopped_at_their_target_have_no_final_accuracy(tmp_path: Path) -> None:
    stopped = [row | {"stop_at_target": True} for row in TOPK]
    says = [
        any("--stop-at-target" in text for text in caveats(compared(tmp_path, [*DENSE, *rows])))
        for rows in (TOPK, stopped)
    ]
    assert says == [False, True]


def test_one_seed_is_unclear_and_says_what_to_do(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [*fake_seeds([100.0]), *topk_seeds([900.0, 910.0, 905.0])])
    assert comparison.rows[1].gain.verdict == "unclear"
    assert cells(comparison, 1)["verdict"] == "unclear, n=1"
    assert any(
        sentence.startswith("only one seed of none, so noise") and "`--seeds 1,2,3`" in sentence
        for sentence in caveats(comparison)
    )


def test_noise_is_unclear_and_says_how_many_seeds_would_do(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [*DENSE, *topk_seeds([1150.0, 1290.0, 1230.0])])
    assert comparison.rows[1].gain.verdict == "unclear"
    assert any("topk (3 seeds; about" in sentence and "run more seeds" in sentence for sentence in caveats(comparison))


def test_a_wall_clock_that_alone_is_noisy_is_told_by_cpu_time(tmp_path: Path) -> None:
    noisy = zip([1150.0, 1290.0, 1230.0], [0.0301, 0.0300, 0.0302], strict=True)
    sparse = [fake_row(seed=s, samples_per_s=v, cpu_s_per_step=c, compressor="topk") for s, (v, c) in enumerate(noisy)]
    dense = [row | {"cpu_s_per_step": 0.03 + row["seed"] / 10_000} for row in DENSE]
    comparison = compared(tmp_path, [*dense, *sparse])
    assert cells(comparison, 1)["verdict"] == "unclear, CPU same"
    assert cells(comparison, 1)["CPU time per step"] == "30.1 ms"
    assert any("CPU time per step says: topk same" in sentence for sentence in caveats(comparison))
    unsure = [row | {"cpu_s_per_step": 0.02 * row["seed"] + 0.01} for row in sparse]
    comparison = compared(tmp_path, [*dense, *unsure])
    assert cells(comparison, 1)["verdict"] == "unclear"
    assert not any("CPU time per step" in sentence for sentence in caveats(comparison))


def test_runs_that_shared_their_cores_with_other_programs_are_named(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [*DENSE, *TOPK])
    assert not any("other programs" in sentence for sentence in caveats(comparison))
    for run, share in zip(comparison.rows[1].group.runs, (0.05, 0.34, None), strict=True):
        run.rows[-1]["other_cpu_share"] = share
        vars(run).pop("last_known")  # as if read from a file with the column
    (sentence,) = [text for text in caveats(comparison) if "other programs" in text]
    assert "while these runs were timed: topk 34%; their times are too long" in sentence


def test_repeats_of_a_seed_count_once_and_are_named(tmp_path: Path) -> None:
    again = fake_row(seed=1, samples_per_s=1000.0, run_id="again", started_at="2026-09-01")
    comparison = compared(tmp_path, [*DENSE, again])
    assert cells(comparison, 0)["seeds"] == "3/3 ok"
    assert sorted(comparison.baseline.values("samples_per_s")) == [1000.0, 1190.0, 1221.0]
    assert any("none seed 1; of each, only the newest successful run" in sentence for sentence in caveats(comparison))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"host": "laptop"},
            "different machines or versions, so their times cannot be compared: host (lab-3 / laptop)",
        ),
        ({"threads": 2}, "different machines or versions, so their times cannot be compared: threads (1 / 2)"),
        (
            {"torch_version": "2.15"},
            "different machines or versions, so their times cannot be compared: torch_version (2.14.1 / 2.15)",
        ),
        ({"factor_fallbacks": 2}, "topk: K-FAC sent some factors in another form"),
        ({"replicas_in_sync": False}, "the ranks ended with different parameters (seeds: 1, 2, 3)"),
        ({"git_dirty": True}, "uncommitted changes"),
        ({"git_sha": "9f9f9f9"}, "different versions of the code: git_sha (1a2b3c4 / 9f9f9f9)"),
        ({"model": "resnet20"}, "differ in model (small_cnn / resnet20)"),
        ({"uplink_bps": 1e7}, "differ in uplink_bps ("),
        ({"world_size": 8, "config_id": "x"}, "differ in world_size (2 / 8)"),
        ({"epochs": 9, "config_id": "x"}, "differ in epochs (2 / 9)"),
        ({"link_warnings": "host1 reached half of it"}, "the links were not as configured: host1 reached half of it"),
        ({"status": "running"}, "did not finish: topk:ratio=0.01 + allgather, seed 1, is still running, or was killed"),
        ({"status": "interrupted"}, "did not finish: topk:ratio=0.01 + allgather, seed 1, was interrupted"),
    ],
)
def test_what_weakens_a_comparison_is_said(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    without = compared(tmp_path, [*DENSE, *TOPK])
    assert not any(said in sentence for sentence in [*cautions(without), *caveats(without)])
    comparison = compared(tmp_path, [*DENSE, *topk_seeds([1577.0, 1544.0, 1610.0], **change)])
    assert any(said in sentence for sentence in [*cautions(comparison), *caveats(comparison)])


def test_what_was_faster_at_the_end_alone_is_told_beside_it(tmp_path: Path) -> None:
    whole = {"step": 100, "train_time_s": 10.0}  # 640 samples per second
    dense = [row | whole | {"samples_per_s": 640.0 + row["seed"]} for row in DENSE]
    late = [row | whole | {"samples_per_s": 1280.0 + row["seed"]} for row in TOPK]
    said = list(caveats(compared(tmp_path, [*dense, *late])))
    assert any("averaged over the whole run, the speed-up was: topk 1.00x" in text for text in said)
    steady = [row | whole | {"samples_per_s": 640.0 + row["seed"]} for row in TOPK]
    assert not any("the speed-up was" in text for text in caveats(compared(tmp_path, [*dense, *steady])))


def in_parts(rows: list[dict[str, Any]], *parts: tuple[int, float]) -> list[dict[str, Any]]:
    """Return each run with evaluations at these steps, and the bytes per step since the previous evaluation."""
    return [row | {"step": step, "payload_bytes_per_step": nbytes} for row in rows for step, nbytes in parts]


def test_bytes_that_fell_while_the_density_warmed_up_are_told_of_the_whole(tmp_path: Path) -> None:
    falling = in_parts(TOPK, (10, 400.0), (20, 100.0))
    (sentence,) = [text for text in caveats(compared(tmp_path, [*DENSE, *falling])) if "bytes per step" in text]
    assert "topk" in sentence
    assert (
        "topk sent 2.50 times the bytes per step in the table (early steps compress less)" in sentence
    )  # 250 on average, 100 at the end
    even = in_parts(TOPK, (10, 100.0), (20, 100.0))
    assert not any("bytes per step" in text for text in caveats(compared(tmp_path, [*DENSE, *even])))


def test_a_last_part_of_a_few_steps_is_pointed_out(tmp_path: Path) -> None:
    for last, expected in ((104, True), (190, False)):
        rows = in_parts(TOPK, (100, 100.0), (last, 100.0))
        said = list(caveats(compared(tmp_path, [*DENSE, *rows])))
        assert any("less than a tenth of the one before" in text for text in said) is expected


def test_an_effect_that_is_large_and_unclear_needs_few_seeds_more(tmp_path: Path) -> None:
    noisy = topk_seeds([1300.0, 3400.0, 2500.0], [0.970, 0.971, 0.969])
    comparison = compared(tmp_path, [*DENSE, *noisy])
    assert comparison.rows[1].gain.verdict == "unclear"
    (sentence,) = [text for text in caveats(comparison) if "too noisy" in text]
    assert re.search(r"3 seeds; about \d+ would do", sentence)


def test_steps_that_were_counted_anew_make_no_interval(tmp_path: Path) -> None:
    """The steps of a run that continued with more ranks hold more samples: 40 steps, then 30."""
    before, after = in_parts(TOPK, (20, 400.0), (40, 100.0)), in_parts(TOPK, (30, 100.0))
    anew = [*before, *[row | {"resumes": 1, "world_size": 4} for row in after]]
    said = list(caveats(compared(tmp_path, [*DENSE, *anew])))
    assert not any("less than a tenth" in text or "bytes per step" in text for text in said)


def test_epochs_on_one_side_and_steps_on_the_other_are_other_work(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [*DENSE, *[row | {"epochs": None, "steps": 400} for row in TOPK]])
    (sentence,) = [sentence for sentence in caveats(comparison) if sentence.startswith("the rows differ in")]
    assert "epochs (2 / -)" in sentence
    assert "steps (- / 400)" in sentence
    shared = shared_settings(comparison)
    assert "epochs" not in shared
    assert "steps" not in shared
    assert shared["batch_size"] == "32"


def with_losses(
    rows: list[dict[str, Any]], losses: list[float], tests: list[float] | None = None, accuracy: float = 0.1
) -> list[dict[str, Any]]:
    """Return each row as a run with one evaluation per training loss, and perhaps as many test losses."""
    return [
        row
        | {"step": 10 * place, "train_loss": loss, "test_loss": test, "test_accuracy": accuracy}
        | {"status": "ok" if place == len(losses) else "running"}
        for row in rows
        for place, (loss, test) in enumerate(zip(losses, tests or [None] * len(losses), strict=True), 1)
    ]


@pytest.mark.parametrize(
    ("losses", "tests", "accuracy", "is_told"),
    [
        ([2.3, 2.3], None, 0.1, True),
        ([2.3, 2.4], [2.5, 2.5], 0.1, True),
        ([2.3, 0.4], [2.5, 2.6], 0.1, False),
        ([2.3, 2.4], [2.5, 0.5], 0.1, False),  # the loss of the last few training steps is noisy
        ([2.3, 2.4], [2.5, 2.5], 0.96, False),  # at the target since the first evaluation
    ],
)
def test_losses_that_do_not_fall_are_told(
    tmp_path: Path, losses: list[float], tests: list[float] | None, accuracy: float, *, is_told: bool
) -> None:
    comparison = compared(tmp_path, [*with_losses(DENSE, [2.3, 0.3]), *with_losses(TOPK, losses, tests, accuracy)])
    sentences = [text for text in caveats(comparison) if "neither training loss nor test loss fell" in text]
    assert bool(sentences) == is_told
    assert all(text.startswith("topk: ") for text in sentences)


@pytest.mark.parametrize(("samples", "tuned", "is_told"), [(500, 0, True), (1000, 0, False), (500, 5, False)])
def test_a_lossy_method_that_needs_fewer_samples_is_told(
    tmp_path: Path, samples: int, tuned: int, *, is_told: bool
) -> None:
    seeds = range(6)
    dense = [fake_row(seed=seed, samples=1000 + seed) for seed in seeds]
    sparse = [
        fake_row(seed=seed, samples=samples + seed, compressor="topk", collective="allgather", rates_tried=tuned)
        for seed in seeds
    ]
    comparison = compared(tmp_path, [*dense, *sparse], metric="time_to_target_s")
    assert any("times fewer samples to the target than none" in text for text in caveats(comparison)) == is_told
