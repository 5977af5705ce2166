from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.report.gates import check_reference
from bench.report.store import Run, collect_runs
from tests.testing.fake_rows import fake_row, stored


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
    assert held.unmeasured[0] == "ci-topk seed 1 is in the reference, but no such run ended well"
    assert held.unmeasured[-1] == "new seed 2 is not in the reference; renew it"
    failed = check_reference(runs(tmp_path, status="failed"), runs(tmp_path))
    assert len(failed.unmeasured) == 2
