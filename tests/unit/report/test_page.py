from __future__ import annotations

import html.parser
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.core.errors import UsageError
from bench.report.page import page, to_html
from tests.testing.fake_results import everything, fake_run, results
from tests.testing.fake_rows import fake_row, fake_seeds, topk_seeds

pytestmark = pytest.mark.slow  # each test draws a page with pictures

HOSTILE = "</style><script>alert('x')</script>\" onload=\"x&amp;"
VOID = {"meta", "br", "wbr", "img", "link", "input", "hr"}


class Elements(html.parser.HTMLParser):
    """Parses every element of a page with its attributes; an end tag must close the open element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in {tag}"
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def named(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.found if tag in tags]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    return to_html(page(results(tmp_path_factory.mktemp("full"), *everything()), [], []))


of_the_full_page = pytest.mark.xdist_group("full page")  # the page is made once for all of these tests


@of_the_full_page
def test_the_page_needs_nothing_from_elsewhere(full: str) -> None:
    elements = Elements(full)
    references = [
        value
        for _, attributes in elements.found
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset")
    ]
    assert references
    assert all(value and value.startswith(("#", "data:image/png;base64,")) for value in references)
    assert all(target.startswith("#") for target in re.findall(r"url\((.)", full))
    assert not elements.named("script", "link", "iframe", "object", "embed", "base")
    assert "@import" not in full


@of_the_full_page
def test_every_picture_has_its_text_and_a_caption(full: str) -> None:
    elements = Elements(full)
    pictures = elements.named("svg")
    assert len(pictures) == 10
    assert all(svg["role"] == "img" and "topk:ratio=0.01" in str(svg["aria-label"]) for svg in pictures)
    assert len(elements.named("figcaption")) == 10


@of_the_full_page
def test_the_page_is_well_formed_and_its_headings_in_order(full: str) -> None:
    elements = Elements(full)
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(set(ids)) == len(ids)
    levels = [int(tag[1]) for tag, _ in elements.found if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert levels.count(1) == 1
    assert all(cell.get("scope") in ("row", "col") for cell in elements.named("th"))
    assert len(elements.named("caption")) == len(elements.named("table"))


@pytest.mark.parametrize(
    "columns",
    [("compressor", "collective"), ("model",), ("name", "host", "cpu", "git_sha")],
    ids="+".join,
)
def test_texts_from_files_are_escaped(columns: tuple[str, ...], tmp_path: Path) -> None:
    hostile = dict.fromkeys(columns, HOSTILE)
    rows = [*fake_run([0.5, 0.95]), *fake_run([0.5, 0.95], **{"compressor": "topk", **hostile})]
    rows.append(fake_row(**{"compressor": "sign", "seed": 2, "status": "failed", **hostile, "error": HOSTILE}))
    text = to_html(page(results(tmp_path, rows), [], [HOSTILE]))
    assert not Elements(text).named("script")
    assert "<script" not in text
    assert not [name for _, attributes in Elements(text).found for name in attributes if name == "onload"]
    assert "&lt;script&gt;" in text


def test_environments_say_versions_and_commands(tmp_path: Path) -> None:
    file, broken, foreign = (tmp_path / name for name in ("good.json", "broken.json", "foreign.json"))
    command = ["/somewhere/bench", "run", "--name", "two words <b>"]
    file.write_text(
        json.dumps({"command": command, "system": "Linux", "python": "3.11.7", "packages": {"torch": "2.14.1"}})
    )
    broken.write_text("{")
    foreign.write_text("[1]")
    content = page(results(tmp_path, fake_run([0.95])), [file, file, broken, foreign], [])
    assert content.commands == ["bench run --name 'two words <b>'"]
    assert content.versions == ["Linux, Python 3.11.7, torch 2.14.1"]
    for name in ("broken", "foreign"):
        said = f"{name}.json is left out, because it is not an environment.json of bench"
        assert any(said in sentence for sentence in content.caveats)
    assert "--name &#39;two words &lt;b&gt;&#39;" in to_html(content)


def test_each_link_is_judged_by_itself(tmp_path: Path) -> None:
    rows = [
        *fake_seeds([100, 101, 102], uplink_bps=1e7, target_accuracy=None, config_id="dense, slow"),
        *topk_seeds([300, 301, 302], uplink_bps=1e7, target_accuracy=None, config_id="topk, slow"),
        *fake_seeds([1000, 1010, 1020], uplink_bps=1e9, target_accuracy=None, config_id="dense, fast"),
        *topk_seeds([600, 610, 620], uplink_bps=1e9, target_accuracy=None, config_id="topk, fast"),
    ]
    content = page(results(tmp_path, rows), [], [])
    assert [(section.label, section.answer) for section in content.sections] == [
        (
            "uplink_bps=10 Mbit/s",
            "Yes: topk:ratio=0.01 + allgather is faster than none + native, and no worse in accuracy.",
        ),
        ("uplink_bps=1 Gbit/s", "No: no row is faster than none + native."),
    ]
    assert "over links of 10 Mbit/s and 1 Gbit/s" in content.question


@pytest.mark.parametrize(
    ("candidate", "answer"),
    [
        ({"samples_per_s": [300, 301, 302], "accuracy": [0.80, 0.81, 0.80]}, "Perhaps: .* but worse in accuracy, or"),
        ({"samples_per_s": [300]}, "These runs do not show whether .* is faster than none [+] native[.]"),
        ({"samples_per_s": [100, 101, 102]}, "No: no row is faster"),
        ({"samples_per_s": [300], "status": "failed"}, "These runs do not show whether .* is faster than none"),
    ],
)
def test_the_verdict_is_the_comparisons(candidate: dict[str, object], answer: str, tmp_path: Path) -> None:
    rows = [
        *fake_seeds([100, 101, 102], target_accuracy=None),
        *topk_seeds(**{"target_accuracy": None, **candidate}),  # type: ignore[arg-type]
    ]
    (section,) = page(results(tmp_path, rows), [], []).sections
    assert re.match(answer, section.answer)


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        (
            [*fake_seeds([100, 101, 102], compressor="bf16"), *fake_seeds([130, 131, 132])],
            "These runs do not show whether compression pays: no row compresses.",
        ),
        (
            [*topk_seeds([100, 101, 102]), *topk_seeds([300, 301, 302], compressor="powersgd")],
            "These runs do not show whether compression pays: the baseline, topk:ratio=0.01 + allgather, also "
            "compresses.",
        ),
        (
            [*fake_seeds([100, 101, 102], compressor="bf16"), *fake_seeds([130, 131, 132]), *topk_seeds([60, 61, 62])],
            "No: no row is faster than bf16 + native.",
        ),
    ],
)
def test_whether_compression_pays_is_told_of_rows_that_compress_beside_one_that_does_not(
    rows: list[dict[str, Any]], answer: str, tmp_path: Path
) -> None:
    rows = [row | {"target_accuracy": None} for row in rows]
    (section,) = page(results(tmp_path, rows), [], []).sections
    assert section.answer == answer


def test_the_evidence_names_factor_and_points(tmp_path: Path) -> None:
    rows = [
        *fake_seeds([100, 101, 102], [0.97, 0.98, 0.975], target_accuracy=None),
        *topk_seeds([300, 301, 302], [0.90, 0.91, 0.905], target_accuracy=None),
        *topk_seeds([300], compressor="sign", target_accuracy=None, status="failed"),
    ]
    (section,) = page(results(tmp_path, rows), [], []).sections
    assert section.evidence == [
        "topk:ratio=0.01 + allgather: faster, 2.98x [2.92x, 3.05x]; accuracy lower, -7.0 [-8.1, -5.9] points.",
        "sign + allgather: no run ended well.",
    ]


def test_a_single_configuration_is_compared_with_nothing(tmp_path: Path) -> None:
    (section,) = page(results(tmp_path, fake_run([0.95])), [], []).sections
    assert section.answer == "There is only none + native, and nothing to compare it with."


def test_runs_too_short_to_time_are_judged_by_accuracy(tmp_path: Path) -> None:
    rows = [
        fake_row(compressor=name, target_accuracy=None, time_to_target_s=None, samples_per_s=None)
        for name in ("none", "topk")
    ]
    (section,) = page(results(tmp_path, rows), [], []).sections
    assert section.answer == "These runs do not show whether topk + native is better in accuracy than none + native."


def test_a_baseline_that_no_row_fits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no row fits --baseline sign"):
        page(results(tmp_path, fake_run([0.95]), baseline="sign"), [], [])


@of_the_full_page
def test_every_cell_names_its_column_where_columns_do_not_fit(full: str) -> None:
    cells = Elements(full).named("td")
    assert cells
    assert all(cell.get("data-heading") for cell in cells)
    assert not [cell for cell in cells if "\n" in (cell["data-heading"] or "")]
