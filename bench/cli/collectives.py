"""`bench collectives`: how long the ranks take to sum a tensor, what they send for it, and whether the sum is right."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bench.cli import hosts_options as on
from bench.cli.completion import complete_list
from bench.core.collectives_config import Dtype
from bench.core.errors import RunFailed, UsageError
from bench.core.request import DEFAULT_WORLD_SIZE
from bench.core.rows import RowWriter, StoreError
from bench.core.schema import COLLECTIVES
from bench.launch.collectives_request import CollectivesRequest

if TYPE_CHECKING:
    from bench.report.collectives_table import Row

WHAT = "What to sum"
MEASUREMENT = "Measurement"
MACHINE = "Machines"
OUTPUT = "Output"
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

DEFAULTS = CollectivesRequest()


def collectives(
    sizes: Annotated[
        str, typer.Option(help="Bytes of the tensor: a list, or ranges that double (1KiB:64MiB).", rich_help_panel=WHAT)
    ] = DEFAULTS.sizes,
    compressors: Annotated[
        str,
        typer.Option(
            help="What makes the payload, separated by commas; none: the tensor as it is.",
            rich_help_panel=WHAT,
            autocompletion=complete_list("compressors"),
        ),
    ] = DEFAULTS.compressors,
    collectives: Annotated[
        str | None,
        typer.Option(
            help="How ranks sum, separated by commas (default: every collective that takes the payload).",
            rich_help_panel=WHAT,
            autocompletion=complete_list("collectives"),
        ),
    ] = DEFAULTS.collectives,
    dtype: Annotated[Dtype, typer.Option(help="Type of the tensor's elements.", rich_help_panel=WHAT)] = DEFAULTS.dtype,
    overlap: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of positions at which all ranks have the same magnitude.", rich_help_panel=WHAT
        ),
    ] = DEFAULTS.overlap,
    iters: Annotated[
        int, typer.Option(min=1, help="Timed sums in one round.", rich_help_panel=MEASUREMENT)
    ] = DEFAULTS.iters,
    warmup: Annotated[
        int, typer.Option(min=0, help="Untimed sums before them.", rich_help_panel=MEASUREMENT)
    ] = DEFAULTS.warmup,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Rounds in which all take turns; medians over rounds.", rich_help_panel=MEASUREMENT),
    ] = DEFAULTS.rounds,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tensors.", rich_help_panel=MEASUREMENT)] = DEFAULTS.seed,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=2,
            help=f"Ranks (default: {DEFAULT_WORLD_SIZE}, or those of the virtual hosts).",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where the tensors lie.", rich_help_panel=MACHINE)
    ] = DEFAULTS.device,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads per rank (default: cores / ranks).", rich_help_panel=MACHINE)
    ] = DEFAULTS.threads,
    timeout: Annotated[
        float,
        typer.Option(
            min=1,
            help="Seconds that one sum may take; then ranks find out who is late, and the sweep ends.",
            rich_help_panel=MACHINE,
        ),
    ] = DEFAULTS.timeout_s,
    hosts: on.Hosts = None,
    ranks_per_host: on.RanksPerHost = None,
    network: on.Network = None,
    bandwidth: on.Bandwidth = None,
    uplink: on.Uplink = None,
    downlink: on.Downlink = None,
    latency: on.Latency = None,
    jitter: on.Jitter = None,
    loss: on.Loss = None,
    cluster: on.ClusterFile = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Append the rows to this CSV file, each as it is done.", metavar="FILE", rich_help_panel=OUTPUT
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Sum tensors in real processes, collective beside collective: times, bandwidths, messages, bytes, correctness."""
    given = dict(locals())
    from bench.cli.collectives_display import Turns, print_rows
    from bench.launch.collectives import execute, plan

    fields = [field.name for field in dataclasses.fields(CollectivesRequest) if field.name in given]
    config, left_out = plan(CollectivesRequest(**{name: given[name] for name in fields}, timeout_s=timeout))
    for reason in left_out:
        print(f"note: left out: {reason}", file=sys.stderr)
    writer = _writer(out) if out else None
    rows: list[Row] = []
    with Turns(config) as turns:

        def take(report: Mapping[str, Any]) -> None:
            if "row" in report:
                rows.append({**report["row"], **report["extras"]})
                if writer is not None:
                    writer.append(report["row"])
            else:
                turns.show(report["turn"])

        try:
            execute(config, take)
        finally:  # what was measured before a failure is shown too
            turns.stop()
            print_rows(rows, config, as_json=as_json)
    _check(rows)


def _writer(out: Path) -> RowWriter:
    try:
        return RowWriter(out, COLLECTIVES)
    except StoreError as error:
        raise UsageError(str(error)) from None


def _check(rows: list[Row]) -> None:
    wrong = [row for row in rows if row["num_wrong"]]
    if wrong:
        first = "{collective} got {num_wrong} elements of {payload} at {size_bytes} bytes wrong".format(**wrong[0])
        raise RunFailed(first + (f", and {len(wrong) - 1} more rows are wrong" if wrong[1:] else ""))
