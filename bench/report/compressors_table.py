"""Build the table of `bench compressors`: bytes sent, error, and times of encoding and decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from bench.core.units import format_bytes, format_seconds
from bench.report.configurations import NOTHING, format_factor
from bench.report.tables import Cell, Column, Table

Row = dict[str, Any]

_NOTES = (
    "error, cosine: of what arrives, compared with the gradient plus the residual of earlier steps",
    "contraction: the squared error of the worst layer or bucket, and the bound proved for any gradient (in "
    "expectation for random methods; 1: nothing may arrive; -: there is no bound)",
    "GB/s: bytes of the dense gradient per second of encoding or decoding",
)


def compressors_table(rows: Sequence[Row], subtitle: str) -> Table:
    """Return the table for the terminal.

    Args:
        rows: rows with the columns of `COMPRESSORS`.
        subtitle: how the rows were measured.
    """
    return Table(
        title=f"Compressors on {rows[0]['gradients']} gradients of {rows[0]['model']}" if rows else "Nothing measured",
        subtitle=subtitle,
        columns=[Column(heading=heading, align=align, priority=priority) for heading, align, priority, _ in _COLUMNS],
        rows=[[Cell(text=text(row) or NOTHING) for _, _, _, text in _COLUMNS] for row in rows],
        notes=_NOTES if rows else (),
    )


def _seconds(name: str) -> Callable[[Row], str]:
    return lambda row: format_seconds(row[name])


def _gigabytes(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name] / 1e9:.3g}"


def _share(name: str) -> Callable[[Row], str | None]:
    """Return a formatter with four decimals that never shows a value below 1 as 1."""
    return lambda row: None if row[name] is None else "<1" if 0.99995 <= row[name] < 1 else f"{row[name]:.4f}"


_COLUMNS: tuple[tuple[str, Literal["left", "right"], int, Callable[[Row], str | None]], ...] = (
    ("compressor", "left", 0, lambda row: str(row["compressor"])),
    ("packed", "right", 1, lambda row: format_bytes(row["packed_bytes"])),
    ("ratio", "right", 1, lambda row: f"{format_factor(row['compression_ratio'])}x"),
    ("bits per\nelement", "right", 1, lambda row: f"{row['bits_per_element']:.3g}"),
    ("error", "right", 1, _share("relative_error")),
    ("cosine", "right", 1, _share("cosine")),
    ("contraction\nseen", "right", 2, _share("contraction_seen")),
    ("proved", "right", 2, _share("contraction_proved")),
    ("encode", "right", 1, _seconds("encode_s")),
    ("GB/s", "right", 1, _gigabytes("encode_Bps")),
    ("decode", "right", 1, _seconds("decode_s")),
    ("GB/s", "right", 1, _gigabytes("decode_Bps")),
)
