"""`bench collectives`: how long the ranks take to sum a tensor, what they send for it, and whether the sum is right."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bench.cli.options import AsJson, RowFile, row_writer, takes
from bench.core.config.collectives import CollectivesConfig
from bench.core.errors import RunFailed
from bench.core.schema.collectives import COLLECTIVES

if TYPE_CHECKING:
    from pathlib import Path

    from bench.launch.jobs.fork_server import ForkServer
    from bench.report.collectives_table import Row

EXAMPLES = """[bold]Examples[/bold]

  bench collectives

  bench collectives --sizes 1KiB:64MiB --collectives native,ring,tree --world-size 4

  bench collectives --compressors none,group_topk:ratio=0.01 --overlap 0.5 --out sums.csv

  bench collectives --hosts 4 --bandwidth 100mbit --sizes 10MB --rounds 3 --iters 3

[bold]Columns[/bold], as nccl-tests has them

  algbw: the tensor's bytes / the time of its sum.

  busbw: algbw x 2(n-1)/n for n ranks, what each must send at least of a dense tensor; comparable with a link's rate.

  time: on the slowest rank, until the sum lies in a dense tensor; making the payload is not counted.

  of limit: on virtual hosts, the time in which the busiest link could have carried its frames, over the time taken.

  #wrong: elements unlike a serial sum in the documented order, bit for bit (native: beyond its error bound)."""


@takes(CollectivesConfig)
def collectives(asked: CollectivesConfig, out: RowFile = None, as_json: AsJson = False) -> None:
    """Sum tensors in real processes, collective beside collective: times, bandwidths, messages, bytes, correctness."""
    from bench.launch.jobs.fork_server import SUM, ForkServer

    with ForkServer(SUM) as server:
        rows = _execute(asked, out, as_json, server)
    _check(rows)


def _execute(asked: CollectivesConfig, out: Path | None, as_json: bool, server: ForkServer) -> list[Row]:
    from bench.cli.output.collectives import print_rows, turns_of
    from bench.launch.collectives import execute, resolve
    from bench.launch.refusals import without_torch

    without_torch(resolve, asked)
    server.warm_up_for(asked)
    config, left_out = server.call(resolve, asked)
    for reason in left_out:
        print(f"note: left out: {reason}", file=sys.stderr)
    turns = turns_of(config, row_writer(out, COLLECTIVES))
    try:
        with turns:
            execute(config, turns.take, server)
    finally:  # what was measured before a failure is shown too
        print_rows(turns.rows, config, as_json=as_json)
    return turns.rows


def _check(rows: list[Row]) -> None:
    wrong = [row for row in rows if row["num_wrong"]]
    if wrong:
        first = "{collective} got {num_wrong} elements of {payload} at {size_bytes} bytes wrong".format(**wrong[0])
        more = f", and {len(wrong) - 1} more rows are wrong" if wrong[1:] else ""
        raise RunFailed(f"{first}{more}; rely on none of these pairs, and report this with the command")
