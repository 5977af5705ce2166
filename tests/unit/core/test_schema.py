"""The schema: every column is declared once, and cells preserve their values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.core.columns import Column, from_cell, to_cells
from bench.core.schema import LAYERS, METRICS, METRICS_BY_NAME, with_added

# Units by the end of a column's name, the longer ends first.
UNITS = {"_per_s": "samples/s", "_bps": "bit/s", "_Bps": "bytes/s", "_bytes": "bytes", "_s": "s"}
# In the order of the documentation; new columns belong to one of these groups.
GROUPS = {
    "identity": "run_id digest config_id name seed model dataset train_size test_size optimizer compressor collective "
    "strategy trigger world_size batch_size epochs lr schedule lr_scaling partition bucket_mb amp augment "
    "hosts ranks_per_host uplink_bps downlink_bps latency_s device threads "
    "link_trace jitter_s loss_ratio cpu_share cluster_digest eval_every warmup_steps "
    "target_accuracy target_bits_per_byte",
    "progress": "status error epoch step samples train_time_s wall_time_s",
    "quality": "train_loss train_accuracy test_loss test_accuracy test_bits_per_byte gzip_bits_per_byte "
    "bz2_bits_per_byte xz_bits_per_byte time_to_target_s",
    "speed": "samples_per_s step_time_s step_time_p95_s forward_backward_s encode_s exchange_s exposed_s",
    "wire": "payload_bytes_per_step payload_bytes_max_per_step payload_bytes_source control_bytes_per_step "
    "dense_bytes_per_step compression_ratio wire_bytes_per_step wire_bytes_received_per_step messages_per_step "
    "effective_density support_overlap measured_bandwidth_bps measured_rtt_s measured_loss_ratio "
    "forwarder_cpu_share",
    "health": "replicas_in_sync skipped_steps peak_rss_bytes held_bytes",
    "origin": "host cpu torch_version kernels git_sha git_dirty started_at",
}
VALUES: dict[type, st.SearchStrategy[Any]] = {
    str: st.text(min_size=1),
    int: st.integers(min_value=-(2**53), max_value=2**53),
    float: st.floats(min_value=-1e100, max_value=1e100),
    bool: st.booleans(),
}


def assert_declared_completely(columns: tuple[Column, ...]) -> None:
    """Fail unless every column is declared once, with its unit in its name, and does not repeat if it is a time."""
    names = [column.name for column in columns]
    assert len(names) == len(set(names))
    for column in columns:
        assert column.type in VALUES
        assert column.meaning
        assert column.name.removesuffix("_Bps") == column.name.removesuffix("_Bps").lower()  # B: bytes, b: bits
        units = [unit for suffix, unit in UNITS.items() if column.name.endswith(suffix)]
        assert column.unit == (units or [column.unit])[0]
        if column.unit in ("s", "samples/s", "bytes/s") and column.group != "identity":
            assert not column.deterministic, column.name


@pytest.mark.parametrize("columns", [METRICS, LAYERS], ids=["metrics", "layers"])
def test_every_column_is_declared_once_and_completely(columns: tuple[Column, ...]) -> None:
    assert_declared_completely(columns)


@pytest.mark.parametrize("group", GROUPS)
def test_the_promised_columns_exist(group: str) -> None:
    missing = set(GROUPS[group].split()) - {column.name for column in METRICS if column.group == group}
    assert not missing


def test_bytes_and_accuracy_repeat() -> None:
    assert METRICS_BY_NAME["test_accuracy"].deterministic
    assert METRICS_BY_NAME["payload_bytes_per_step"].deterministic


def from_cells(cells: Mapping[str, str]) -> dict[str, Any]:
    return {name: from_cell(cell, METRICS_BY_NAME[name].type) for name, cell in cells.items()}


@given(st.fixed_dictionaries({}, optional={column.name: VALUES[column.type] for column in METRICS}))
def test_cells_bring_the_same_values_back(values: Mapping[str, Any]) -> None:
    read = from_cells(to_cells(values, METRICS))
    assert {name: value for name, value in read.items() if value is not None} == dict(values)
    assert set(read) == set(METRICS_BY_NAME)


def test_nothing_is_an_empty_cell() -> None:
    cells = to_cells({"lr": None, "test_loss": math.nan, "augment": True}, METRICS)
    assert (cells["lr"], cells["test_loss"], cells["seed"]) == ("", "", "")
    assert cells["augment"] == "true"
    assert from_cells({"lr": ""}) == {"lr": None}


def test_a_value_without_a_column_is_a_bug() -> None:
    with pytest.raises(KeyError, match="learning_rate"):
        to_cells({"learning_rate": 0.1}, METRICS)


@pytest.mark.parametrize(("column", "cell"), [("seed", "one"), ("lr", "fast"), ("augment", "maybe")])
def test_a_cell_of_another_type_is_refused(column: str, cell: str) -> None:
    with pytest.raises(ValueError, match=cell):
        from_cells({column: cell})


@pytest.mark.parametrize("cell", ["inf", "-inf", "nan"])
def test_what_overflowed_is_no_value(cell: str) -> None:
    assert from_cells({"samples_per_s": cell}) == {"samples_per_s": None}


@pytest.mark.parametrize(("column", "cell"), [("samples_per_s", "1e101"), ("seed", "1e17"), ("seed", "inf")])
def test_what_nobody_can_have_measured_is_refused(column: str, cell: str) -> None:
    with pytest.raises(ValueError, match="larger than anything that can be measured"):
        from_cells({column: cell})


def test_integers_may_look_like_floats() -> None:
    assert from_cells({"seed": "3.0"}) == {"seed": 3}


def test_columns_of_packages_stand_at_the_end_of_their_groups_and_impossible_ones_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = (Column("wire", "sent", int, "bytes sent"),), (Column("health", "lost", int, "ranks lost"),)
    good = Column("wire", "retries", int, "messages sent again")
    impossible = [Column("weather", "rain", float, "in mm"), Column("health", "sent", int, "twice"), "text", good]
    assert [column.name for column in with_added(seen, [good, *impossible])] == ["sent", "retries", "lost"]
    warnings = capsys.readouterr().err
    assert warnings.count("warning: left out: ") == 4
    assert "declare a Column with a new name, in one of the groups wire, health" in warnings
