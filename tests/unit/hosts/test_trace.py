"""Traces: their contents, their rates, and one error message for an invalid file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.core.errors import UsageError
from bench.hosts.cluster import Trace


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_trace_is_its_opportunities(tmp_path: Path) -> None:
    trace = Trace.of(write(tmp_path / "cell.up", "0\n5\n5\n\t10 \n"))
    assert list(trace.opportunities()) == [0, 5, 5, 10]
    assert trace.mean_bps == pytest.approx(4 * 1514 * 8 / 10e-3)
    assert trace.label == f"cell.up ({trace.digest})"


def test_a_byte_order_mark_says_nothing(tmp_path: Path) -> None:
    marked = Trace.of(write(tmp_path / "marked", "\ufeff0\n5\n"))
    assert marked.digest == Trace.of(write(tmp_path / "plain", "0\n5\n")).digest


def test_the_digest_is_that_of_what_it_says(tmp_path: Path) -> None:
    digests = [
        Trace.of(write(tmp_path / str(index), text)).digest for index, text in enumerate(("1\n2\n", "1\r\n2", "1\n3\n"))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_a_trace_that_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "cell", "1\n")
    trace = Trace.of(path)
    write(path, "2\n")
    with pytest.raises(UsageError, match="has changed since the run was configured"):
        trace.opportunities()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "needs a line with a millisecond above 0"),
        ("0\n0\n", "needs a line with a millisecond above 0"),
        ("1\nfast\n", "line 2: 'fast' is not a delivery opportunity"),
        ("2\n1\n", "line 2: '1' is not a delivery opportunity; .* none smaller than the number before"),
        ("1.5\n", "line 1: '1.5' is not"),
        ("-1\n", "line 1: '-1' is not"),
        ("1\n\n2\n", "line 2: '' is not"),
        ("9" * 5000, "line 1: '99999999999999999999' is not"),
        ("1073741825\n", "is not a delivery opportunity"),
        ("²\n", "it holds more than numbers"),
        ("é\n", "it holds more than numbers"),
    ],
)
def test_what_is_no_trace_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        Trace.of(write(tmp_path / "cell", text))
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        Trace.of(tmp_path)
