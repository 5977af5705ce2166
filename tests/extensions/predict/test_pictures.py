"""Pictures of the files of `bench predict` in `bench report` and `bench plot`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from bench.core.rows import RowWriter
from tests.testing.fake_results import fake_run
from tests.testing.fake_rows import write_run
from tests.testing.invoke import invoke


def test_what_bench_predict_wrote_is_drawn_beside_the_runs(tmp_path: Path) -> None:
    """A curve is named, and a map and a table lie in folders of runs; files in a run's own folder are not drawn."""
    runs, curve, table = tmp_path / "runs", tmp_path / "curve.json", tmp_path / "runs" / "predict" / "validation.csv"
    write_run(runs / "dense", *fake_run([0.5, 0.95]))
    (runs / "dense" / "config.json").write_text("{}")
    point = {"bandwidth_bps": 1e6, "step_time_s": 1.0, "dense_step_time_s": 2.0}
    pair = {"compressor": "topk", "collective": "allgather", "world_size": 2}
    said = json.dumps({**pair, "curve": [point, point | {"bandwidth_bps": 1e9}], "break_even_bps": [], "notes": []})
    for path in (curve, runs / "dense" / "own.json"):
        path.write_text(said)
    cell = pair | {"bandwidth_bps": 1e6, "speedup": 2.0, "outside": None}
    (runs / "map.json").write_text(json.dumps({"regimes": [cell], "notes": []}))
    table.parent.mkdir()
    table.write_bytes(Path("results/reference/predict-validation.csv").read_bytes())
    (runs / "other.json").write_text("[1, {}]")
    (runs / "torn.json").write_text(said[:-9])
    (runs / "nan.json").write_text(said.replace("1000000.0", "NaN"))
    (runs / "zero.csv").write_text("compressor,collective,predicted_step_time_s,step_time_s,error\na,b,1,0,1\n")
    os.mkfifo(runs / "pipe.json")
    (runs / "damaged.json").write_text(said.replace("bandwidth_bps", "rate"))
    out = tmp_path / "report.html"
    answer = invoke("report", str(runs), str(curve), "--out", str(out))
    assert answer.code == 0, answer.error
    text = out.read_text(encoding="utf-8")
    drawn = [text.count(f"Drawn from {file}.") for file in (curve, runs / "map.json", table)]
    assert drawn == [1, 1, 1]
    assert text.count("Drawn from ") == 3
    assert "damaged.json is damaged (&#39;bandwidth_bps&#39;); write it again with bench predict" in text
    for name in ("zero.csv", "nan.json"):
        assert f"{name} is damaged (a rate or a time is not a finite number above 0); write it again" in text
    assert "Predicted step times of topk on allgather and dense bf16" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert "is left out" not in answer.error


def test_a_table_of_predictions_among_collected_rows_is_no_row_that_is_left_out(tmp_path: Path) -> None:
    RowWriter(tmp_path / "collected.csv").extend(fake_run([0.5, 0.95]))
    table = tmp_path / "validation.csv"
    table.write_bytes(Path("results/reference/predict-validation.csv").read_bytes())
    answer = invoke("report", str(tmp_path), "--out", str(tmp_path / "report.html"))
    assert answer.code == 0, answer.error
    assert "validation.csv" not in answer.error
    assert f"Drawn from {table}." in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_damaged_file_of_predictions_is_refused_in_a_sentence(tmp_path: Path) -> None:
    deep, long = tmp_path / "deep.json", tmp_path / "long.csv"
    deep.write_text("[" * 200_000)
    long.write_text('error,a\n"' + "x" * 200_000)
    for kind, file in (("regime-map", deep), ("predicted-measured", long)):
        answer = invoke("plot", kind, str(file), "--out", str(tmp_path / "plots"))
        assert answer.code == 4, answer.error
        assert f"{file.name} cannot be read" in answer.error


def test_a_map_without_regimes_is_no_row_and_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "map.json").write_text('{"regimes": [], "notes": []}')
    answer = invoke("report", "map.json")
    assert answer.code == 4
    assert "there is no readable row in map.json" in answer.error
