from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from bench.core.rows import RowWriter
from tests.testing.fake_results import fake_run
from tests.testing.fake_rows import fake_row, write_run
from tests.testing.invoke import invoke


def test_one_file_holds_everything(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "dense", *fake_run([0.5, 0.95]))
    (folder / "environment.json").write_text(json.dumps({"command": ["bench", "run", "--seeds", "1-3"]}))
    write_run(tmp_path / "runs" / "topk", *fake_run([0.5, 0.95], compressor="topk", git_dirty=True))
    out = tmp_path / "report.html"
    answer = invoke("report", str(tmp_path / "runs"), "--out", str(out))
    assert answer.code == 0, answer.error
    assert "warning: topk: run from a checkout with uncommitted changes" in answer.error
    text = out.read_text(encoding="utf-8")
    question, verdict = answer.out.splitlines()
    assert question.endswith("without losing accuracy?")
    assert question in text
    assert verdict in text
    assert "bench run --seeds 1-3" in text
    assert "topk: run from a checkout with uncommitted changes" in text
    assert text.count("<svg") >= 4


def test_what_could_not_be_read_is_a_caveat(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "dense", *fake_run([0.5, 0.95]))
    with (tmp_path / "runs" / "dense" / "metrics.csv").open("a") as file:
        file.write("torn")
    out = tmp_path / "report.html"
    assert invoke("report", str(tmp_path / "runs"), "--out", str(out)).code == 0
    assert "metrics.csv line 4 is skipped: it is cut" in out.read_text(encoding="utf-8")


def test_what_bench_predict_wrote_is_drawn_beside_the_runs(tmp_path: Path) -> None:
    """A curve that is named, a map and a table in folders of runs; what lies in a run's own folder is the run's."""
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


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("curve.json",), 4, "there is no readable row in curve.json"),
        (("nowhere",), 4, "nowhere does not exist"),
        (("--out", "nowhere/report.html"), 2, "cannot write nowhere/report.html"),
        (("--baseline", "sign"), 2, "no row fits --baseline sign"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    arguments: tuple[str, ...], code: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "curve.json").write_text('{"regimes": [], "notes": []}')
    write_run(tmp_path / "results" / "runs" / "a", fake_row())
    answer = invoke("report", *arguments)
    assert answer.code == code
    assert sentence in answer.error


def test_a_workload_that_lacks_the_baseline_has_its_own(tmp_path: Path) -> None:
    rows = [*fake_run([0.5, 0.95]), *fake_run([0.5, 0.95], compressor="bf16")]
    rows += [*fake_run([0.5, 0.95], model="resnet20"), *fake_run([0.5, 0.95], model="resnet20", compressor="topk")]
    write_run(tmp_path / "runs", *rows)
    answer = invoke("report", str(tmp_path), "--baseline", "bf16", "--out", str(tmp_path / "report.html"))
    assert answer.code == 0, answer.error
    assert "model=resnet20: no row fits --baseline bf16, so the default baseline is used" in " ".join(
        answer.error.split()
    )
    assert "model=small_cnn: no row fits" not in answer.error


def test_the_folder_of_the_usual_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs", *fake_run([0.5, 0.95]))
    assert invoke("report", "runs").code == 0
    assert (tmp_path / "results" / "report.html").is_file()
