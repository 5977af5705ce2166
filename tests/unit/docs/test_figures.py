"""The figures in README.md, docs/ and results/reference are those of the committed rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.prose.pages import PAGES, sentences_of
from benchmarks.prose.sentences import ROOT, Sentence

PAGE = """# Speed

The best method reached the target 11.7 times
sooner than dense fp32. | `topk` | 3 | 4.0 |
"""


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_is_that_of_the_rows(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [fault for sentence in sentences_of(page) if (fault := sentence.fault(text))] == []


def test_a_figure_that_the_rows_do_not_give_is_named_with_its_place() -> None:
    sentence = Sentence("speed.md", "target {:.1f} times sooner than dense", (14,))
    assert sentence.fault(PAGE) == (
        "speed.md:3: 'target 11.7 times sooner than dense', but the rows say 'target 14.0 times sooner than dense'"
    )
    assert sentence.fault(sentence.corrected(PAGE)) is None
    assert sentence.corrected(PAGE) == PAGE.replace("11.7", "14.0")
    assert Sentence("speed.md", "target {:.1f} times sooner than dense", (11.7,)).fault(PAGE) is None


def test_a_row_with_several_figures_and_one_wrong_is_a_fault() -> None:
    row = Sentence("speed.md", "| `topk` | {} | {:.1f} |", (3, 5))
    assert row.corrected(PAGE).endswith("| `topk` | 3 | 5.0 |\n")
    assert row.fault(PAGE)


def test_a_sentence_that_is_gone_is_a_fault() -> None:
    gone = Sentence("speed.md", "target {:.1f} times later than dense", (14,))
    assert gone.fault(PAGE) == "speed.md: no sentence reads 'target 14.0 times later than dense', as the rows say"


def test_the_program_needs_no_torch(tmp_path: Path) -> None:
    imports = "import sys; import benchmarks.prose.pages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", imports], cwd=ROOT, timeout=60, check=False).returncode == 0
