"""`bench compressors`: what each compressor makes of a model's gradients, what that loses, and how long it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.cli.options import AsJson, RowFile, row_writer, takes
from bench.core.config.compressors import CompressorsConfig
from bench.core.schema.compressors import COMPRESSORS

if TYPE_CHECKING:
    from pathlib import Path

    from bench.launch.jobs.fork_server import ForkServer

EXAMPLES = """[bold]Examples[/bold]

  bench compressors

  bench compressors --compressors none,group_topk:ratio=0.01,powersgd --model resnet18

  bench compressors --gradients recorded --model small_cnn --dataset digits --out encoding.csv"""


@takes(CompressorsConfig)
def compressors(asked: CompressorsConfig, out: RowFile = None, as_json: AsJson = False) -> None:
    """Encode and decode a model's gradients in one process: seconds, bytes and what is lost, compressor by compressor.

    Encoding is all of a step but sending: residual added, entries chosen, payload packed, the rest kept.
    """
    from bench.launch.jobs.fork_server import ENCODE, ForkServer

    with ForkServer(ENCODE) as server:
        _execute(asked, out, as_json, server)


def _execute(asked: CompressorsConfig, out: Path | None, as_json: bool, server: ForkServer) -> None:
    from bench.cli.output.compressors import print_rows, turns_of
    from bench.launch.compressors import check, execute, prepare
    from bench.launch.refusals import without_torch

    without_torch(check, asked)
    server.warm_up(asked.threads)
    config = server.call(prepare, asked)
    with turns_of(config, row_writer(out, COMPRESSORS)) as turns:
        execute(config, turns.take, server)
    print_rows(turns.rows, config, as_json=as_json)
