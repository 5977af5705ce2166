from __future__ import annotations

import csv
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bench.core.rows import RepeatedColumns, RowWriter, StoreError, read_rows
from bench.core.schema import LAYERS, METRICS


@contextmanager
def files_at_most(num_bytes: int) -> Iterator[None]:
    """Make the kernel refuse to extend a file beyond this size, in the middle of a write, like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_come_back_typed_and_the_header_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    RowWriter(path).append({"run_id": "r", "seed": 1, "test_accuracy": 0.5, "replicas_in_sync": True, "error": None})
    RowWriter(path).append({"run_id": "r", "seed": 2, "samples_per_s": float("nan")})

    first, second = read_rows(path)
    assert (first["seed"], first["test_accuracy"], first["replicas_in_sync"], first["error"]) == (1, 0.5, True, None)
    assert (second["seed"], second["samples_per_s"]) == (2, None)
    assert path.read_text().count("config_id") == 1
    assert path.read_text().splitlines()[0].split(",") == [column.name for column in METRICS]


def test_the_header_is_there_before_the_first_row(tmp_path: Path) -> None:
    RowWriter(tmp_path / "layers.csv", LAYERS)
    header = (tmp_path / "layers.csv").read_text()
    assert header.strip().split(",") == [column.name for column in LAYERS]
    assert read_rows(tmp_path / "layers.csv", LAYERS) == []


def test_several_rows_in_one_call(tmp_path: Path) -> None:
    RowWriter(tmp_path / "layers.csv", LAYERS).extend({"layer": f"conv{i}", "numel": i} for i in range(3))
    assert [row["numel"] for row in read_rows(tmp_path / "layers.csv", LAYERS)] == [0, 1, 2]


def test_a_column_outside_the_schema_is_a_programming_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="speed"):
        RowWriter(tmp_path / "metrics.csv").append({"speed": 1})


@example(error='Traceback:\n  "no",\r\n\x00 never\rso')
@given(error=st.text(max_size=60))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_stays_on_its_line(tmp_path: Path, error: str) -> None:
    path = tmp_path / "metrics.csv"
    path.unlink(missing_ok=True)
    writer = RowWriter(path)
    writer.append({"error": error, "seed": 1})
    writer.append({"seed": 2})
    assert [row["seed"] for row in read_rows(path)] == [1, 2]
    assert len(path.read_bytes().split(b"\n")) == 4


@pytest.mark.parametrize("error", ["", 'rank 1 said: "no, never"'])
def test_a_file_torn_at_any_byte_is_continued_without_gluing(tmp_path: Path, error: str) -> None:
    path = tmp_path / "layers.csv"
    writer = RowWriter(path, LAYERS)
    writer.append({"run_id": "whole", "step": 1})
    whole = len(path.read_bytes())
    writer.append({"run_id": "torn", "layer": error, "step": 2, "encode_s": 0.25})
    content = path.read_bytes()

    for length in range(len(content)):
        path.write_bytes(content[:length])
        RowWriter(path, LAYERS).append({"run_id": "next", "step": 3})
        skipped: list[str] = []
        rows = read_rows(path, LAYERS, warn=skipped.append)
        assert rows[-1]["run_id"] == "next"
        assert (rows[0]["run_id"] == "whole") == (length >= whole - 1)
        with path.open(newline="") as file:  # any CSV reader sees the same last row
            assert list(csv.DictReader(file))[-1]["run_id"] == "next"


def test_a_cut_last_line_is_skipped_and_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    writer = RowWriter(path)
    writer.append({"seed": 1, "started_at": "2026-01-01T00:00:00Z"})
    writer.append({"seed": 2, "started_at": "2026-01-01T00:00:00Z"})
    for missing in (25, 40):  # in the last cell but one
        content = path.read_bytes()
        path.write_bytes(content[:-missing])
        skipped: list[str] = []
        assert [row["seed"] for row in read_rows(path, warn=skipped.append)] == [1]
        assert len(skipped) == 1
        assert skipped[0].startswith(f"{path} line 3 is skipped: it is cut")
        path.write_bytes(content)


def test_a_complete_last_line_needs_no_newline(tmp_path: Path) -> None:
    path = tmp_path / "edited.csv"
    path.write_text("seed,status\n1,running\n1,ok")
    skipped: list[str] = []
    assert [row["status"] for row in read_rows(path, warn=skipped.append)] == ["running", "ok"]
    assert skipped == []


def test_a_column_that_is_there_twice_is_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "merged.csv"
    path.write_text("seed,test_accuracy,note,note,test_accuracy\n1,0.813,a,b,0.5\n")
    with pytest.raises(RepeatedColumns, match=r"more than one column test_accuracy$"):
        read_rows(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("x,ok", "invalid literal|could not convert"),
        ("inf,ok", "larger than anything"),
        ("1e300,ok", "larger than anything"),
        ("nan,ok", "larger than anything"),
        ("2", "1 cells under 2 columns"),
        ('2,"ok', "cut or damaged"),
    ],
)
def test_an_unreadable_line_is_skipped_and_its_neighbours_stay(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(f"seed,status\n1,ok\n{line}\n3,ok\n")
    skipped: list[str] = []
    assert [row["seed"] for row in read_rows(path, warn=skipped.append)] == [1, 3]
    (sentence,) = skipped
    assert sentence.startswith(f"{path} line 3 is skipped: ")
    assert re.search(reason, sentence)


def test_skipped_lines_go_to_stderr_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.csv").write_text("seed,status\n1,ok\n2")
    read_rows(tmp_path / "m.csv")
    assert "m.csv line 3 is skipped" in capsys.readouterr().err


def test_other_columns_other_line_ends_and_blank_lines_just_work(tmp_path: Path) -> None:
    path = tmp_path / "spreadsheet.csv"
    path.write_bytes("\ufeffseed,comment,test_accuracy\r\n1,fine,0.9\r\n\r\n2,,\r\n".encode())
    assert read_rows(path) == [{"seed": 1, "test_accuracy": 0.9}, {"seed": 2, "test_accuracy": None}]


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").touch()
    assert read_rows(tmp_path / "empty.csv") == []


def test_a_full_disk_loses_only_the_row_that_did_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    writer = RowWriter(path)
    writer.append({"seed": 1, "error": "x" * 50})
    kept = path.read_bytes()

    with (
        files_at_most(len(kept) + 30),
        pytest.raises(StoreError, match=r"cannot write .*metrics\.csv: .*--out") as info,
    ):
        writer.append({"seed": 2, "error": "y" * 50})

    assert info.value.exit_code == 3
    assert path.read_bytes() == kept
    writer.append({"seed": 3})
    assert [row["seed"] for row in read_rows(path)] == [1, 3]


def test_a_folder_that_does_not_exist_shows_before_the_first_row(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot write .*absent"):
        RowWriter(tmp_path / "absent" / "metrics.csv")


def test_a_file_of_another_schema_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("seed,loss\n1,2\n")
    with pytest.raises(StoreError, match="columns"):
        RowWriter(tmp_path / "metrics.csv")
    assert (tmp_path / "metrics.csv").read_text() == "seed,loss\n1,2\n"
