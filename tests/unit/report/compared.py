"""Two configurations of three seeds each, and their rows as `bench compare` compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.report.comparison import Comparison, compare
from bench.report.comparison_table import comparison_table
from tests.testing.fake_rows import fake_seeds, stored, topk_seeds

DENSE = fake_seeds([1204.0, 1190.0, 1221.0], [0.978, 0.981, 0.975])

TOPK = topk_seeds([1577.0, 1544.0, 1610.0], [0.974, 0.980, 0.969])


def compared(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> Comparison:
    return compare(stored(tmp_path, rows), **options)


def cells(comparison: Comparison, row: int) -> dict[str, str]:
    """Return heading -> text of one row, with headings on one line."""
    table = comparison_table(comparison)
    return {
        column.heading.replace("\n", " "): cell.text
        for column, cell in zip(table.columns, table.rows[row], strict=True)
    }


def titles(comparison: Comparison) -> list[str]:
    return [row.group.title for row in comparison.rows]
