"""The progress line of a run, on terminals of several widths."""

from __future__ import annotations

import re

import pytest

from bench.api.progress import Display, LiveLine, fitted

TITLE = "12/24 resnet18-cifar10-group_topk-hierarchical seed 3"
REPORT = {
    "step": 1234,
    "total_steps": 5000,
    "epoch": 12.25,
    "loss": 2.3021,
    "accuracy": 0.7133,
    "samples_per_s": 11_650.0,
    "waiting_share": 0.21,
    "eta_s": 754.0,
}
EVALUATED = {"epoch": 12.0, "step": 1200, "train_loss": 0.1234, "test_accuracy": 0.98}


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int) -> list[str]:
    """Return the lines that a terminal of this width shows for a report and an evaluation."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("TERM", "xterm")
    with Display(TITLE) as display:
        display.report(REPORT)
        display._console.print(display._progress.get_renderable())  # draw it once
        display.report({"evaluated": EVALUATED})
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_the_line_fits_and_the_time_left_is_never_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    lines = shown(monkeypatch, capsys, width)
    assert all(len(line.rstrip()) <= width for line in lines)
    live = next(line for line in lines if "left" in line)
    assert "12 min 34 s left" in live
    assert ("epoch 12.2" in live) == (width >= 80)
    assert ("waiting 21%" in live) == (width >= 200)
    assert any("loss 0.1234  accuracy 98.00%" in line for line in lines) == (width >= 80)


def test_the_last_parts_go_first_and_then_the_end_of_the_title() -> None:
    assert fitted("run", ["1 s left", "loss 2"], 30) == ("run", "1 s left  loss 2")
    assert fitted("a" * 40, ["1 s left", "loss 2"], 34) == ("a" * 25 + "…", "1 s left")
    assert fitted("a" * 40, ["x" * 100], 60) == ("a" * 23 + "…", "x" * 35 + "…")


def test_brackets_in_a_title_are_no_markup() -> None:
    assert LiveLine("sweep [base]").title == "sweep [base]"


def test_a_text_shows_bits_per_byte_instead_of_accuracy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(REPORT, "bits_per_byte", 2.1234)
    monkeypatch.setitem(EVALUATED, "test_bits_per_byte", 2.1234)
    text = "\n".join(shown(monkeypatch, capsys, 200))
    assert "bits per byte 2.12  loss 2.302" in text
    assert "loss 0.1234  bits per byte 2.123" in text
    assert "accuracy" not in text
