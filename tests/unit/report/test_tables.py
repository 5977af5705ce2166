from __future__ import annotations

import csv
import io
import json
import math

import pytest
from rich.console import Console

from bench.report.tables import Table, TableCell, TableColumn, print_rich, to_csv, to_json, to_markdown, to_text

SPEC = "group_topk:group_size=512,ratio=0.01,value_dtype=bf16"


def table(num_columns: int = 6, spec: str = SPEC) -> Table:
    return Table(
        title="speed",
        subtitle="world_size=2",
        columns=[
            TableColumn(heading="compressor", align="left", priority=0),
            *(TableColumn(heading=f"heading {i}\n[95% CI]", priority=2 if i == 1 else 1) for i in range(num_columns)),
            TableColumn(heading="empty"),
        ],
        rows=[
            [
                TableCell(text=name, raw={"compressor": name}),
                *(
                    TableCell(text=f"{i}.31x [1.22, 1.40]", raw={f"x{i}": 1.31, f"x{i}_low": None, "sync": True})
                    for i in range(num_columns)
                ),
                TableCell(raw={"empty": math.nan}),
            ]
            for name in ("none", spec)
        ],
        notes=["how to read"],
    )


@pytest.mark.parametrize("width", [60, 80, 100, 120, 140, 200])
def test_every_cell_is_shown_whole_at_every_width(width: int) -> None:
    text = to_text(table(), width)
    assert all(len(line) <= width for line in text.splitlines())
    for i in range(6):
        assert text.count(f"{i}.31x [1.22, 1.40]") == 2
    assert "…" not in text
    assert "empty" not in text
    assert text.startswith("speed\nworld_size=2\n")
    assert text.endswith("how to read\n")


def test_a_wide_terminal_has_one_block_and_a_narrow_one_repeats_the_names() -> None:
    assert to_text(table(), 300).count("compressor") == 1
    assert to_text(table(), 80).count("compressor") == 3


def test_columns_of_low_priority_come_last_where_not_all_fit() -> None:
    text = to_text(table(), 80)
    assert text.index("heading 2") < text.index("heading 1")
    wide = to_text(table(), 300)
    assert wide.index("heading 1") < wide.index("heading 2")


def test_long_names_are_broken_at_commas() -> None:
    lines = to_text(table(), 80).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("group_topk"))
    assert lines[at].startswith("group_topk:group_size=512,ratio=0.01,  0.31x")
    assert lines[at + 1].rstrip() == " value_dtype=bf16"


def test_a_name_that_cannot_be_broken_is_folded_not_cut() -> None:
    name = "x" * 100
    text = to_text(table(spec=name), 80)
    assert text.count("x" * 20) >= 1
    assert sum(line.count("x") for line in text.splitlines() if set(line.split(" ")[0]) == {"x"}) >= 100


def test_brackets_are_text_not_markup() -> None:
    shown = table(1, spec="[bold]odd[/bold]")
    assert "[bold]odd[/bold]" in to_text(shown, 120)


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    styled = Table(title="t", columns=[TableColumn(heading="v")], rows=[[TableCell(text="faster", style="green")]])
    buffer = io.StringIO()
    print_rich(styled, Console(file=buffer, force_terminal=True, color_system="standard", width=80))
    assert ("\x1b[32m" in buffer.getvalue()) != no_color


def test_markdown_is_one_table_with_escaped_bars() -> None:
    lines = to_markdown(table(2, spec="a|b")).splitlines()
    assert lines[0] == "**speed**"
    assert "| compressor | heading 0 [95% CI] | heading 1 [95% CI] |" in lines
    assert "| :--- | ---: | ---: |" in lines
    assert r"| a\|b | 0.31x [1.22, 1.40] | 1.31x [1.22, 1.40] |" in lines


def test_csv_has_raw_values_in_base_units() -> None:
    first, second = csv.DictReader(io.StringIO(to_csv(table(2))))
    assert second == {
        "compressor": SPEC,
        "x0": "1.31",
        "x0_low": "",
        "sync": "true",
        "x1": "1.31",
        "x1_low": "",
        "empty": "",
    }
    assert first["compressor"] == "none"


def test_json_has_the_same_values_typed() -> None:
    document = json.loads(to_json(table(1), metric="samples_per_s"))
    assert list(document) == ["title", "metric", "rows"]
    assert document["rows"][0] == {"compressor": "none", "x0": 1.31, "x0_low": None, "sync": True, "empty": None}


def test_a_table_of_names_only() -> None:
    shown = Table(title="t", columns=[TableColumn(heading="name", priority=0)], rows=[[TableCell(text="a")]])
    assert "a" in to_text(shown)
