from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.testing.fake_results import fake_run
from tests.testing.fake_rows import fake_row, write_run
from tests.testing.invoke import invoke


def test_one_file_holds_everything(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "dense", *fake_run([0.5, 0.95]))
    found = {"command": ["bench", "run", "--seeds", "1-3"], "system": "Linux", "python": "3.13.1", "packages": {}}
    (folder / "environment.json").write_text(json.dumps(found))
    write_run(tmp_path / "runs" / "topk", *fake_run([0.5, 0.95], compressor="topk", git_dirty=True))
    out = tmp_path / "report.html"
    answer = invoke("report", str(tmp_path / "runs"), "--out", str(out))
    assert answer.code == 0, answer.error
    assert "warning: topk: run from a checkout with uncommitted changes" in answer.error
    text = out.read_text(encoding="utf-8")
    question, verdict = answer.out.splitlines()
    assert question.endswith("with no worse accuracy?")
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


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("nowhere",), 4, "nowhere does not exist"),
        (("--out", "nowhere/report.html"), 2, "cannot write nowhere/report.html"),
        (("--baseline", "sign"), 2, "no row fits --baseline sign"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    arguments: tuple[str, ...], code: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
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
