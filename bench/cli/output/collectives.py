"""Output of `bench collectives`: the progress of its measurement, and the table at the end."""

from __future__ import annotations

from collections.abc import Sequence

from bench.cli.output.console import print_json, stdout_console
from bench.cli.output.turns import Turns
from bench.core.config.collectives import CollectivesConfig
from bench.core.rows import RowWriter
from bench.core.units import format_bytes
from bench.hosts.cluster import Cluster
from bench.report.collectives_table import Row, collectives_table, with_ratios
from bench.report.tables import print_rich


def turns_of(config: CollectivesConfig, writer: RowWriter | None) -> Turns:
    """Return the progress display of a sweep."""
    pairs, sizes = len(config.pairs), len(config.sizes_bytes)
    title = f"{config.world_size} ranks, {sizes} sizes x {pairs} pairs x {config.rounds} rounds"
    return Turns(title, pairs * sizes * config.rounds, _describe, writer)


def _describe(turn: tuple[str, str, int]) -> tuple[str, str]:
    collective, compressor, size = turn
    return format_bytes(size), f"{compressor} on {collective}"


def print_rows(rows: Sequence[Row], config: CollectivesConfig, *, as_json: bool) -> None:
    """Print the measured rows on stdout."""
    compared = with_ratios(rows)
    if as_json:
        print_json(compared)
    elif rows:
        how = (
            f"{config.rounds} rounds of {config.iters} sums, pairs in turn; {config.device}, "
            f"{config.threads} threads per rank; slowest rank's time, median over rounds"
        )
        if config.cluster is not None:
            how += "; " + "; ".join(Cluster.from_dict(config.cluster).describe())
        print_rich(collectives_table(compared, how), stdout_console())
