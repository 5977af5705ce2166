"""`bench compressors`, which measures how each compressor encodes a model's gradients: time, bytes and error."""

from bench.cli.commands import MEASURE, Command
from bench.cli.console import print_json, stdout_console
from bench.cli.options import AsJson, RowFile, row_writer, takes
from bench.core.units import format_bytes
from bench.extensions.microbenchmarks.columns import COMPRESSORS
from bench.extensions.microbenchmarks.options import CompressorsConfig
from bench.extensions.microbenchmarks.output import MeasurementProgress, compressors_table
from bench.report.tables import print_rich

EXAMPLES = """[bold]Examples[/bold]

  bench compressors

  bench compressors --compressors none,group_topk:ratio=0.01,powersgd --model resnet18

  bench compressors --gradients recorded --model small_cnn --dataset digits --out encoding.csv"""


@takes(CompressorsConfig)
def compressors(options: CompressorsConfig, out: RowFile = None, as_json: AsJson = False) -> None:
    """Compare compressors by encoding and decoding a model's gradients in one process: time, bytes, error.

    Encoding is everything but sending: add the residual, choose entries, pack the payload, keep the new residual.
    """
    # imported only here, because `bench --help` imports this module
    from bench.extensions.microbenchmarks.measurement import ENCODE, check_encoding, measure_encoding, prepare_encoding
    from bench.launch.jobs.fork_server import ForkServer
    from bench.launch.refusals import without_torch

    with ForkServer(ENCODE) as server:
        checked = without_torch(check_encoding, options)
        server.warm_up(options.threads)
        config = server.call(prepare_encoding, checked or server.call(check_encoding, options))
        count = len(config.compressor_specs)
        title = f"{count} compressors x {config.repeats} passes"
        writer = row_writer(out, COMPRESSORS)
        with MeasurementProgress(
            title, count * config.repeats, lambda compressor: ("", compressor), writer
        ) as progress:
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


COMMAND = Command(function=compressors, epilog=EXAMPLES, panel=MEASURE)
