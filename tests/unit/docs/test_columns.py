"""docs/columns.md lists every column with its meaning."""

from __future__ import annotations

from pathlib import Path

from bench.cli.reference_pages import columns_page
from bench.core.schema import LAYERS, METRICS

PAGE = Path(__file__).parents[3] / "docs" / "columns.md"


def test_the_committed_page_is_what_the_schema_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == columns_page(), "run: python -m bench.cli.reference_pages"


def test_every_column_has_its_line() -> None:
    lines = columns_page().splitlines()
    for column in (*METRICS, *LAYERS):
        assert any(line.startswith(f"| `{column.name}` | {column.meaning} |") for line in lines)
