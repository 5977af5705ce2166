"""Limits on the command line, and the reference that runs are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.core.errors import UsageError
from bench.report.gates import Gate, GateResult, check, check_reference
from bench.report.store import Run, collect_runs
from tests.testing.fake_rows import fake_row, fake_seeds, stored, topk_seeds
from tests.unit.report.compared import DENSE, TOPK, compared


@pytest.mark.parametrize(
    ("text", "kind", "limit"),
    [
        ("slower:5%", "slower", 0.05),
        ("slower:5", "slower", 0.05),
        ("accuracy:1.5", "accuracy", 0.015),
        ("accuracy:-0.5", "accuracy", 0.005),
        ("bytes:+1%", "bytes", 0.01),
    ],
)
def test_gates_are_read(text: str, kind: str, limit: float) -> None:
    gate = Gate.parse(text)
    assert gate.kind == kind
    assert gate.limit == pytest.approx(limit)


@pytest.mark.parametrize(
    "text", ["slower", "faster:5%", "slower:x", "slower:-1%", "slower:100%", "accuracy", "accuracy:1%", "bytes:-1%", ""]
)
def test_malformed_gates_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a limit for --fail-on; write slower:5%"):
        Gate.parse(text)


def test_a_gate_is_crossed_only_beyond_its_limit_and_beyond_the_noise(tmp_path: Path) -> None:
    slower = topk_seeds([1100.0, 1095.0, 1105.0])  # 0.91x, a narrow interval
    noisy = topk_seeds([600.0, 1500.0, 900.0], compressor="randomk")  # 0.77x, a wide interval
    comparison = compared(tmp_path, [*DENSE, *slower, *noisy])
    result = check(comparison, [Gate.parse("slower:5%")])
    assert [sentence.partition(":")[0] for sentence in result.crossed] == ["none + native -> topk"]
    assert "0.91x crosses slower:5%" in result.crossed[0]
    assert [sentence.partition(":")[0] for sentence in result.undecided] == ["none + native -> randomk + allgather"]
    assert check(comparison, [Gate.parse("slower:15%")]).crossed == []


def test_the_accuracy_gate_counts_points(tmp_path: Path) -> None:
    worse = topk_seeds([1500.0] * 3, [0.950, 0.951, 0.949])  # 2.8 points below
    comparison = compared(tmp_path, [*DENSE, *worse])
    assert check(comparison, [Gate.parse("accuracy:3")]).crossed == []
    (sentence,) = check(comparison, [Gate.parse("accuracy:1")]).crossed
    assert sentence.endswith("accuracy -2.8 points crosses accuracy:1")


def test_the_gate_on_bytes_needs_no_seeds_for_what_is_counted(tmp_path: Path) -> None:
    dense = fake_seeds([1204.0], payload_bytes_per_step=1_000_000.0)
    comparison = compared(tmp_path, [*dense, *topk_seeds([1204.0], payload_bytes_per_step=1_020_000.0)])
    assert check(comparison, [Gate.parse("bytes:+3%")]) == GateResult()
    (sentence,) = check(comparison, [Gate.parse("bytes:+1%")]).crossed
    assert sentence.endswith("+2.0% bytes per step crosses bytes:+1%")


def test_a_gate_on_speed_needs_a_factor(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [*DENSE, *TOPK], metric="test_accuracy")
    with pytest.raises(UsageError, match="slower:5% limits a factor"):
        check(comparison, [Gate.parse("slower:5%")])


def test_a_gate_on_a_row_without_figures_is_unmeasured(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [*DENSE, *topk_seeds([1.0, 2.0], status="failed")])
    result = check(comparison, [Gate.parse("slower:5%")])
    assert (len(result.unmeasured), result.crossed) == (1, [])


def test_a_gate_without_a_row_to_judge_is_unmeasured(tmp_path: Path) -> None:
    (sentence,) = check(compared(tmp_path, DENSE), [Gate.parse("slower:5%")]).unmeasured
    assert sentence == "slower:5% cannot be judged: there is no row besides none + native"


def test_a_share_of_a_time_is_a_share_of_that_time(tmp_path: Path) -> None:
    dense = [row | {"step_time_s": seconds} for row, seconds in zip(DENSE, (0.100, 0.101, 0.099), strict=True)]
    slow = [row | {"step_time_s": seconds} for row, seconds in zip(TOPK, (0.160, 0.161, 0.159), strict=True)]
    comparison = compared(tmp_path, [*dense, *slow], metric="step_time_s")
    assert check(comparison, [Gate.parse("slower:61%")]) == GateResult()
    (sentence,) = check(comparison, [Gate.parse("slower:59%")]).crossed
    assert "0.62x crosses slower:59%" in sentence


def test_a_gate_that_holds_for_seeds_that_missed_says_so(tmp_path: Path) -> None:
    """More seeds would not change it."""
    speeds = [1000.0] * 20
    dense = [row | {"train_time_s": 300.0, "time_to_target_s": 8.0 + row["seed"] / 9} for row in fake_seeds(speeds)]
    dense[-1] |= {"time_to_target_s": None}
    other = [row | {"train_time_s": 300.0, "time_to_target_s": 250.0 + row["seed"]} for row in topk_seeds(speeds)]
    comparison = compared(tmp_path, [*dense, *other], metric="time_to_target_s")
    assert comparison.rows[1].gain.held_back
    (sentence,) = check(comparison, [Gate.parse("slower:5%")]).undecided
    assert sentence.endswith("seeds that missed their target or diverged allow no verdict, so the gate passes")


def runs(tmp_path: Path, **values: Any) -> list[Run]:
    given: dict[str, Any] = {"name": "ci-topk", "payload_bytes_per_step": 20_000.0, "test_accuracy": 0.9} | values
    return collect_runs(stored(tmp_path, [fake_row(seed=seed, **given) for seed in (1, 2)]))


def test_what_repeats_crosses_nothing(tmp_path: Path) -> None:
    held = check_reference(runs(tmp_path), runs(tmp_path, git_sha="other", host="other", samples_per_s=1.0))
    assert (held.crossed, held.unmeasured) == ([], [])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"payload_bytes_per_step": 20_400.0}, "payload_bytes_per_step was 20000.0 and is 20400.0 (+2.0%)"),
        ({"payload_bytes_per_step": 19_999.0}, "payload_bytes_per_step was 20000.0 and is 19999.0 (-0.0%)"),
        ({"payload_bytes_per_step": 20_400.0, "torch_version": "3"}, "payload_bytes_per_step was"),
        ({"test_accuracy": 0.901}, "test_accuracy was 0.9 and is 0.901, on the same processor and torch"),
        ({"test_accuracy": None}, "test_accuracy was 0.9 and is None"),
        ({"test_accuracy": 0.865, "cpu": "other"}, "more than 3% on another machine or torch"),
    ],
)
def test_what_changed_is_named(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    first, second = check_reference(runs(tmp_path, **change), runs(tmp_path)).crossed
    assert first.startswith("ci-topk seed 1: ")
    assert sentence in first
    assert second.startswith("ci-topk seed 2: ")


def test_rounding_of_another_machine_is_allowed(tmp_path: Path) -> None:
    assert check_reference(runs(tmp_path, test_accuracy=0.915, cpu="other"), runs(tmp_path)).crossed == []


def test_what_stands_on_one_side_only_cannot_be_judged(tmp_path: Path) -> None:
    held = check_reference(runs(tmp_path, name="new"), runs(tmp_path))
    assert held.unmeasured[0] == "ci-topk seed 1 is in the reference file, but no such run ended well now"
    assert held.unmeasured[-1] == "new seed 2 is not in the reference file; add this run to it"
    failed = check_reference(runs(tmp_path, status="failed"), runs(tmp_path))
    assert len(failed.unmeasured) == 2
