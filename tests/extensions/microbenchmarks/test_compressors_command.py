"""`bench compressors`: consistent figures, their CSV and JSON output, and refusals in one sentence."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bench.core import spec
from bench.core.rows import read_rows
from bench.extensions.microbenchmarks import measurement
from bench.extensions.microbenchmarks.columns import COMPRESSORS
from bench.extensions.microbenchmarks.measurement import check_encoding
from bench.extensions.microbenchmarks.options import CompressorsConfig
from tests.testing import silent_worker
from tests.testing.invoke import Answer, invoke

pytestmark = pytest.mark.xdist_group("bench compressors")  # two measurements serve all tests

CHOSEN = "none,topk:ratio=0.1,value_dtype=fp32,sign,powersgd"


def measure(*arguments: str) -> Answer:
    return invoke("compressors", "--model", "linear", "--repeats", "2", "--compressors", CHOSEN, *arguments)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], Path]:
    """Measure twice, the second time with recorded gradients; return the first call's rows and the CSV file."""
    out = tmp_path_factory.mktemp("compressors") / "encoding.csv"
    first = measure("--json", "--out", str(out))
    assert first.code == 0, first.error
    second = measure("--gradients", "recorded", "--out", str(out))
    assert second.code == 0, second.error
    assert "Compressors on recorded gradients of linear" in second.out
    assert "topk:ratio=0.1,value_dtype=fp32" in second.out
    return {row["compressor"]: row for row in json.loads(first.out)}, out


def test_there_is_a_row_for_each_compressor_in_the_order_asked_for(
    measured: tuple[dict[str, dict[str, Any]], Path],
) -> None:
    rows, _ = measured
    assert list(rows) == ["none", "topk:ratio=0.1,value_dtype=fp32", "sign", "powersgd"]
    for row in rows.values():
        assert row["dense_bytes"] == 4 * row["numel"]
        assert row["compression_ratio"] == row["dense_bytes"] / row["packed_bytes"]
        assert row["encode_Bps"] == pytest.approx(row["dense_bytes"] / row["encode_s"])
        assert 0 < row["decode_s"] < 10


def test_nothing_is_lost_without_compression(measured: tuple[dict[str, dict[str, Any]], Path]) -> None:
    row = measured[0]["none"]
    assert (row["relative_error"], row["cosine"], row["contraction_seen"], row["contraction_proved"]) == (0, 1, 0, 0)
    assert row["packed_bytes"] == row["dense_bytes"] + 16


def test_what_is_lost_lies_below_what_is_proved(measured: tuple[dict[str, dict[str, Any]], Path]) -> None:
    for name in ("topk:ratio=0.1,value_dtype=fp32", "sign"):
        row = measured[0][name]
        assert 0 < row["contraction_seen"] <= row["contraction_proved"] < 1
        assert row["relative_error"] ** 2 <= row["contraction_seen"]
    assert measured[0]["powersgd"]["contraction_proved"] == 1  # its warm start may lose everything


def test_both_calls_are_in_the_file_with_their_origin(measured: tuple[dict[str, dict[str, Any]], Path]) -> None:
    rows = read_rows(measured[1], COMPRESSORS)
    assert [row["gradients"] for row in rows] == ["synthetic"] * 4 + ["recorded"] * 4
    assert rows[0]["relative_error"] == 0
    assert rows[1]["packed_bytes"] == measured[0]["topk:ratio=0.1,value_dtype=fp32"]["packed_bytes"]
    assert all(row["torch_version"] and row["started_at"] for row in rows)
    assert all(0 < row["cosine"] <= 1 + 1e-12 for row in rows)


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--compressors", "torch_fp16"), "torch_fp16 works through DDP's own hook"),
        (("--compressors", "topkk"), "there is no compressor 'topkk' (did you mean 'topk'?)"),
        (("--compressors", "topk:ratio=2"), "topk: ratio=2 is not possible"),
        (("--model", "resnet19"), "there is no model 'resnet19'"),
        (("--out", "/no/such/folder/x.csv"), "cannot write /no/such/folder/x.csv"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(arguments: tuple[str, ...], sentence: str) -> None:
    answer = invoke("compressors", *arguments)
    assert answer.code == 2
    assert sentence in answer.error


def test_a_process_that_fails_is_a_failed_run_and_its_log_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(measurement, "ENCODE", "json.tool")
    answer = measure()
    assert answer.code == 3
    assert "the job ended without an error message; the last line of its log: " in answer.error
    folder = Path(answer.error.partition("logs are in ")[2])
    assert "json" in (folder / "logs" / "torchrun.log").read_text(encoding="utf-8")


def test_a_process_that_says_nothing_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(measurement, "ENCODE", silent_worker.__name__)
    answer = measure("--timeout", "1")
    assert answer.code == 3
    assert "the job reported no result for 1 s" in answer.error


def test_all_compressors_are_measured_unless_some_are_named() -> None:
    chosen = spec.split_list(check_encoding(CompressorsConfig()).compressors)
    assert chosen[0] == "none"
    assert {"group_topk", "powersgd", "sign"} < set(chosen)
    assert not any(name.startswith("torch_") for name in chosen)
