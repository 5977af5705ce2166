"""Refusals of `bench run --compressor auto`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_run_refusals import assert_refused

pytestmark = pytest.mark.usefixtures("planned_here")

CHOICES = Path(__file__).with_name("choices.jsonl")
REFUSALS = [
    (["--compressor", "auto", "--collective", "server"], "use collective ring, native, tree"),
    (["--compressor", "auto:choices=nowhere.jsonl"], "holds no choices"),
    (["--compressor", f"auto:choices={CHOICES}", "--model", "resnet20"], "are those of another model"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSALS, ids=[" ".join(a) for a, _ in REFUSALS])
def test_refusal(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    assert_refused(arguments, sentence, tmp_path / "out")
