"""The row that the others are compared with: as the user names it, or the dense one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.core.errors import UsageError
from bench.report.comparison import compare
from bench.report.verdict import caveats
from tests.testing.fake_rows import fake_seeds, stored, topk_seeds
from tests.unit.report.compared import DENSE, TOPK, compared


def test_what_never_ended_well_is_no_baseline_where_something_else_did(tmp_path: Path) -> None:
    failed = fake_seeds([100.0], config_id="steep", lr=5.0, status="failed")
    rows = [*failed, *TOPK, *DENSE]
    for baseline in (None, "none"):
        assert compared(tmp_path, rows, baseline=baseline).baseline.ok
    bf16 = fake_seeds([100.0], compressor="bf16", config_id="bf16", status="failed")
    assert compared(tmp_path, [*bf16, *DENSE, *TOPK]).baseline.title == "none + native"
    assert not compared(tmp_path, [*bf16, *failed]).baseline.ok


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        (None, "none + native"),
        ("none", "none + native"),
        ("none+ring", "none + ring"),
        ("topk:ratio=0.001", "topk:ratio=0.001 + allgather"),
        ("topk:ratio=0.01+allgather", "topk:ratio=0.01 + allgather"),
        ("topk", "topk:ratio=0.01 + allgather"),
        ("topk+allgather", "topk:ratio=0.01 + allgather"),
        ("tuned", "topk:ratio=0.001 + allgather"),
    ],
)
def test_the_baseline_is_found_by_compressor_pair_name_or_bare_name(
    tmp_path: Path, baseline: str | None, expected: str
) -> None:
    rows = [
        *topk_seeds([1.0]),
        *topk_seeds([1.0], compressor="topk:ratio=0.001", name="tuned"),
        *fake_seeds([1.0], collective="ring"),
        *fake_seeds([1.0]),
    ]
    comparison = compared(tmp_path, rows, baseline=baseline)
    assert comparison.baseline.title == expected
    assert comparison.rows[0].gain.verdict == "baseline"
    ambiguous = baseline in ("topk", "topk+allgather", "none")
    assert any("rows fit --baseline" in sentence for sentence in caveats(comparison)) == ambiguous


def test_without_a_dense_row_the_first_is_the_baseline(tmp_path: Path) -> None:
    rows = [*topk_seeds([1.0]), *fake_seeds([1.0], compressor="int8")]
    assert compared(tmp_path, rows).baseline.title == "topk:ratio=0.01 + allgather"


def test_a_baseline_that_does_not_exist_lists_the_rows(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no row fits --baseline qsgd; the rows are: none \+ native; topk"):
        compared(tmp_path, [*DENSE, *TOPK], baseline="qsgd")


def test_without_a_row_in_fp32_that_in_bf16_is_the_baseline_and_without_both_it_is_said(tmp_path: Path) -> None:
    sparse, half = topk_seeds([1.0] * 3), topk_seeds([1.0] * 3, compressor="bf16")
    comparison = compare(stored(tmp_path, [*sparse, *half]), metric="test_accuracy")
    assert (comparison.baseline.label["compressor"], comparison.ambiguity) == ("bf16", None)
    comparison = compare(stored(tmp_path, [*sparse, *topk_seeds([1.0], compressor="sign")]), metric="test_accuracy")
    assert comparison.ambiguity is not None
    assert comparison.ambiguity.startswith("no row uses none or bf16 or torch_bf16, so the baseline is topk")


def test_of_several_dense_rows_one_is_the_baseline_and_that_is_said(tmp_path: Path) -> None:
    other = fake_seeds([1300.0, 1310.0, 1290.0], lr=0.2)
    assert not any("--baseline" in sentence for sentence in caveats(compared(tmp_path, [*DENSE, *TOPK])))
    said = list(caveats(compared(tmp_path, [*DENSE, *other, *TOPK])))
    assert "2 rows use none; the baseline is none + native, lr=0.05 (--baseline chooses another)" in said
