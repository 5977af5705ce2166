"""`bench run`, which trains a model with real processes, once per seed and compressor, or resumes a run.

This module also prints the plan, the progress of training, notes and warnings, and the summary at the end.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from bench.cli.console import LiveLine, plain_table, print_json
from bench.cli.options import RUNS_FOLDER, AsJson, flag_values, takes
from bench.core.config.run import MEASUREMENT, OUTPUT, RunConfig
from bench.core.config.syntax import parse_seeds
from bench.core.counters import NOTEWORTHY_SHARE
from bench.core.errors import Interrupted, RunFailed, UsageError
from bench.core.rows import read_rows
from bench.core.run_folder import RunFolder
from bench.core.spec import split_list
from bench.core.units import format_bytes, format_seconds
from bench.hosts.cluster import Cluster
from bench.hosts.support import check_and_choose_backend
from bench.launch.jobs import torchrun
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.layer_plan import LayerPlan, plan_layers
from bench.launch.resolve import prepare_data, resolve_each, with_ranks
from bench.launch.run import Result, check_left, configuration_of, execute, last_step, resume
from bench.launch.sweep_file import SweepFile, plan_runs, run_arguments
from bench.launch.sweep_state import past_runs
from bench.report.store import grouped

EXAMPLES = """[bold]Examples[/bold]

  bench run --dataset digits --epochs 5

  bench run --compressor group_topk:ratio=0.01 --collective ring --seeds 1,2,3 --target-accuracy 0.97

  bench run --compressor none,powersgd,topk:ratio=0.001,skip=norm --steps 100

  bench run --hosts 4 --bandwidth 100mbit --model resnet18 --dataset synthetic --batch-size 4 --steps 20

  bench run --model resnet18 --dataset cifar10 --world-size 4 --compressor topk:ratio=0.001 --dry-run

Components are written name:key=value,key=value; `bench list compressors --long` shows every option."""

_BESIDE_RESUME = {"resume_folder", "as_json", "world_size", "resume_residuals", "timeout_s"}


@takes(
    RunConfig,
    several={"compressor": "several (separated by commas, or with the option repeated) are run in turn and compared"},
)
def run(
    options: RunConfig,
    context: typer.Context,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, for one run each: 1,2,3 or 1-5.", rich_help_panel=MEASUREMENT)
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
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    if resume_folder is not None:
        flags = {option.name: option.flag_name for option in RunConfig.options()}
        others = [flags.get(name, f"--{name.replace('_', '-')}") for name in given if name not in _BESIDE_RESUME]
        if others:
            raise UsageError(
                f"--resume takes all other options from the run's own configuration; leave out {', '.join(others)}"
            )
        timeout_s = options.timeout_s if "timeout_s" in given else None
        _resume(resume_folder, options.world_size, resume_residuals, timeout_s, as_json)
        return
    if resume_residuals is not None:
        raise UsageError(
            "--resume-residuals is for a run that resumes with another number of ranks; add --resume and --world-size"
        )
    if seeds and "seed" in given:
        raise UsageError("--seed and --seeds contradict each other; give one of them")
    numbers = parse_seeds(seeds) if seeds else [options.seed]
    with ForkServer(TRAIN) as server:  # also for a dry run, because it refuses kernels that are not available
        configs = _plan(options, numbers, server)
        if dry_run:
            _print_plans(configs, out, as_json, server)
            return
        make_each_ready(configs, server)
        _execute(options, configs, out, as_json, server)


def _plan(options: RunConfig, seeds: list[int], server: ForkServer) -> list[RunConfig]:
    """Return the configurations of all runs to execute.

    They are in the order of the seeds. If there are several compressors, the order within a seed is random, as in a
    sweep.

    Raises:
        UsageError: the options are not possible, or name one compressor twice.
    """
    specs = split_list(options.compressor)
    if len(specs) == 1:
        (outcome,) = resolve_each([options], server)
        if isinstance(outcome, UsageError):
            raise outcome
        return [dataclasses.replace(outcome, seed=seed) for seed in seeds]
    if options.nnodes > 1:
        raise UsageError(
            f"--compressor names {len(specs)} compressors, which are compared on one machine; give one of them with "
            f"--nnodes {options.nnodes}"
        )
    methods = SweepFile(where="--compressor", base=flag_values(options), seeds=seeds, matrix={"compressor": specs})
    configs = [run.config for run in plan_runs(methods, server)]
    if len(configs) < len(specs) * len(seeds):
        raise UsageError(f"--compressor {options.compressor} names one compressor twice; name each compressor once")
    return configs


def _resume(
    path: Path,
    world_size: int | None,
    residuals: Literal["sum", "drop"] | None,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    folder = RunFolder(path.resolve())  # the folder's name identifies the run, so resolve `.` and links
    check_left(folder)
    config = configuration_of(folder)
    if world_size in (None, config.world_size):
        if residuals is not None:
            raise UsageError(
                f"--resume-residuals is for a run that resumes with another number of ranks than its "
                f"{config.world_size}; give another --world-size, or leave out --resume-residuals"
            )
    elif residuals is None:
        raise UsageError(
            f"{folder.path} had {config.world_size} ranks, each with residuals that it had not sent; choose one: "
            "--resume-residuals sum (adds them up and distributes them to the new ranks), --resume-residuals drop "
            "(discards them), or no --world-size (keeps the number of ranks)"
        )
    with ForkServer(TRAIN) as server:
        if residuals is not None and world_size is not None:
            server.warm_up(config.threads)
            config = server.call(with_ranks, config, world_size)
        if timeout_s is not None:
            config = dataclasses.replace(config, timeout_s=timeout_s)
        with Display(f"{config.name} seed {config.seed}, resumed") as display:
            result = resume(folder, display.report, server, config, residuals)
    if as_json:
        print_json([result.summary | {"folder": str(result.folder.path)}])
    else:
        print_summary([config], [result])
    warn_of_other_work([result])
    _raise_failures([config], [result])


def _execute(options: RunConfig, configs: list[RunConfig], out: Path, as_json: bool, server: ForkServer) -> None:
    # With one compressor, stop at the first failure; with several, go on with the next run.
    are_several = _num_methods(configs) > 1
    results: list[Result] = []
    for number, config in enumerate(configs, 1):
        position = f"{number}/{len(configs)} " if len(configs) > 1 else ""
        with Display(f"{position}{config.compressor if are_several else config.name} seed {config.seed}") as display:
            results.append(execute(config, out, display.report, server))
        if results[-1].status == "interrupted" or (results[-1].status != "ok" and not are_several):
            break
    if as_json:
        print_json(
            [
                {"compressor": config.compressor, "seed": config.seed}
                | each.summary
                | {"folder": str(each.folder.path)}
                for config, each in zip(configs, results, strict=False)
            ]
        )
    elif are_several and any(result.status == "ok" for result in results):
        from bench.cli.compare import compare  # takes 20 ms, so only if it is needed

        is_timed = any(result.summary.get("samples_per_s") for result in results)
        compare([result.folder.path for result in results], metric=None if is_timed else "test_accuracy")
    elif not are_several:
        print_summary(configs, results)
    if as_json or not are_several:  # the comparison prints this warning itself
        warn_of_other_work(results)
    if not as_json and all(result.status == "ok" for result in results):  # otherwise the error says what to do
        print(f"next: {shlex.join(_next_command(options, configs, results, out))}", file=sys.stderr)
    _raise_failures(configs, results)


def _num_methods(configs: Sequence[RunConfig]) -> int:
    return len({config.config_id for config in configs})


def _next_command(options: RunConfig, configs: Sequence[RunConfig], results: Sequence[Result], out: Path) -> list[str]:
    # A report of the methods, a comparison with other runs, or runs to compare with.
    place = [] if out == RUNS_FOLDER else [str(out)]
    has_others = len(past_runs(out)) > len(results)
    if _num_methods(configs) > 1:
        return ["bench", "report", *([str(result.folder.path) for result in results] if has_others else place)]
    if has_others:
        return ["bench", "compare", *place]
    given = {name: value for name, value in flag_values(options).items() if value != getattr(RunConfig, name)}
    given["compressor"] = "none,bf16,powersgd" if options.compressor == "none" else f"none,{options.compressor}"
    seeds = {"seeds": ",".join(str(config.seed) for config in configs)} if len(configs) > 1 else {}
    return ["bench", "run", *run_arguments(given | seeds | ({"out": out} if place else {}))]


def _raise_failures(configs: Sequence[RunConfig], results: Sequence[Result]) -> None:
    failed = [result for result in results if result.status != "ok"]
    if not failed:
        return
    last, left = failed[-1], configs[len(results) :]
    step, path = last_step(last.folder), last.folder.path
    advice = f"; to resume from step {step}: bench run --resume {path}" if step is not None else ""
    counted = ""
    if _num_methods(configs) > 1:
        counted = f"{len(failed)} of {len(configs)} runs failed, the last one with: "
        advice += f"; {len(left)} of {len(configs)} runs were not started" if left else ""
    elif left:
        advice += f"; not run: --seeds {','.join(str(config.seed) for config in left)}"
    if last.status == "interrupted":
        raise Interrupted(f"{last.error} in {path}{advice}")
    raise RunFailed(f"{counted}{last.error}; rows and logs so far are in {path}{advice}")


def _print_plans(configs: list[RunConfig], out: Path, as_json: bool, server: ForkServer) -> None:
    # JSON is one object, or a list of objects if there are several methods.
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
    "model", "dataset", "train_size", "test_size", "optimizer", "lr", "schedule", "batch_size", "epochs", "steps",
    "compressor", "collective", "strategy", "trigger", "bucket_mb", "world_size", "hosts", "device", "threads", "amp",
    "digest",
)  # fmt: skip
# The texts of a report by its key, the most important first.
_PROGRESS: dict[str, Callable[[float], str]] = {
    "eta_s": lambda value: f"{format_seconds(value)} left",
    "epoch": "epoch {:.1f}".format,
    "accuracy": "accuracy {:.1%}".format,
    "loss": "loss {:.3f}".format,
    "samples_per_s": "{:,.0f} samples/s".format,
    "waiting_share": "waiting {:.0%}".format,
}


class Display(LiveLine):
    """A line on stderr that shows the progress of one run."""

    def report(self, line: dict[str, Any]) -> None:
        """Show one report of rank 0: the results of an evaluation, or the progress of the training."""
        if "evaluated" in line:
            row = line["evaluated"]
            self.say_of_title(
                f"epoch {row['epoch']:.4g}  step {row['step']}  loss {row['train_loss']:.4f}  "
                f"accuracy {row['test_accuracy']:.2%}"
            )
        else:
            known = [text(line[name]) for name, text in _PROGRESS.items() if line[name] is not None]
            self.update(known, total=line["total_steps"], completed=line["step"])


def make_each_ready(configs: Sequence[RunConfig], server: ForkServer) -> None:
    """Prepare all runs before the first one starts, and print the notes of their configurations.

    This checks that the machine supports the virtual hosts, and downloads missing data sets.

    Raises:
        UsageError: this machine does not support the virtual hosts of a configuration.
    """
    for config in {config.config_id: config for config in configs}.values():
        if config.cluster is not None:
            check_and_choose_backend(Cluster.from_dict(config.cluster))
    for dataset, data_dir in dict.fromkeys((config.dataset, config.data_dir) for config in configs):
        server.call(prepare_data, dataset, data_dir)
    print_notes(configs)


def print_notes(configs: Sequence[RunConfig]) -> None:
    """Print on stderr the notes that these configurations contain for the user; equal notes are printed only once."""
    for sentence in dict.fromkeys(note for config in configs for note in config.notes):
        print(f"note: {sentence}", file=sys.stderr)


def warn_of_other_work(results: Sequence[Result]) -> None:
    """Print a warning on stderr if other programs used so much of the cores that the measured times are too long."""
    shares = [row.get("other_cpu_share") or 0.0 for result in results for row in _rows(result)]
    if (share := max(shares, default=0.0)) > NOTEWORTHY_SHARE:
        print(
            f"warning: other programs used up to {share:.0%} of this machine's cores during training, which makes the "
            "times too long; run it again on an idle machine",
            file=sys.stderr,
        )


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
    """Print one row per run, and then the folder of each run."""
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
    for result in results:
        print(result.folder.path)


def _rows(result: Result) -> list[dict[str, Any]]:
    return read_rows(result.folder.metrics) if result.folder.metrics.exists() else []


def _summary(seed: int, result: Result) -> dict[str, str]:  # cells by heading; empty without a value
    row: dict[str, Any] = next((row for row in reversed(_rows(result)) if row.get("test_accuracy") is not None), {})
    return {
        "seed": str(seed),
        "status": "" if result.status == "ok" else result.status,
        "accuracy": _cell(row.get("test_accuracy"), "{:.2%}".format),
        "samples/s": _cell(row.get("samples_per_s"), "{:,.0f}".format),
        "step": _cell(row.get("step_time_s"), format_seconds),
        "sent/step": _cell(row.get("payload_bytes_per_step"), format_bytes),
        "ratio": _cell(row.get("compression_ratio"), "{:.4g}x".format),
        "trained": _cell(row.get("train_time_s"), format_seconds),
        "to target": _cell(
            row.get("time_to_target_s"), format_seconds, "" if row.get("target_accuracy") is None else "missed"
        ),
    }


def _cell(value: float | None, text: Callable[[float], str], otherwise: str = "") -> str:
    return otherwise if value is None else text(value)
