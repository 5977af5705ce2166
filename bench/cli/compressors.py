"""`bench compressors`: what each compressor makes of a model's gradients, what that loses, and how long it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bench.cli.completion import complete, complete_list
from bench.core.compressors_config import Gradients
from bench.core.errors import UsageError
from bench.core.rows import RowWriter, StoreError
from bench.core.schema import COMPRESSORS
from bench.launch.compressors_request import CompressorsRequest

if TYPE_CHECKING:
    from bench.report.compressors_table import Row

WHAT = "What to encode"
MEASUREMENT = "Measurement"
MACHINE = "Machine"
OUTPUT = "Output"
EXAMPLES = """[bold]Examples[/bold]

  bench compressors

  bench compressors --compressors none,group_topk:ratio=0.01,powersgd --model resnet18

  bench compressors --gradients recorded --model small_cnn --dataset digits --out encoding.csv"""

DEFAULTS = CompressorsRequest()


def compressors(
    compressors: Annotated[
        str | None,
        typer.Option(
            help="Which, separated by commas (default: all).",
            rich_help_panel=WHAT,
            autocompletion=complete_list("compressors"),
        ),
    ] = DEFAULTS.compressors,
    model: Annotated[
        str,
        typer.Option(help="Network whose gradients they are.", rich_help_panel=WHAT, autocompletion=complete("models")),
    ] = DEFAULTS.model,
    gradients: Annotated[
        Gradients,
        typer.Option(
            help="synthetic: heavy-tailed, each layer at its own scale; recorded: of some real training steps.",
            rich_help_panel=WHAT,
        ),
    ] = DEFAULTS.gradients,
    dataset: Annotated[
        str,
        typer.Option(
            help="What recorded gradients are trained on; gives the number of classes.",
            rich_help_panel=WHAT,
            autocompletion=complete("datasets"),
        ),
    ] = DEFAULTS.dataset,
    data_dir: Annotated[str, typer.Option(help="Where data sets lie.", rich_help_panel=WHAT)] = DEFAULTS.data_dir,
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed turns of each; they alternate.", rich_help_panel=MEASUREMENT)
    ] = DEFAULTS.repeats,
    bucket_mb: Annotated[
        float, typer.Option(min=0.01, help="DDP's bucket size in MiB.", rich_help_panel=MEASUREMENT)
    ] = DEFAULTS.bucket_mb,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of gradients and compressors.", rich_help_panel=MEASUREMENT)
    ] = DEFAULTS.seed,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where gradients lie.", rich_help_panel=MACHINE)
    ] = DEFAULTS.device,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads for tensor operations.", rich_help_panel=MACHINE)
    ] = DEFAULTS.threads,
    timeout: Annotated[
        float, typer.Option(min=1, help="Stop when no turn ends for so many seconds.", rich_help_panel=MACHINE)
    ] = DEFAULTS.timeout_s,
    out: Annotated[
        Path | None,
        typer.Option(help="Append the rows to this CSV file.", metavar="FILE", rich_help_panel=OUTPUT),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Encode and decode a model's gradients in one process: seconds, bytes and what is lost, compressor by compressor.

    Encoding is all of a step but sending: residual added, entries chosen, payload packed, the rest kept.
    """
    given = dict(locals())
    from bench.cli.compressors_display import Turns, print_rows
    from bench.launch.compressors import execute, plan

    fields = [field.name for field in dataclasses.fields(CompressorsRequest) if field.name in given]
    config = plan(CompressorsRequest(**{name: given[name] for name in fields}, timeout_s=timeout))
    writer = _writer(out) if out else None
    rows: list[Row] = []
    with Turns(config) as turns:

        def take(report: Mapping[str, Any]) -> None:
            if "row" in report:
                rows.append(report["row"])
                if writer is not None:
                    writer.append(report["row"])
            else:
                turns.show(report["turn"])

        execute(config, timeout, take)
    print_rows(rows, config, as_json=as_json)


def _writer(out: Path) -> RowWriter:
    try:
        return RowWriter(out, COMPRESSORS)
    except StoreError as error:
        raise UsageError(str(error)) from None
