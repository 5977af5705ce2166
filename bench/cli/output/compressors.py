"""Output of `bench compressors`: the progress of its measurement, and the table at the end."""

from __future__ import annotations

from collections.abc import Sequence

from bench.cli.output.console import print_json, stdout_console
from bench.cli.output.turns import Turns
from bench.core.config.compressors import CompressorsConfig
from bench.core.rows import RowWriter
from bench.core.units import format_bytes
from bench.report.compressors_table import Row, compressors_table
from bench.report.tables import print_rich


def turns_of(config: CompressorsConfig, writer: RowWriter | None) -> Turns:
    """Return the progress display of a measurement."""
    count = len(config.compressor_specs)
    title = f"{count} compressors x {config.repeats} turns"
    return Turns(title, count * config.repeats, lambda compressor: ("", compressor), writer)


def print_rows(rows: Sequence[Row], config: CompressorsConfig, *, as_json: bool) -> None:
    """Print the measured rows on stdout."""
    if as_json:
        print_json(rows)
        return
    how = (
        f"{rows[0]['numel']:,} elements, {format_bytes(rows[0]['dense_bytes'])} in fp32; {config.device}, "
        f"threads: {config.threads}; medians of {config.repeats} turns, compressors in turn"
    )
    print_rich(compressors_table(rows, how), stdout_console())
