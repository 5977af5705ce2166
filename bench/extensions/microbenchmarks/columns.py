"""Declare the columns of the CSV files and of the printed tables of `bench collectives` and `bench compressors`.

``python -m bench.extensions.microbenchmarks.columns`` writes the columns of the files to docs/measure-columns.md; a
test fails if that page does not match.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bench.core.columns import Column, bytes_per_s, declared_columns, identity, num_bytes, seconds
from bench.core.schema import ORIGIN
from bench.core.units import format_bytes, format_seconds
from bench.extensions.microbenchmarks.options import CollectivesConfig, CompressorsConfig
from bench.report.columns import NOTHING, format_factor
from bench.report.store import Row
from bench.report.tables import Table, TableCell, TableColumn, table_of

_network = partial(Column, "network")

COLLECTIVES: tuple[Column, ...] = (
    identity("collective", str, "collective"),
    identity("payload", str, "compressor that made the payload; none: the tensor is sent uncompressed"),
    identity("size_bytes", int, "bytes of the tensor that is summed, before compression", unit="bytes"),
    identity("count", int, "elements of the tensor that is summed"),
    *declared_columns(CollectivesConfig),
    _network(
        "measured_bandwidth_bps",
        float,
        "slowest rate between two hosts, measured before the first sum",
        unit="bit/s",
        deterministic=False,
    ),
    _network(
        "measured_rtt_s",
        float,
        "round-trip time between two hosts, measured before the first sum; median over hosts",
        unit="s",
        deterministic=False,
    ),
    _network(
        "measured_loss_ratio",
        float,
        "share of datagrams that were lost, measured before the first sum (only if links lose frames on purpose)",
        deterministic=False,
    ),
    _network(
        "forwarder_cpu_share",
        float,
        "share of one core that the forwarder between virtual hosts used during the sums (empty: no forwarder)",
        better="lower",
        deterministic=False,
    ),
    _network(
        "wire_headers",
        str,
        "exact: the kernel counted real frames; estimated: segmentation offload was on, so headers are computed",
    ),
    _network(
        "link_warnings",
        str,
        "links whose measured rate, delay or loss differs from the requested one (for rates: by more than 10 %)",
        deterministic=False,
    ),
    seconds(
        "speed",
        "time_p50_s",
        "time of one sum on the slowest rank, until the result is a dense tensor; median of each round, then median "
        "over rounds",
    ),
    seconds(
        "speed",
        "time_p95_s",
        "time of one sum on the slowest rank: 95th percentile of each round, then median over rounds",
    ),
    bytes_per_s("speed", "algbw_Bps", "size_bytes / time_p50_s"),
    bytes_per_s(
        "speed",
        "busbw_Bps",
        "algbw_Bps x 2(n-1)/n for n ranks; for dense payloads it can be compared with the rate of a link",
    ),
    Column(
        "health",
        "num_wrong",
        int,
        "elements that differ from a serial sum in the documented order (native: by more than its error bound), "
        "summed over ranks and rounds",
        better="lower",
    ),
    Column("wire", "messages", float, "messages sent per sum, mean over ranks (empty: the backend gives no number)"),
    num_bytes(
        "wire", "bytes_sent", "bytes sent per sum, mean over ranks (native: computed as 2(n-1)/n x the tensor's size)"
    ),
    num_bytes(
        "wire",
        "wire_bytes_sent",
        "bytes of Ethernet frames sent per sum and host, mean over hosts, counted by the kernel (virtual hosts only); "
        "includes headers and acknowledgements, but not the barrier between sums",
        deterministic=False,
    ),
    Column(
        "speed",
        "of_limit",
        float,
        "shortest time in which the busiest link could carry its frames / time_p50_s (virtual hosts with a rate only)",
        better="higher",
        deterministic=False,
    ),
    *ORIGIN,
)

_size = partial(Column, "size")
_loss = partial(Column, "loss")

COMPRESSORS: tuple[Column, ...] = (
    identity("compressor", str, "compressor"),
    identity("numel", int, "elements of the gradient"),
    identity("dense_bytes", int, "bytes of the gradient in fp32", unit="bytes"),
    *declared_columns(CompressorsConfig),
    num_bytes("size", "packed_bytes", "bytes of the packed payloads with headers, all buckets, mean over repeats"),
    _size("compression_ratio", float, "dense_bytes / packed_bytes", better="higher"),
    _size("bits_per_element", float, "8 x packed_bytes / numel", unit="bits", better="lower"),
    _size("effective_density", float, "entries sent / entries of the gradient"),
    _loss(
        "relative_error",
        float,
        "norm(x - C(x)) / norm(x), mean over repeats; x: the gradient plus the residual of earlier repeats, C(x): the "
        "decoded payload",
        better="lower",
    ),
    _loss("cosine", float, "cosine of the angle between x and C(x), mean over repeats", better="higher"),
    _loss(
        "contraction_seen",
        float,
        "norm(x - C(x))^2 / norm(x)^2, mean over repeats, in the layer or bucket where it is largest",
        better="lower",
    ),
    _loss(
        "contraction_proved",
        float,
        "proved upper bound of contraction_seen over all x, in expectation for random methods (1: possibly nothing of "
        "x arrives; empty: no bound is known)",
    ),
    seconds(
        "speed",
        "encode_s",
        "time to add the residual, encode, pack the payload and keep the new residual, all rounds, median over repeats",
    ),
    bytes_per_s("speed", "encode_Bps", "dense_bytes / encode_s"),
    seconds("speed", "decode_s", "time to turn one packed payload into the decoded gradient, median over repeats"),
    bytes_per_s("speed", "decode_Bps", "dense_bytes / decode_s"),
    *ORIGIN,
)


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Return rows of `bench collectives` with two more values: `speedup_to_native` and `bytes_to_allgather`.

    `speedup_to_native` is the time of collective `native` with the dense tensor / the time of the row.
    `bytes_to_allgather` is the bytes sent in the row / the bytes that collective `allgather` sent with the same
    payload. Both compare rows of the same tensor size, and are None if there is no row to compare with.
    """
    by_pair = {(row["size_bytes"], row["collective"], row["payload"]): row for row in rows}

    compared = []
    for row in rows:
        native = by_pair.get((row["size_bytes"], "native", "none"))
        gathered = by_pair.get((row["size_bytes"], "allgather", row["payload"]))
        ratios = {
            "speedup_to_native": native["time_p50_s"] / row["time_p50_s"] if native else None,
            "bytes_to_allgather": row["bytes_sent"] / gathered["bytes_sent"] if gathered else None,
        }
        compared.append(row | ratios)
    return compared


def collectives_table(rows: Sequence[Row], subtitle: str) -> Table:
    """Return the table that `bench collectives` prints.

    Args:
        rows: at least one row, as returned by `with_ratios`, with the columns of `COLLECTIVES`, and with the values
            `overlap` and `bytes_sent_max`, which are not in the CSV file.
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
    """Return the table that `bench compressors` prints.

    Args:
        rows: at least one row, with the columns of `COMPRESSORS`.
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
    # Declare a column of a table. Its values come from a CSV column, or are computed from the row. Wrong sums are red.

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
    _column(  # empty if all ranks send about the same number of bytes
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
    _column("GB/s", lambda row: row["encode_Bps"] / 1e9, "{:.3g}".format),
    _column("decode", "decode_s", format_seconds),
    _column("GB/s", lambda row: row["decode_Bps"] / 1e9, "{:.3g}".format),
)
_NOTES_ON_COMPRESSORS = (
    "error, cosine: the decoded gradient compared with the gradient plus the residual of earlier steps",
    "contraction: the squared error of the worst layer or bucket, and the bound proved for any gradient (in "
    "expectation for random methods; 1: possibly nothing arrives; -: there is no bound)",
    "GB/s: bytes of the dense gradient per second of encoding or decoding",
)


PAGE = Path("docs/measure-columns.md")


def document() -> str:
    """Return the whole text of docs/measure-columns.md."""
    from bench.cli.reference_pages import sections  # imports `bench run`, so only if it is needed

    return f"""\
<!-- Written by `python -m bench.extensions.microbenchmarks.columns`; edit the columns there, not this page. -->

# Columns of measured parts

This page lists every column that `bench collectives --out` and `bench compressors --out` write. Both commands append to
the file, and `started_at` tells the calls apart. [Columns](columns.md) explains units, *Better* and *Repeats*.

## bench collectives

There is one row per collective, payload and size.

{sections(COLLECTIVES)}
## bench compressors

There is one row per compressor.

{sections(COMPRESSORS)}"""


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
