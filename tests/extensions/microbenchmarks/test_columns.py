"""The table of `bench collectives`: the pairs that are compared."""

from __future__ import annotations

from typing import Any

from bench.extensions.microbenchmarks.columns import collectives_table, with_ratios
from bench.report.tables import to_text


def row(collective: str, payload: str, time_s: float, bytes_sent: float, **more: Any) -> dict[str, Any]:
    base = {
        "collective": collective, "payload": payload, "world_size": 4, "size_bytes": 1_000_000, "count": 250_000,
        "dtype": "fp32", "time_p50_s": time_s, "time_p95_s": 2 * time_s, "algbw_Bps": 1e6 / time_s,
        "busbw_Bps": 1.5e6 / time_s, "num_wrong": 0, "messages": 6.0, "bytes_sent": bytes_sent,
        "bytes_sent_max": bytes_sent, "overlap": None, "wire_bytes_sent": None, "of_limit": None,
    }  # fmt: skip
    return base | more


ROWS = [
    row("native", "none", 0.010, 1.5e6, messages=None),
    row("ring", "none", 0.008, 1.5e6),
    row("allgather", "topk", 0.005, 60_000, overlap=0.25),
    row("ring", "topk", 0.020, 45_000, overlap=0.25, bytes_sent_max=50_000),
    row("ring", "topk", 0.030, 80_000, overlap=0.01, size_bytes=2_000_000),
]


def test_rows_of_one_size_are_compared() -> None:
    compared = with_ratios(ROWS)
    assert [r["speedup_to_native"] for r in compared] == [1, 1.25, 2, 0.5, None]
    assert [r["bytes_to_allgather"] for r in compared] == [None, None, 1, 0.75, None]


def test_it_shows_what_people_ask_for() -> None:
    text = to_text(collectives_table(with_ratios(ROWS), "how"), width=200)
    lines = [line.split() for line in text.splitlines() if " topk " in line or " none " in line]
    assert lines[0][-8:] == ["1.00x", "0", "-", "1.5", "MB", "-", "-", "-"]  # the backend does not report its messages
    assert lines[1][-8:] == ["1.25x", "0", "6", "1.5", "MB", "-", "-", "-"]
    assert lines[3][-9:] == ["0.50x", "0", "6", "45", "kB", "50", "kB", "0.75x", "0.250"]
    assert "Sums over 4 ranks" in text
    assert "above 1x is faster" in text
    assert "below 1x is less" in text


def test_columns_and_notes_without_anything_to_say_are_left_out() -> None:
    text = to_text(collectives_table(with_ratios([ROWS[1]]), "how"), width=200)
    for heading in ("native", "allgather", "overlap", "busiest", "frames", "limit"):
        assert heading not in text


def test_links_show_their_frames_and_how_full_they_were() -> None:
    text = to_text(
        collectives_table(with_ratios([row("ring", "none", 1.0, 1.5e6, wire_bytes_sent=1.6e6, of_limit=0.987)]), "how"),
        width=200,
    )
    assert "1.6 MB" in text
    assert "0.99" in text
    assert "1 is a full link" in text
