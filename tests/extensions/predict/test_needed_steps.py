"""Steps to target: from runs of the same configuration, interpolated between numbers of ranks, never extrapolated."""

from __future__ import annotations

from typing import Any

import pytest

from bench.core.errors import UsageError
from bench.core.schema import METRICS
from bench.extensions.predict.answers import NeededSteps, needed_steps
from tests.extensions.predict.calibrations import calibration


def run(name: str, world_size: int, reached_at: int | None, **other: Any) -> list[dict[str, Any]]:
    """Return evaluations after 100, 200, 300 and 400 steps."""
    same = {column.name: None for column in METRICS} | {
        "run_id": name,
        "config_id": "of-all",
        "seed": ord(name),
        "status": "ok",
        "model": "small_cnn",
        "dataset": "digits",
        "optimizer": "sgd",
        "batch_size": 32,
        "compressor": "topk",
        "strategy": "ddp",
        "accumulate": 1,
        "world_size": world_size,
        "target_accuracy": 0.9,
    }
    return [
        same | {"step": step, "time_to_target_s": 1.0 if reached_at and step >= reached_at else None} | other
        for step in (100, 200, 300, 400)
    ]


def needed(rows: list[dict[str, Any]], world_size: int) -> NeededSteps:
    return needed_steps(rows, calibration(), "topk", world_size)


def test_steps_in_which_ranks_do_not_wait_for_each_other_are_no_steps_of_all() -> None:
    rows = run("a", 4, 100) + run("b", 4, 400, strategy="async_server:mode=asp")
    assert needed(rows, 4).said == "steps to 90 %: median of 1 run(s) with 4 ranks"


def test_steps_of_several_batches_are_no_steps_of_one() -> None:
    rows = run("a", 4, 400) + run("b", 4, 100, accumulate=4)
    assert needed(rows, 4).steps == 400


def test_it_is_the_median_over_seeds_with_as_many_ranks() -> None:
    rows = run("a", 4, 100) + run("b", 4, 300) + run("c", 4, None) + run("d", 2, 100)
    found = needed(rows, 4)
    assert found.steps == 300
    assert found.said == "steps to 90 %: median of 3 run(s) with 4 ranks"


def test_it_lies_between_what_fewer_and_more_ranks_needed() -> None:
    assert needed(run("a", 2, 400) + run("b", 8, 100), 4).steps == pytest.approx(200)


def test_a_run_that_did_not_end_well_says_nothing() -> None:
    rows = run("a", 4, 300) + run("b", 4, None, status="interrupted") + run("c", 4, None, status="failed")
    assert needed(rows, 4).said == "steps to 90 %: median of 1 run(s) with 4 ranks"


def test_a_seed_counts_once() -> None:
    rows = run("a", 4, 100, started_at="1") + run("b", 4, 300, seed=ord("a"), started_at="2") + run("c", 4, 200)
    assert needed(rows, 4).steps == 250


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (run("a", 2, 400), "were measured with 2 ranks, so the number with 4 ranks is unknown"),
        (run("a", 8, 400), "were measured with 8 ranks"),
        (run("a", 4, None), "most of 1 run(s) missed 90 %"),
        (run("a", 2, None) + run("b", 8, 100), "were measured with 2, 8 ranks"),
        (run("a", 4, 100, compressor="dgc"), "had a target and ended"),
        (run("a", 4, 100, batch_size=64), "had a target and ended"),
        (run("a", 4, 100, target_accuracy=None), "had a target and ended"),
    ],
)
def test_what_runs_do_not_say_is_not_made_up(rows: list[dict[str, Any]], reason: str) -> None:
    found = needed(rows, 4)
    assert found.steps is None
    assert reason in found.said


def test_runs_of_several_targets_are_refused() -> None:
    with pytest.raises(UsageError, match=r"targets 0.8, 0.9; give only runs with one target"):
        needed(run("a", 4, 100) + run("b", 4, 100, target_accuracy=0.8), 4)


def test_a_seed_that_diverged_counts_as_missed() -> None:
    lost = {
        "status": "failed",
        "error": "the loss is nan at step 210",
        "error_kind": "Diverged",
    }
    rows = run("a", 4, 100) + run("b", 4, None, **lost) + run("c", 4, None, **lost)
    found = needed(rows, 4)
    assert (found.steps, found.said) == (None, "no time to target: most of 3 run(s) missed 90 %")


def test_runs_that_do_something_else_are_refused() -> None:
    with pytest.raises(UsageError, match=r"differ in lr \(0.1, 0.2\); give only runs with the same lr"):
        needed(run("a", 4, 100, lr=0.1) + run("b", 4, 200, lr=0.2), 4)
    assert needed(run("a", 4, 100, lr=0.1) + run("b", 2, 200, lr=0.2), 4).steps == 100


def test_who_went_on_with_other_ranks_says_nothing_for_these_count_steps_anew() -> None:
    rows = [row | ({"world_size": 4} if row["step"] > 200 else {}) for row in run("a", 2, 200)]
    assert needed(rows, 4).steps is None
    assert needed(run("a", 2, None)[:2] + run("a", 4, 300)[2:], 4).steps is None
    assert needed(rows + run("b", 4, 300), 4).steps == 300


def test_steps_of_epochs_are_told_for_their_first_may_have_sent_more() -> None:
    assert needed(run("a", 4, 100), 4).of_epochs
    assert not needed(run("a", 4, 100, steps=400), 4).of_epochs


def test_a_text_has_its_target_in_bits_per_byte() -> None:
    text = {"target_accuracy": None, "target_bits_per_byte": 2.1}
    rows = run("a", 4, 100, **text) + run("b", 4, 300, **text) + run("c", 4, None, **text)
    assert needed(rows, 4) == NeededSteps(
        steps=300, said="steps to 2.1 bits per byte: median of 3 run(s) with 4 ranks", of_epochs=True
    )
