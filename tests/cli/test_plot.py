from __future__ import annotations

from pathlib import Path

import pytest

from bench.core.rows import RowWriter
from bench.core.schema import LAYERS
from bench.report.plots.kinds import KINDS
from tests.testing.fake_results import everything
from tests.testing.fake_rows import fake_row, write_run
from tests.testing.invoke import invoke


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    rows, layers = everything()
    folder = write_run(tmp_path / "runs", *rows)
    RowWriter(folder / "layers.csv", LAYERS).extend(layers)
    return folder


@pytest.mark.long
def test_all_kinds_go_into_a_folder(runs: Path, tmp_path: Path) -> None:
    answer = invoke("plot", "all", str(runs), "--out", str(tmp_path / "new" / "plots"))
    assert answer.code == 0, answer.error
    assert {file.name for file in (tmp_path / "new" / "plots").iterdir()} == {f"{name}.svg" for name in KINDS}
    assert answer.out == ""


@pytest.mark.parametrize("suffix", ["png", "SVG", "pdf"])
def test_one_kind_goes_into_a_file(suffix: str, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / f"picture.{suffix}"
    assert invoke("plot", "density", str(runs), "--out", str(file)).code == 0
    assert file.stat().st_size > 1000


def test_what_the_rows_do_not_allow_is_said_and_the_rest_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", fake_row(train_time_s=3.0))
    answer = invoke("plot", "all", str(folder), "--out", str(tmp_path / "plots"), "--format", "png")
    assert answer.code == 0
    assert "scaling is not drawn: scaling needs a configuration that ran with two values" in answer.error
    assert (tmp_path / "plots" / "accuracy-time.png").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (
            ("accuracy-tim",),
            2,
            "there is no picture 'accuracy-tim' (did you mean 'accuracy-time'?); choose ",
        ),
        (("all", "--out", "x.png"), 2, "--out x.png is one file; give a folder for all kinds, or one kind"),
        (("scaling", "--out", "x.png"), 4, "scaling needs a configuration that ran with two values of --world-size"),
        (("target", "--out", "nowhere/x.png"), 2, "cannot write nowhere/x.png: No such file or directory"),
        (("target", "--out", "/dev/null/x"), 2, "cannot make the folder /dev/null/x"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    arguments: tuple[str, ...], code: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "results" / "runs" / "a", fake_row(train_time_s=3.0))
    answer = invoke("plot", *arguments)
    assert answer.code == code
    assert sentence in answer.error


def test_where_nothing_can_be_drawn_that_is_an_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", fake_row(status="failed", error="rank 1 was killed"))
    answer = invoke("plot", "all", str(folder), "--out", str(tmp_path / "plots"))
    assert answer.code == 4
    assert "no picture can be drawn from these rows; the warnings say what each picture needs" in answer.error
