"""Output of `bench collectives`, with the columns of nccl-tests, and of `bench compressors`: progress, rows, tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from typing_extensions import override

from bench.cli.console import LiveLine
from bench.core.errors import Interrupted
from bench.core.rows import RowWriter
from bench.core.units import format_bytes, format_seconds
from bench.report.columns import NOTHING, format_factor
from bench.report.store import Row
from bench.report.tables import Table, TableCell, TableColumn, table_of


class MeasurementProgress(LiveLine):
    """Rows and progress of a measurement whose components are interleaved.

    Args:
        title: subject of the measurement.
        total: number of timed blocks.
        describe: returns texts for a worker's report of a timed block: (part of the measurement, block).
        writer: appends the rows to a file; None: no file.

    Attributes:
        rows: rows measured so far, including values that are only shown and not written to the file.
    """

    def __init__(
        self, title: str, total: int, describe: Callable[[Any], tuple[str, str]], writer: RowWriter | None
    ) -> None:
        super().__init__(title)
        self.rows: list[dict[str, Any]] = []
        self._total, self._describe, self._writer = total, describe, writer
        self._part = ""

    @override
    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        error = raised[1]
        if isinstance(error, Interrupted):
            where = "shown" if self._writer is None else f"kept in {self._writer.path}"
            kept = f"the rows so far are {where}" if self.rows else "no row was finished, so none is kept"
            raise Interrupted(f"{error}; {kept}") from None

    def take(self, report: Mapping[str, Any]) -> None:
        """Handle a worker's report: keep its row, or show the block that ended."""
        if "row" in report:
            self.rows.append({**report["row"], **report.get("extras", {})})
            if self._writer is not None:
                self._writer.append(report["row"])
            return
        part, block = self._describe(report["turn"])
        self.update([f"{part}  {block}".strip()], total=self._total, advance=1)
        if part != self._part and not self.is_live:
            self.say(f"measuring {part}")
        self._part = part


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
    """Return the table of `bench collectives` for the terminal.

    Args:
        rows: rows from `with_ratios`, with the columns of `COLLECTIVES`, `overlap` and `bytes_sent_max`; at least one.
        subtitle: how the rows were measured.
    """
    return table_of(
        _COLLECTIVES,
        rows,
        title=f"Sums over {rows[0]['world_size']} ranks",
        subtitle=subtitle,
        notes=[note for name, note in _NOTES.items() if any(row[name] is not None for row in rows)],
    )


def compressors_table(rows: Sequence[Row], subtitle: str) -> Table:
    """Return the table of `bench compressors` for the terminal.

    Args:
        rows: rows with the columns of `COMPRESSORS`; at least one.
        subtitle: how the rows were measured.
    """
    return table_of(
        _COMPRESSORS,
        rows,
        title=f"Compressors on {rows[0]['gradients']} gradients of {rows[0]['model']}",
        subtitle=subtitle,
        notes=_NOTES_ON_COMPRESSORS,
    )


def _column(
    heading: str,
    value: str | Callable[[Row], Any],
    form: Callable[[Any], str] = str,
    priority: int = 1,
    align: Literal["left", "right"] = "right",
) -> tuple[TableColumn, Callable[[Row], TableCell]]:
    # A column is declared by its value, or the name of a value, and how it is written; rows with wrong sums are red.

    def cell(row: Row) -> TableCell:
        found = row[value] if isinstance(value, str) else value(row)
        return TableCell(
            text=NOTHING if found is None else form(found), style="bold red" if row.get("num_wrong") else ""
        )

    return TableColumn(heading, align, priority), cell


def _bandwidth(value: float) -> str:
    return f"{format_bytes(value)}/s"


def _ratio(value: float) -> str:
    return f"{format_factor(value)}x"


def _share(value: float) -> str:  # never shows a value below 1 as 1
    return "<1" if 0.99995 <= value < 1 else f"{value:.4f}"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.3g}"


_COLLECTIVES = (
    _column("size", "size_bytes", format_bytes, 0),
    _column("payload", "payload", priority=0, align="left"),
    _column("collective", "collective", priority=0, align="left"),
    _column("count", "count", priority=3),
    _column("type", "dtype", priority=3, align="left"),
    _column("p50", "time_p50_s", format_seconds),
    _column("p95", "time_p95_s", format_seconds, 2),
    _column("algbw", "algbw_Bps", _bandwidth),
    _column("busbw", "busbw_Bps", _bandwidth),
    _column("vs\nnative", "speedup_to_native", _ratio),
    _column("#wrong", "num_wrong"),
    _column("messages", "messages", "{:.4g}".format),
    _column("sent", "bytes_sent", format_bytes),
    _column("frames\nsent", "wire_bytes_sent", format_bytes),
    _column("of\nlimit", "of_limit", "{:.2f}".format),
    _column(  # empty if all ranks send about the same
        "busiest\nrank",
        lambda row: row["bytes_sent_max"] if row["bytes_sent_max"] > 1.01 * row["bytes_sent"] else None,
        format_bytes,
        2,
    ),
    _column("vs\nallgather", "bytes_to_allgather", _ratio, 2),
    _column("overlap", "overlap", "{:.3f}".format, 2),
)
_NOTES = {
    "speedup_to_native": "vs native: time of the dense tensor on native / this time; above 1x is faster",
    "bytes_to_allgather": "vs allgather: bytes sent / bytes of allgather with the same payload; below 1x is less",
    "wire_bytes_sent": "frames sent: bytes per sum and host as the kernel counts them, including headers",
    "of_limit": "of limit: time in which the busiest link could have carried its frames / p50; 1 is a full link",
    "overlap": "overlap: share of entries that two ranks both send, mean over pairs of ranks",
}

_COMPRESSORS = (
    _column("compressor", "compressor", priority=0, align="left"),
    _column("packed", "packed_bytes", format_bytes),
    _column("ratio", "compression_ratio", _ratio),
    _column("bits per\nelement", "bits_per_element", "{:.3g}".format),
    _column("error", "relative_error", _share),
    _column("cosine", "cosine", _share),
    _column("contraction\nseen", "contraction_seen", _share, 2),
    _column("proved", "contraction_proved", _share, 2),
    _column("encode", "encode_s", format_seconds),
    _column("GB/s", "encode_Bps", _gigabytes),
    _column("decode", "decode_s", format_seconds),
    _column("GB/s", "decode_Bps", _gigabytes),
)
_NOTES_ON_COMPRESSORS = (
    "error, cosine: of what arrives, compared with the gradient plus the residual of earlier steps",
    "contraction: the squared error of the worst layer or bucket, and the bound proved for any gradient (in "
    "expectation for random methods; 1: nothing may arrive; -: there is no bound)",
    "GB/s: bytes of the dense gradient per second of encoding or decoding",
)
