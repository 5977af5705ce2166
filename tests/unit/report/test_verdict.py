"""The verdict in a few lines, and the table that stands below it on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.report import store
from bench.report.comparison import compare
from bench.report.comparison_table import answer_table, comparison_table
from bench.report.tables import to_text
from bench.report.verdict import in_lines
from tests.testing.fake_rows import fake_seeds, topk_seeds
from tests.unit.report.compared import compared

REFERENCE = Path(__file__).parents[3] / "results" / "reference"
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
        "Faster, no less accurate: good 2.00x",
        "Faster, at some cost: lossy 2.00x, 2 points less accurate",
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
    assert second == "Faster, no less accurate: topk 2.00x"


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("test_accuracy", "Less accurate: topk -2.0 points"),
        ("payload_bytes_per_step", "Fewer bytes, at some cost: topk 50.0x, 2 points less accurate"),
        ("compression_ratio", "Better in compression_ratio, at some cost: topk 50.0x, 2 points less accurate"),
    ],
)
def test_the_words_follow_the_metric(tmp_path: Path, metric: str, said: str) -> None:
    rows = [*DENSE, *topk_seeds(SPEED, [0.960, 0.961, 0.959])]
    assert in_lines(compared(tmp_path, rows, metric=metric)) == [said]


@pytest.mark.parametrize("file", ["demo", "kfac", "triggers", "optimizers", "topk-synthetic", "published/together"])
@pytest.mark.parametrize("metric", ["samples_per_s", "test_accuracy"])
@pytest.mark.parametrize("width", [80, 120])
def test_the_answer_is_one_table_without_broken_cells(file: str, metric: str, width: int) -> None:
    comparison = compare(store.read([REFERENCE / f"{file}.csv"]), metric=metric)
    table = answer_table(comparison)
    lines = to_text(table, width).splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    assert sum(set(line) == {"─"} for line in lines) == 1
    assert len(table.columns) <= 8
    for row in table.rows:
        assert any(all(cell.text in line for cell in row[1:] if cell.text != "-") for line in lines)


def test_the_demo_at_80_columns() -> None:
    text = to_text(answer_table(compare(store.read([REFERENCE / "demo.csv"]))), 80)
    assert [line.rstrip() for line in text.splitlines()] == [
        "Faster, at some cost: group_topk 4.24x, 1 point less accurate",
        "Faster, accuracy unclear: powersgd 3.64x (-0.7 points), topk 3.49x (-0.8 points)",
        "Slower: none 0.60x",
        "",
        "samples/s: every row against bf16 + native (above 1x is faster)",
        "dataset=digits model=small_cnn optimizer=sgd lr=0.02 world_size=2 batch_size=32",
        "epochs=8 hosts=2 uplink_bps=50 Mbit/s seeds=5 each",
        "",
        "                                        speed-up             accuracy %    sent/",
        "                   samples/s    vs bf16 [95% CI]  verdict     (vs bf16)     step",
        "─" * 80,
        "bf16 + native          698.7               1.00x  baseline         98.2  ~386 kB",
        "group_topk + ring       2971  4.24x [3.85, 4.67]  faster    97.2 (-1.0)  8.62 kB",
        "none + native            420  0.60x [0.59, 0.62]  slower    98.0 (-0.1)  ~773 kB",
        "powersgd + native       2549  3.64x [3.41, 3.90]  faster    97.5 (-0.7)   ~22 kB",
        "topk + allgather        2466  3.49x [2.81, 4.33]  faster    97.3 (-0.8)  6.36 kB",
        "",
        "[low, high]: 95 % interval over seeds; ~: from a formula, or estimated",
    ]


def test_a_name_without_room_beside_its_figures_stands_above_them(tmp_path: Path) -> None:
    rows = [*DENSE, *topk_seeds(SPEED, compressor="group_topk:group_size=512,ratio=0.01,value_dtype=bf16")]
    lines = [line.rstrip() for line in to_text(answer_table(compared(tmp_path, rows)), 80).splitlines()]
    at = lines.index("group_topk:group_size=512,ratio=0.01,value_dtype=bf16 + allgather")
    assert lines[at + 1].split()[:2] == ["2000", "2.00x"]
    assert any(line.startswith("none + native") and "1.00x" in line for line in lines)


def test_rows_that_differ_in_settings_alone_are_named_by_these(tmp_path: Path) -> None:
    table = answer_table(compared(tmp_path, [*DENSE, *fake_seeds(SPEED, lr=0.1)]))
    assert [row[0].text for row in table.rows] == ["lr=0.05", "lr=0.1"]
    assert table.subtitle.startswith("compressor=none collective=native ")


def test_seeds_have_a_column_where_rows_differ_in_them(tmp_path: Path) -> None:
    even = answer_table(compared(tmp_path, [*DENSE, *topk_seeds(SPEED)]))
    assert "seeds" not in [column.heading for column in even.columns]
    assert even.subtitle.endswith("seeds=3 each")
    uneven = answer_table(compared(tmp_path, [*DENSE, *topk_seeds(SPEED[:2])]))
    assert [row[1].text for row in uneven.rows] == ["3/3", "2/2"]


def test_further_targets_have_a_column_each(tmp_path: Path) -> None:
    rows = [row | {"train_time_s": 1e4 / row["samples_per_s"]} for row in [*DENSE, *topk_seeds(SPEED)]]
    table = answer_table(compared(tmp_path, rows, metric="time_to_target_s", targets=["0.9", "0.95"]))
    headings = [column.heading.replace("\n", " ") for column in table.columns]
    assert headings[1:] == [
        "time to 90 %",
        "speed-up vs none [95% CI]",
        "verdict",
        "speed-up to 95 %",
        "accuracy % (vs none)",
    ]
    assert table.rows[1][4].text == "2.00x faster"


def test_columns_that_are_asked_for_stand_after_the_answer(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [*DENSE, *topk_seeds(SPEED)])
    usual = [column.heading for column in answer_table(comparison).columns]
    more = answer_table(comparison, extra=["step_time_s", "payload_bytes_per_step"])
    assert [column.heading for column in more.columns] == [*usual, "step\ntime"]
    assert len(comparison_table(comparison).columns) > 12
