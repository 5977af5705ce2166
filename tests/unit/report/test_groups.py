"""The selection of runs, and their grouping by workload and into the rows of a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.core import registry
from bench.core.errors import NothingToCompare, UsageError
from bench.core.schema import METRICS_BY_NAME
from bench.report.comparison import compare
from bench.report.groups import ALSO_OPTIONS, by_workload, parse_conditions, select
from bench.report.store import collect_runs
from tests.testing.fake_rows import fake_row, fake_seeds, stored, topk_seeds


def test_conditions_are_typed_and_options_of_a_component_stay_together() -> None:
    assert parse_conditions("dataset=digits, world_size=4,compressor=topk:ratio=0.01,skip=norm+bias,lr=0.1") == [
        ("dataset", "digits"),
        ("world_size", 4),
        ("compressor", "topk:ratio=0.01,skip=norm+bias"),
        ("lr", 0.1),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dataset", "is not a condition; write --where COLUMN=VALUE"),
        ("datset=digits", "no column 'datset' .did you mean 'dataset'"),
        ("dataset=digits,word_size=4", "no column 'word_size'"),
        ("world_size=many", "--where world_size=many: "),
        ("world_size=2.7", "--where world_size=2.7: '2.7' is not a whole number"),
    ],
)
def test_bad_conditions_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_conditions(text)


def test_only_what_fits_takes_part_and_a_bare_name_fits_any_options(tmp_path: Path) -> None:
    rows = [fake_row(run_id="a"), fake_row(run_id="b", compressor="topk:ratio=0.01"), fake_row(run_id="c", seed=2)]
    runs = collect_runs(stored(tmp_path, rows))
    assert [run["run_id"] for run in select(runs, parse_conditions("compressor=topk"))] == ["b"]
    assert [run["run_id"] for run in select(runs, parse_conditions("seed=1,compressor=none"))] == ["a"]
    with pytest.raises(NothingToCompare, match="no run has seed 7; the runs have: 1, 2"):
        select(runs, parse_conditions("seed=7"))


def test_an_empty_cell_is_chosen_as_tables_show_it(tmp_path: Path) -> None:
    rows = [
        fake_row(run_id="epochs", steps=None),
        fake_row(run_id="steps", steps=40),
        fake_row(run_id="straggler", straggler="rank=1"),
    ]
    runs = collect_runs(stored(tmp_path, rows))
    assert [run["run_id"] for run in select(runs, parse_conditions("steps=-"))] == ["epochs", "straggler"]
    assert [run["run_id"] for run in select(runs, parse_conditions("steps=-,straggler=-"))] == ["epochs"]


def test_rows_are_put_in_order_the_best_first_and_the_unknown_last(tmp_path: Path) -> None:
    rows = [
        *fake_seeds([100.0, 101.0]),
        *topk_seeds([90.0, 91.0], compressor="sign", lr=0.3),
        *topk_seeds([120.0, 121.0], compressor="topk", lr=0.2),
        *(row | {"samples_per_s": None} for row in topk_seeds([1.0, 2.0], compressor="qsgd", lr=None)),
    ]
    for sort, expected in (
        ("samples_per_s", ["topk", "sign", "qsgd"]),
        ("lr", ["topk", "sign", "qsgd"]),
        ("compressor", ["qsgd", "sign", "topk"]),
        (None, ["sign", "topk", "qsgd"]),
    ):
        comparison = compare(stored(tmp_path, rows), metric="step_time_s", sort=sort)
        assert [row.group.label["compressor"] for row in comparison.candidates] == expected


def test_what_names_a_column_and_an_option_of_the_component_before_is_the_option() -> None:
    conditions = parse_conditions("compressor=topk:ratio=0.01,warmup_epochs=0,lr=0.1,warmup_epochs=2")
    assert conditions[0] == ("compressor", "topk:ratio=0.01,warmup_epochs=0")
    assert conditions[1:] == [("lr", 0.1), ("warmup_epochs", 2.0)]
    assert parse_conditions("strategy=async_server:staleness=1,warmup_epochs=0")[1][0] == "warmup_epochs"
    assert parse_conditions("compressor=of_another:ratio=1,warmup_epochs=0")[1][0] == "warmup_epochs"


def test_rows_are_put_in_order_by_bytes_to_target(tmp_path: Path) -> None:
    rows = [*fake_seeds([1.0, 1.0]), *topk_seeds([1.0, 1.0], compressor="sign", payload_bytes_per_step=50_000.0)]
    rows += topk_seeds([1.0, 1.0], compressor="topk")
    comparison = compare(stored(tmp_path, rows), sort="bytes_to_target", targets=["0.9"])
    assert [row.group.label["compressor"] for row in comparison.rows] == ["none", "topk", "sign"]


def test_names_of_columns_that_are_options_too_are_known() -> None:
    """They are listed in the code, so that reading a condition does not load the components."""
    kinds = [kind for kind, each in registry.KINDS.items() if each.singular in METRICS_BY_NAME]
    options = {
        name for kind in kinds for each in registry.entries(kind) for name in registry.load(kind, each).option_names()
    }
    assert options & set(METRICS_BY_NAME) <= ALSO_OPTIONS  # one is an option of an extension


def test_methods_on_one_workload_stay_together(tmp_path: Path) -> None:
    rows = [fake_row(), fake_row(compressor="topk"), fake_row(lr=0.1), fake_row(seed=2)]
    (only,) = by_workload(stored(tmp_path, rows))
    assert (only[0], len(only[1])) == ("", 4)


def test_what_tells_workloads_apart_is_said_once(tmp_path: Path) -> None:
    rows = [
        fake_row(uplink_bps=rate, downlink_bps=rate, model=model, world_size=size, threads=4 // size, seed=seed)
        for seed, (rate, model, size) in enumerate([(1e7, "linear", 2), (1e8, "linear", 2), (None, "linear", 4)])
    ]
    assert [(label, len(rows)) for label, rows in by_workload(stored(tmp_path, rows))] == [
        ("world_size=2, uplink_bps=10 Mbit/s", 1),
        ("world_size=2, uplink_bps=100 Mbit/s", 1),
        ("world_size=4, uplink_bps=-", 1),
    ]


def test_a_run_is_of_the_workload_that_it_ended_with(tmp_path: Path) -> None:
    rows = [
        fake_row(run_id="a", world_size=2, status="running", step=1),
        fake_row(run_id="a", world_size=4, step=2),
        fake_row(run_id="b", world_size=4, compressor="topk"),
    ]
    (only,) = by_workload(stored(tmp_path, rows))
    assert (only[0], len(only[1])) == ("", 3)
