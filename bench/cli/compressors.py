"""`bench compressors`: what each compressor makes of a model's gradients, what that loses, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bench.cli.options import AsJson, RowFile, row_writer, takes
from bench.core.compressors_config import CompressorsConfig
from bench.core.schema import COMPRESSORS

if TYPE_CHECKING:
    from bench.report.compressors_table import Row

EXAMPLES = """[bold]Examples[/bold]

  bench compressors

  bench compressors --compressors none,group_topk:ratio=0.01,powersgd --model resnet18

  bench compressors --gradients recorded --model small_cnn --dataset digits --out encoding.csv"""


@takes(CompressorsConfig)
def compressors(asked: CompressorsConfig, out: RowFile = None, as_json: AsJson = False) -> None:
    """Encode and decode a model's gradients in one process: seconds, bytes and what is lost, compressor by compressor.

    Encoding is all of a step but sending: residual added, entries chosen, payload packed, the rest kept.
    """
    from bench.cli.compressors_display import Turns, print_rows
    from bench.launch.compressors import execute, resolve

    config = resolve(asked)
    writer = row_writer(out, COMPRESSORS)
    rows: list[Row] = []
    with Turns(config) as turns:

        def take(report: Mapping[str, Any]) -> None:
            if "row" in report:
                rows.append(report["row"])
                if writer is not None:
                    writer.append(report["row"])
            else:
                turns.show(report["turn"])

        execute(config, take)
    print_rows(rows, config, as_json=as_json)
