from __future__ import annotations

from pathlib import Path

from bench.core.schema.metrics import LAYERS, METRICS
from bench.report.columns_doc import document

PAGE = Path(__file__).parents[3] / "docs" / "columns.md"


def test_the_committed_page_is_what_the_schema_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), "run: python -m bench.report.columns_doc"


def test_every_column_has_its_line() -> None:
    lines = document().splitlines()
    for column in (*METRICS, *LAYERS):
        assert any(line.startswith(f"| `{column.name}` | {column.meaning} |") for line in lines)
