"""`bench run`, which trains a model with real processes, once per seed and compressor, or resumes a run.

This module also prints the plan, and the summary at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from bench.api.execution import RunSet, repeat, rows_of, train, warn_of_runs
from bench.api.progress import print_notes
from bench.cli.console import plain_table, print_json
from bench.cli.options import AsJson, given_options, takes
from bench.core.config.run import MEASUREMENT, OUTPUT, RunConfig
from bench.core.errors import UsageError
from bench.core.run_folder import RUNS_FOLDER, RunFolder
from bench.core.units import format_bytes, format_seconds
from bench.hosts.cluster import Cluster
from bench.launch.jobs import torchrun
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.layer_plan import LayerPlan, plan_layers
from bench.launch.run import Result
from bench.launch.sweep_file import run_arguments
from bench.launch.sweep_state import past_runs
from bench.report import artifacts
from bench.report.quality import quality_of, yardsticks
from bench.report.store import grouped

EXAMPLES = """[bold]Examples[/bold]

  bench run --dataset digits --epochs 5

  bench run --compressor group_topk:ratio=0.01 --seeds 1,2,3 --target-accuracy 0.97

  bench run --compressor none,powersgd,topk:ratio=0.001,skip=norm --steps 100

  bench run --hosts 4 --bandwidth 100mbit --model resnet18 --dataset synthetic --batch-size 4 --steps 20

  bench run --model resnet18 --dataset cifar10 --world-size 4 --compressor topk:ratio=0.001 --dry-run

  bench run --again results/runs/20261122T104059-...

Components are written name:key=value,key=value; `bench list compressors --long` shows every option."""


@takes(
    RunConfig,
    several={"compressor": "several (separated by commas, or with the option repeated) are run in turn and compared"},
)
def run(
    options: RunConfig,
    context: typer.Context,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, with one run per seed: 1,2,3 or 1-5.", rich_help_panel=MEASUREMENT)
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder in which the run's folder is made.", rich_help_panel=OUTPUT)
    ] = RUNS_FOLDER,
    resume_folder: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="RUN_FOLDER",
            help="Resume this run from its last checkpoint; only --timeout and --world-size can be changed.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Repeat this run, or what else `bench list runs` shows, with the same options and in a new folder.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    resume_residuals: Annotated[
        Literal["sum", "drop"] | None,
        typer.Option(
            help="With --resume and another --world-size: what happens to the old ranks' residuals; sum: they are "
            "added up and distributed to the new ranks, drop: they are discarded.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the plan and the torchrun command; run nothing.", rich_help_panel=OUTPUT),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model in several processes with a chosen compressor x collective x optimizer, and record everything."""
    if again is not None:
        _repeat(again, context, as_json=as_json)
        return
    given = [name for name in given_options(context) if name in options.flag_values()]
    show = functools.partial(_print_plans, out, as_json=as_json) if dry_run else None
    runs = train(
        options, given, seeds=seeds or None, out=out, resumed=resume_folder, residuals=resume_residuals, show=show
    )
    if dry_run:
        return
    _print_results(runs, as_json)
    if not (as_json or resume_folder) and all(result.status == "ok" for result in runs.results):  # else the error says
        chosen = {name: getattr(options, name) for name in given}
        print(f"next: {shlex.join(_next_command(chosen, runs, out))}", file=sys.stderr)
    runs.raise_failures()


def _repeat(path: Path, context: typer.Context, *, as_json: bool) -> None:
    # Repeat a run here; repeat a decision, for example, by the command that its kind of artifact names.
    is_run = RunFolder(path).config.is_file()
    taken = ("again", "as_json") if is_run else ("again",)
    flags = {each.name: each.opts[0] for each in context.command.params}
    if others := [flags[name] for name in given_options(context) if name not in taken]:
        raise UsageError(f"--again repeats {path} with its own options; leave out {', '.join(others)}")
    if is_run:
        runs = repeat(path)
        _print_results(runs, as_json)
        runs.raise_failures()
        return
    found = artifacts.at(path)
    if found is None:
        raise UsageError(f"there is nothing to repeat in {path}; bench list runs shows what can be repeated")
    kind, _ = found
    arguments = kind.again(path)
    print(f"{shlex.join(['bench', *arguments])}", file=sys.stderr)
    root = context.find_root()
    if code := root.command.main(arguments, prog_name=root.info_name, standalone_mode=False):
        raise typer.Exit(code)


def _print_results(runs: RunSet, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {"compressor": config.compressor, "seed": config.seed}
                | each.summary
                | {"folder": str(each.folder.path)}
                for config, each in zip(runs.configs, runs.results, strict=False)
            ]
        )
    elif runs.num_methods == 1:
        print_summary(runs.configs, runs.results)
    elif any(result.status == "ok" for result in runs.results):
        from bench.cli.compare import compare  # takes 20 ms, so only if it is needed

        compare(paths=[result.folder.path for result in runs.results])
    if as_json or runs.num_methods == 1:  # the comparison prints these warnings itself
        warn_of_runs(runs.results)


def _next_command(chosen: dict[str, Any], runs: RunSet, out: Path) -> list[str]:
    # Suggest a report of the methods, a comparison with other runs, or further runs to compare with.
    place = [] if out == RUNS_FOLDER else [str(out)]
    has_others = len(past_runs(out)) > len(runs.results)
    if runs.num_methods > 1:
        return ["bench", "report", *([str(result.folder.path) for result in runs.results] if has_others else place)]
    if has_others:
        return ["bench", "compare", *place]
    compressor = chosen.get("compressor", "none")
    given = chosen | {"compressor": "none,bf16,powersgd" if compressor == "none" else f"none,{compressor}"}
    seeds = {"seeds": ",".join(str(config.seed) for config in runs.configs)} if len(runs.configs) > 1 else {}
    return ["bench", "run", *run_arguments(given | seeds | ({"out": out} if place else {}))]


def _print_plans(out: Path, configs: list[RunConfig], server: ForkServer, *, as_json: bool) -> None:
    # With `as_json`, print one object, or a list of objects if there are several methods.
    plans: list[dict[str, Any]] = []
    for of_seeds in grouped(configs, lambda config: config.config_id).values():
        config = of_seeds[0]
        layers = server.call(plan_layers, config)
        lines = torchrun.shell_lines(config, RunFolder(out / f"<utc>-{config.name}-s{config.seed}-{config.digest}"))
        if not as_json:
            _print_plan(of_seeds, layers)
            print(*lines, sep="\n")
        print_notes(of_seeds)
        described = [dataclasses.asdict(each) | {"digest": each.digest} for each in of_seeds]
        plans.append({"configs": described, "layers": dataclasses.asdict(layers), "torchrun": lines})
    if as_json:
        print_json(plans if len(plans) > 1 else plans[0])


_PLAN_ROWS = (
    "recipe", "model", "dataset", "train_size", "test_size", "optimizer", "lr", "schedule", "batch_size", "epochs",
    "steps", "compressor", "collective", "strategy", "trigger", "bucket_mb", "world_size", "hosts", "device", "threads",
    "amp", "digest",
)  # fmt: skip


def _print_plan(configs: list[RunConfig], layers: LayerPlan) -> None:
    # The configuration of the runs.
    title = f"Plan: seed {', '.join(str(config.seed) for config in configs)}"
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE)
    for name in _PLAN_ROWS:
        if (value := getattr(configs[0], name)) is not None:
            table.add_row(name, str(value))
    if configs[0].cluster is not None:
        for link in Cluster.from_dict(configs[0].cluster).describe():
            table.add_row("virtual hosts", link)
    Console().print(table)
    # The payload of each layer.
    columns = (
        Column("layer", footer="together, as one bucket"), "shape", "kind", "payload",
        Column("dense", justify="right", footer=format_bytes(layers.dense_nbytes)),
        Column("sent", justify="right", footer=_cell(layers.sent_nbytes, format_bytes, "by data")),
    )  # fmt: skip
    table = plain_table("Layers: one rank's payload at full compression", columns, show_footer=True)
    for row in layers.layers:
        shape, sent = "x".join(map(str, row.shape)), _cell(row.sent_nbytes, format_bytes, "by data")
        table.add_row(row.name, shape, row.kind, row.payload, format_bytes(row.dense_nbytes), sent)
    Console().print(table)


def print_summary(configs: list[RunConfig], results: list[Result]) -> None:
    """Print one row per run, the runs' folders and, if the data are a text, the bits per byte of gzip, bz2 and xz."""
    config = configs[0]
    what = (config.model, config.dataset, config.strategy, f"{config.world_size} ranks")
    rows = [_summary(config.seed, result) for config, result in zip(configs, results, strict=False)]
    shown = [heading for heading in rows[0] if any(row[heading] for row in rows)]
    table = plain_table(columns=[Column(heading, justify="right", no_wrap=True) for heading in shown])
    for row in rows:
        table.add_row(*(row[heading] for heading in shown))
    console = Console()
    console.print(f"{config.compressor} on {config.collective}: {', '.join(what)}", highlight=False)
    console.print(table)
    if compared := yardsticks(row for result in results for row in rows_of(result)):
        console.print(compared, highlight=False)
    for result in results:
        print(result.folder.path)


def _summary(seed: int, result: Result) -> dict[str, str]:  # cells by heading; empty without a value
    rows = rows_of(result)
    row: dict[str, Any] = next((row for row in reversed(rows) if row.get("test_accuracy") is not None), {})
    quality = quality_of([row])
    return {
        "seed": str(seed),
        "status": "" if result.status == "ok" else result.status,
        quality.noun: _cell(row.get(quality.column), quality.format),
        "samples/s": _cell(row.get("samples_per_s"), "{:,.0f}".format),
        "step": _cell(row.get("step_time_s"), format_seconds),
        "sent/step": _cell(row.get("payload_bytes_per_step"), format_bytes),
        "ratio": _cell(row.get("compression_ratio"), "{:.4g}x".format),
        "trained": _cell(row.get("train_time_s"), format_seconds),
        "to target": _cell(
            row.get("time_to_target_s"), format_seconds, "" if row.get(quality.target_column) is None else "missed"
        ),
        "in sync": "NO" if any(each.get("replicas_in_sync") is False for each in rows) else "",
    }


def _cell(value: float | None, text: Callable[[float], str], otherwise: str = "") -> str:
    return otherwise if value is None else text(value)
