"""`bench collectives`, which measures sums over ranks: time, messages, bytes and correctness."""

import sys
from collections.abc import Sequence

from bench.cli.commands import MEASURE, Command
from bench.cli.console import print_json, stdout_console
from bench.cli.options import AsJson, RowFile, row_writer, takes
from bench.core.errors import RunFailed
from bench.core.units import format_bytes
from bench.extensions.microbenchmarks.columns import COLLECTIVES
from bench.extensions.microbenchmarks.options import CollectivesConfig
from bench.extensions.microbenchmarks.output import MeasurementProgress, collectives_table, with_ratios
from bench.hosts.cluster import Cluster
from bench.report.store import Row
from bench.report.tables import print_rich

EXAMPLES = """[bold]Examples[/bold]

  bench collectives

  bench collectives --sizes 1KiB:64MiB --collectives native,ring,tree --world-size 4

  bench collectives --compressors none,group_topk:ratio=0.01 --overlap 0.5 --out sums.csv

  bench collectives --hosts 4 --bandwidth 100mbit --sizes 10MB --rounds 3 --iters 3

[bold]Columns[/bold], as in nccl-tests

  algbw: bytes of the tensor / time of its sum.

  busbw: algbw x 2(n-1)/n for n ranks. Each rank must send at least 2(n-1)/n of a dense tensor, so busbw can be compared
  with the rate of a link.

  time: on the slowest rank, until the sum is a dense tensor. The time to make the payload is not counted.

  of limit: shortest time in which the busiest link could carry its frames / time taken (virtual hosts only).

  #wrong: elements that differ from a serial sum in the documented order (native: by more than its error bound)."""


@takes(CollectivesConfig)
def collectives(options: CollectivesConfig, out: RowFile = None, as_json: AsJson = False) -> None:
    """Compare collectives by summing tensors in real processes: time, bandwidth, messages, bytes, correctness."""
    # imported only here, because `bench --help` imports this module
    from bench.extensions.microbenchmarks.measurement import SUM, check_sums, measure_sums, with_device
    from bench.launch.jobs.fork_server import ForkServer
    from bench.launch.refusals import without_torch

    with ForkServer(SUM) as server:
        checked = without_torch(check_sums, options)
        server.warm_up_for(checked[0] if checked else options)
        config, left_out = checked or server.call(check_sums, options)
        config = server.call(with_device, config)
        for reason in left_out:
            print(f"note: left out: {reason}", file=sys.stderr)
        pairs, sizes = len(config.pairs), len(config.sizes_bytes)
        title = f"{config.world_size} ranks, {sizes} sizes x {pairs} pairs x {config.rounds} rounds"
        progress = MeasurementProgress(title, pairs * sizes * config.rounds, _describe, row_writer(out, COLLECTIVES))
        try:
            with progress:
                measure_sums(config, progress.take, server)
        finally:  # also show what was measured before a failure
            _print_rows(progress.rows, config, as_json=as_json)
    wrong = [row for row in progress.rows if row["num_wrong"]]
    if wrong:
        first = "{collective} got {num_wrong} elements of {payload} at {size_bytes} bytes wrong".format(**wrong[0])
        more = f", and {len(wrong) - 1} more rows are wrong" if wrong[1:] else ""
        raise RunFailed(f"{first}{more}; do not use these pairs, and report this with the command")


def _describe(block: tuple[str, str, int]) -> tuple[str, str]:
    collective, compressor, size = block
    return format_bytes(size), f"{compressor} on {collective}"


def _print_rows(rows: Sequence[Row], config: CollectivesConfig, *, as_json: bool) -> None:
    compared = with_ratios(rows)
    if as_json:
        print_json(compared)
    elif rows:
        how = (
            f"{config.rounds} rounds of {config.iters} sums, pairs interleaved; {config.device}, "
            f"{config.threads} threads per rank; slowest rank's time, median over rounds"
        )
        if config.cluster is not None:
            how += "; " + "; ".join(Cluster.from_dict(config.cluster).describe())
        print_rich(collectives_table(compared, how), stdout_console())


COMMAND = Command(function=collectives, epilog=EXAMPLES, panel=MEASURE)
