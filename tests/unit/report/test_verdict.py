"""The verdict in a few lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.report.verdict import in_lines
from tests.testing.fake_rows import fake_seeds, topk_seeds
from tests.unit.report.compared import compared

DENSE_ACCURACY = [0.980, 0.981, 0.979]
DENSE = fake_seeds([1000.0, 1010.0, 990.0], DENSE_ACCURACY)
SPEED = [2000.0, 2010.0, 1990.0]


def other(name: str, speed: list[float], accuracy: list[float] | None = None, **values: Any) -> list[dict[str, Any]]:
    return topk_seeds(speed, accuracy or DENSE_ACCURACY[: len(speed)], compressor=name, **values)


def test_rows_are_grouped_by_what_they_gain_and_what_that_costs(tmp_path: Path) -> None:
    rows = [
        *DENSE,
        *other("slow", [500.0, 510.0, 490.0]),
        *other("lossy", SPEED, [0.960, 0.961, 0.959]),
        *other("good", SPEED),
    ]
    assert in_lines(compared(tmp_path, rows)) == [
        "Faster, no worse in accuracy: good 2.00x",
        "Faster, at some cost: lossy 2.00x, accuracy 2 points lower",
        "Slower: slow 0.50x",
    ]


def test_there_are_never_more_than_three_lines_and_three_rows_of_a_kind(tmp_path: Path) -> None:
    rows = [*DENSE, *other("noisy", [900.0, 1500.0, 1100.0]), *other("dead", SPEED, status="failed")]
    for number in range(5):
        rows += other(f"slow{number}", [500.0 - number, 510.0, 490.0])
    rows += [*other("good", SPEED), *other("lossy", SPEED, [0.960, 0.961, 0.959]), *other("one", [900.0])]
    said = in_lines(compared(tmp_path, rows))
    assert len(said) == 3
    assert said[2].startswith(
        "Slower: slow0 0.50x, slow1 0.50x, slow2 0.50x, and 2 more. No verdict from one seed: one"
    )
    assert said[2].endswith("No verdict, too much noise: noisy 1.14x. No run ended well: dead")


def test_one_seed_allows_no_verdict_and_one_row_no_comparison(tmp_path: Path) -> None:
    single = [*fake_seeds([1000.0], [0.98]), *topk_seeds([2000.0], [0.97])]
    assert in_lines(compared(tmp_path, single)) == ["No verdict from one seed: topk 2.00x (-1.0 points)"]
    assert in_lines(compared(tmp_path, DENSE)) == ["There is only none + native, and nothing to compare it with"]


def test_rows_on_other_work_are_pointed_out_first(tmp_path: Path) -> None:
    first, second = in_lines(compared(tmp_path, [*DENSE, *topk_seeds(SPEED, DENSE_ACCURACY, uplink_bps=1e7)]))
    assert first == "Compare only rows with the same work: these differ in uplink_bps"
    assert second == "Faster, no worse in accuracy: topk 2.00x"


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("test_accuracy", "Lower accuracy: topk -2.0 points"),
        ("payload_bytes_per_step", "Fewer bytes, at some cost: topk 50.0x, accuracy 2 points lower"),
        ("compression_ratio", "Better in compression_ratio, at some cost: topk 50.0x, accuracy 2 points lower"),
    ],
)
def test_the_words_follow_the_metric(tmp_path: Path, metric: str, said: str) -> None:
    rows = [*DENSE, *topk_seeds(SPEED, [0.960, 0.961, 0.959])]
    assert in_lines(compared(tmp_path, rows, metric=metric)) == [said]
