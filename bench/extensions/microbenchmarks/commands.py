"""Define `bench collectives`, which times sums over ranks, and `bench compressors`, which times compression."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from bench.api.progress import LiveLine
from bench.cli.commands import MEASURE, Command
from bench.cli.console import print_json, stdout_console
from bench.cli.options import AsJson, RowFile, row_writer, takes
from bench.core import spec
from bench.core.errors import Interrupted, RunFailed
from bench.core.rows import RowWriter
from bench.core.units import format_bytes, parse_sizes
from bench.extensions.microbenchmarks.options import CollectivesConfig, CompressorsConfig

# Modules that need long to import are imported in the functions, because `bench --help` imports this module.


@takes(CollectivesConfig)
def collectives(options: CollectivesConfig, out: RowFile = None, as_json: AsJson = False) -> None:
    """Compare collectives by summing tensors in real processes: time, bandwidth, messages, bytes, correctness."""
    from bench.extensions.microbenchmarks.columns import COLLECTIVES
    from bench.extensions.microbenchmarks.measurement import SUM, check_sums, measure_sums
    from bench.launch.jobs.fork_server import ForkServer
    from bench.launch.plan import choose_device
    from bench.launch.without_torch import without_torch

    with ForkServer(SUM) as server:
        checked = without_torch(check_sums, options)
        server.warm_up_for(checked[0] if checked else options)
        config, left_out = checked or server.call(check_sums, options)
        config = dataclasses.replace(
            config, device=server.call(choose_device, config.device, num_needed=config.world_size)
        )
        for reason in left_out:
            print(f"note: left out: {reason}", file=sys.stderr)
        pairs, sizes = len(config.pairs), len(parse_sizes(config.sizes))
        title = f"{config.world_size} ranks, {sizes} sizes x {pairs} pairs x {config.rounds} rounds"
        progress = MeasurementProgress(title, pairs * sizes * config.rounds, row_writer(out, COLLECTIVES))
        try:
            with progress:
                measure_sums(config, progress.take, server)
        finally:  # also show what was measured before a failure
            _print_sums(progress.rows, config, as_json=as_json)
    wrong = [row for row in progress.rows if row["num_wrong"]]
    if wrong:
        first = "{collective} got {num_wrong} elements of {payload} at {size_bytes} bytes wrong".format(**wrong[0])
        more = f", and {len(wrong) - 1} more rows are wrong" if wrong[1:] else ""
        raise RunFailed(
            f"{first}{more}; do not use these collectives with these compressors, and report this with the command"
        )


def _print_sums(rows: Sequence[dict[str, Any]], config: CollectivesConfig, *, as_json: bool) -> None:
    from bench.extensions.microbenchmarks.columns import collectives_table, with_ratios
    from bench.hosts.cluster import Cluster
    from bench.report.tables import print_rich

    compared = with_ratios(rows)
    if as_json:
        print_json(compared)
    elif rows:
        how = (
            f"rounds: {config.rounds}, sums per round: {config.iters}, pairs interleaved; {config.device}, "
            f"threads per rank: {config.threads}; slowest rank's time, median over rounds"
        )
        if config.cluster is not None:
            how += "; " + "; ".join(Cluster.from_dict(config.cluster).describe())
        print_rich(collectives_table(compared, how), stdout_console())


@takes(CompressorsConfig)
def compressors(options: CompressorsConfig, out: RowFile = None, as_json: AsJson = False) -> None:
    """Compare compressors by encoding and decoding a model's gradients in one process: time, bytes, error.

    Encoding is everything but sending: add the residual, choose entries, pack the payload, keep the new residual.
    """
    from bench.extensions.microbenchmarks.columns import COMPRESSORS, compressors_table
    from bench.extensions.microbenchmarks.measurement import ENCODE, check_encoding, measure_encoding, prepare_encoding
    from bench.launch.jobs.fork_server import ForkServer
    from bench.launch.without_torch import without_torch
    from bench.report.tables import print_rich

    with ForkServer(ENCODE) as server:
        checked = without_torch(check_encoding, options)
        server.warm_up(options.threads)
        config = server.call(prepare_encoding, checked or server.call(check_encoding, options))
        count = len(spec.split_list(config.compressors))
        title = f"{count} compressors x {config.repeats} passes"
        with MeasurementProgress(title, count * config.repeats, row_writer(out, COMPRESSORS)) as progress:
            measure_encoding(config, progress.take, server)
    first = progress.rows[0]
    how = (
        f"{first['numel']:,} elements, {format_bytes(first['dense_bytes'])} in fp32; {config.device}, "
        f"threads: {config.threads}; medians of {config.repeats} passes, compressors interleaved"
    )
    if as_json:
        print_json(progress.rows)
    else:
        print_rich(compressors_table(progress.rows, how), stdout_console())


class MeasurementProgress(LiveLine):
    """Collect the rows of a measurement, and show how many of its timed blocks have ended.

    Args:
        title: subject of the measurement.
        total: number of timed blocks.
        writer: appends the rows to a file; None if no file is written.

    Attributes:
        rows: rows measured so far, including values that are only shown and not written to the file.
    """

    def __init__(self, title: str, total: int, writer: RowWriter | None) -> None:
        super().__init__(title)
        self.rows: list[dict[str, Any]] = []
        self._total, self._writer, self._part = total, writer, ""

    def take(self, report: Mapping[str, Any]) -> None:
        """Handle a report of the measuring process: keep the row in it, or show that a timed block has ended."""
        if "row" in report:
            self.rows.append({**report["row"], **report.get("extras", {})})
            if self._writer is not None:
                self._writer.append(report["row"])
            return
        part, block = report["ended"]
        self.update([f"{part}  {block}".strip()], total=self._total, advance=1)
        if part != self._part and not self.is_live:
            self.say(f"measuring {part}")
        self._part = part

    @override
    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        error = raised[1]
        if isinstance(error, Interrupted):
            where = "shown" if self._writer is None else f"kept in {self._writer.path}"
            kept = f"the rows so far are {where}" if self.rows else "no row was finished, so none is kept"
            raise Interrupted(f"{error}; {kept}") from None


COLLECTIVES_COMMAND = Command(
    function=collectives,
    panel=MEASURE,
    epilog="""[bold]Examples[/bold]

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

  #wrong: elements that differ from a serial sum in the documented order (native: by more than its error bound).""",
)
COMPRESSORS_COMMAND = Command(
    function=compressors,
    panel=MEASURE,
    epilog="""[bold]Examples[/bold]

  bench compressors

  bench compressors --compressors none,group_topk:ratio=0.01,powersgd --model resnet18

  bench compressors --gradients recorded --model small_cnn --dataset digits --out encoding.csv""",
)
