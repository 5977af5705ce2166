"""Build the table of `bench collectives`: the columns of nccl-tests, and ratios to native and to all-gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.core.units import format_bytes, format_seconds
from bench.report.configurations import NOTHING, format_factor
from bench.report.tables import Cell, Column, Table

Row = dict[str, Any]

_NOTES = {
    "speedup_to_native": "vs native: time of the dense tensor on native / this time; above 1x is faster",
    "bytes_to_allgather": "vs allgather: bytes sent / bytes of allgather with the same payload; below 1x is less",
    "wire_bytes_sent": "frames sent: bytes per sum and host as the kernel counts them, including headers",
    "of_limit": "of limit: time in which the busiest link could have carried its frames / p50; 1 is a full link",
    "overlap": "overlap: share of entries that two ranks both send, mean over pairs of ranks",
}


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with `speedup_to_native` and `bytes_to_allgather` added; None where no row is comparable.

    A row is compared with rows of the same size: `native` for the dense tensor, and `allgather` for the same payload.
    """
    by_pair = {(row["size_bytes"], row["collective"], row["payload"]): row for row in rows}

    def ratios(row: Row) -> Row:
        native = by_pair.get((row["size_bytes"], "native", "none"))
        gathered = by_pair.get((row["size_bytes"], "allgather", row["payload"]))
        return {
            "speedup_to_native": native["time_p50_s"] / row["time_p50_s"] if native else None,
            "bytes_to_allgather": row["bytes_sent"] / gathered["bytes_sent"] if gathered else None,
        }

    return [row | ratios(row) for row in rows]


def collectives_table(rows: Sequence[Row], subtitle: str) -> Table:
    """Return the table for the terminal.

    Args:
        rows: rows from `with_ratios`, with the columns of `COLLECTIVES`, `overlap` and `bytes_sent_max`.
        subtitle: how the rows were measured.
    """
    return Table(
        title=f"Sums over {rows[0]['world_size']} ranks" if rows else "No sum was measured",
        subtitle=subtitle,
        columns=[Column(heading=heading, align=align, priority=priority) for heading, align, priority, _ in _COLUMNS],
        rows=[[_cell(row, text) for _, _, _, text in _COLUMNS] for row in rows],
        notes=[note for name, note in _NOTES.items() if any(row[name] is not None for row in rows)],
    )


def _cell(row: Row, text: Callable[[Row], str | None]) -> Cell:
    return Cell(text=text(row) or NOTHING, style="bold red" if row["num_wrong"] else "")


def _shown(name: str, text: Callable[[Any], str]) -> Callable[[Row], str | None]:
    return lambda row: None if row[name] is None else text(row[name])


def _bandwidth(value: float) -> str:
    return f"{format_bytes(value)}/s"


def _ratio(value: float) -> str:
    return f"{format_factor(value)}x"


def _busiest(row: Row) -> str | None:
    """Return the bytes of the busiest rank, or None if all ranks send about the same."""
    differs = row["bytes_sent_max"] > 1.01 * row["bytes_sent"]
    return format_bytes(row["bytes_sent_max"]) if differs else None


_COLUMNS: tuple[tuple[str, Any, int, Callable[[Row], str | None]], ...] = (
    ("size", "right", 0, _shown("size_bytes", format_bytes)),
    ("payload", "left", 0, _shown("payload", str)),
    ("collective", "left", 0, _shown("collective", str)),
    ("count", "right", 3, _shown("count", str)),
    ("type", "left", 3, _shown("dtype", str)),
    ("p50", "right", 1, _shown("time_p50_s", format_seconds)),
    ("p95", "right", 2, _shown("time_p95_s", format_seconds)),
    ("algbw", "right", 1, _shown("algbw_Bps", _bandwidth)),
    ("busbw", "right", 1, _shown("busbw_Bps", _bandwidth)),
    ("vs\nnative", "right", 1, _shown("speedup_to_native", _ratio)),
    ("#wrong", "right", 1, _shown("num_wrong", str)),
    ("messages", "right", 1, _shown("messages", "{:.4g}".format)),
    ("sent", "right", 1, _shown("bytes_sent", format_bytes)),
    ("frames\nsent", "right", 1, _shown("wire_bytes_sent", format_bytes)),
    ("of\nlimit", "right", 1, _shown("of_limit", "{:.2f}".format)),
    ("busiest\nrank", "right", 2, _busiest),
    ("vs\nallgather", "right", 2, _shown("bytes_to_allgather", _ratio)),
    ("overlap", "right", 2, _shown("overlap", "{:.3f}".format)),
)
