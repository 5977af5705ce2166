"""The tables of a comparison: every column, and the short one on a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.report import store
from bench.report.comparison import compare
from bench.report.comparison_table import answer_table, comparison_table
from bench.report.tables import to_text
from bench.report.verdict import caveats
from tests.testing.fake_rows import fake_seeds, stored, topk_seeds
from tests.unit.report.compared import DENSE, TOPK, cells, compared

REFERENCE = Path(__file__).parents[3] / "results" / "reference"
DENSE_ACCURACY = [0.980, 0.981, 0.979]
EVEN = fake_seeds([1000.0, 1010.0, 990.0], DENSE_ACCURACY)
SPEED = [2000.0, 2010.0, 1990.0]


@pytest.mark.parametrize(
    "file", ["five-methods", "kfac", "triggers", "optimizers", "topk-synthetic", "published/together"]
)
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


def test_five_methods_at_80_columns() -> None:
    text = to_text(answer_table(compare(store.read([REFERENCE / "five-methods.csv"]))), 80)
    assert [line.rstrip() for line in text.splitlines()] == [
        "Faster, at some cost: group_topk 4.24x, accuracy 1 point lower",
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
    rows = [*EVEN, *topk_seeds(SPEED, compressor="group_topk:group_size=512,ratio=0.01,value_dtype=bf16")]
    lines = [line.rstrip() for line in to_text(answer_table(compared(tmp_path, rows)), 80).splitlines()]
    at = lines.index("group_topk:group_size=512,ratio=0.01,value_dtype=bf16 + allgather")
    assert lines[at + 1].split()[:2] == ["2000", "2.00x"]
    assert any(line.startswith("none + native") and "1.00x" in line for line in lines)


def test_rows_that_differ_in_settings_alone_are_named_by_these(tmp_path: Path) -> None:
    table = answer_table(compared(tmp_path, [*EVEN, *fake_seeds(SPEED, lr=0.1)]))
    assert [row[0].text for row in table.rows] == ["lr=0.05", "lr=0.1"]
    assert table.subtitle.startswith("compressor=none collective=native ")


def test_seeds_have_a_column_where_rows_differ_in_them(tmp_path: Path) -> None:
    even = answer_table(compared(tmp_path, [*EVEN, *topk_seeds(SPEED)]))
    assert "seeds" not in [column.heading for column in even.columns]
    assert even.subtitle.endswith("seeds=3 each")
    uneven = answer_table(compared(tmp_path, [*EVEN, *topk_seeds(SPEED[:2])]))
    assert [row[1].text for row in uneven.rows] == ["3/3", "2/2"]


def test_further_targets_have_a_column_each(tmp_path: Path) -> None:
    rows = [row | {"train_time_s": 1e4 / row["samples_per_s"]} for row in [*EVEN, *topk_seeds(SPEED)]]
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
    comparison = compared(tmp_path, [*EVEN, *topk_seeds(SPEED)])
    usual = [column.heading for column in answer_table(comparison).columns]
    more = answer_table(comparison, extra=["step_time_s", "payload_bytes_per_step"])
    assert [column.heading for column in more.columns] == [*usual, "step\ntime"]
    assert len(comparison_table(comparison).columns) > 12


def test_the_cells_of_a_row(tmp_path: Path) -> None:
    row = cells(compared(tmp_path, [*DENSE, *TOPK]), 1)
    assert row == {
        "compressor": "topk:ratio=0.01",
        "collective": "allgather",
        "seeds": "3/3 ok",
        "samples/s [95% CI]": "1577 [1495, 1659]",
        "speed-up vs none [95% CI]": "1.31x [1.25, 1.37]",
        "verdict": "faster",
        "accuracy % ± sd": "97.4 ± 0.6",
        "accuracy vs baseline points [95% CI]": "-0.4 [-1.5, +0.8] unclear",
        "time to target": "8 s",
        "payload per step": "20 kB",
        "compression vs fp32": "50x",
        "wire bytes per step": "-",
        "step time": "50 ms",
        "CPU time per step": "-",
        "exposed per step": "1 ms",
        "in sync": "yes",
    }
    assert cells(compared(tmp_path, [*DENSE, *TOPK]), 0)["payload per step"] == "~1 MB"  # by formula, not counted


def test_an_interval_of_two_seeds_does_not_reach_below_zero(tmp_path: Path) -> None:
    assert cells(compared(tmp_path, fake_seeds([100.0, 200.0])), 0)["samples/s [95% CI]"] == "150 [0, 785]"


def test_what_all_rows_share_stands_above_the_table(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [*fake_seeds([1.0], hosts=1), *topk_seeds([1.0], lr=0.1, hosts=1)])
    assert comparison_table(comparison).subtitle == (
        "dataset=digits model=small_cnn optimizer=sgd world_size=2 batch_size=32 epochs=2"
    )


def test_the_tuning_budget_stands_beside_the_result(tmp_path: Path) -> None:
    tuned = topk_seeds([1577.0, 1544.0, 1610.0], rates_tried=6)
    comparison = compared(tmp_path, [*fake_seeds([1204.0, 1190.0, 1221.0], rates_tried=3), *tuned])
    assert [cells(comparison, row)["rates tried"] for row in (0, 1)] == ["3", "6"]
    untuned = compared(tmp_path, [*fake_seeds([1204.0, 1190.0], rates_tried=0), *topk_seeds([1577.0, 1544.0])])
    assert "rates tried" not in cells(untuned, 0)
    assert comparison.rows[1].group.title == "topk:ratio=0.01 + allgather"  # no setting is needed to distinguish them


def test_missed_targets_stay_in_the_table(tmp_path: Path) -> None:
    sparse = topk_seeds([1500.0] * 3)
    sparse[0]["time_to_target_s"] = None
    never = topk_seeds([1500.0] * 3, compressor="randomk", time_to_target_s=None)
    comparison = compared(tmp_path, [*DENSE, *sparse, *never], metric="time_to_target_s")
    assert cells(comparison, 1)["time to target [95% CI]"] == "miss (2/3)"  # its time is unknown
    assert cells(comparison, 2)["time to target [95% CI]"] == "miss (0/3)"
    assert {row.gain.verdict for row in comparison.candidates} == {"unclear"}  # a miss never counts as faster
    assert any("topk (1 of 3 seeds); randomk" in sentence for sentence in caveats(comparison))


def test_without_a_target_nothing_was_missed(tmp_path: Path) -> None:
    rows = fake_seeds([1.0, 2.0], target_accuracy=None, time_to_target_s=None)
    comparison = compared(tmp_path, rows)
    assert cells(comparison, 0)["time to target"] == "-"
    assert not any("missed" in sentence for sentence in caveats(comparison))


def test_all_missing_the_target_is_a_table_not_an_error(tmp_path: Path) -> None:
    rows = fake_seeds([1.0, 2.0], time_to_target_s=None)
    assert cells(compared(tmp_path, rows, metric="time_to_target_s"), 0)["time to target [95% CI]"] == "miss (0/2)"


def test_replicas_out_of_sync_show_in_their_row(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [*DENSE, *topk_seeds([1.0], replicas_in_sync=False)])
    assert [cells(comparison, row)["in sync"] for row in (0, 1)] == ["yes", "NO"]


def test_groups_of_configurations_keep_their_names_in_data(tmp_path: Path) -> None:
    comparison = compare(stored(tmp_path, [*fake_seeds([1.0, 2.0]), *topk_seeds([1.0])]), by=["config_id"])
    raw = [{key: value for cell in row for key, value in cell.raw.items()} for row in comparison_table(comparison).rows]
    assert [row["config_id"] for row in raw] == [row.group.label["config_id"] for row in comparison.rows]
    assert None not in [row["config_id"] for row in raw]
