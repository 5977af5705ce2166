"""`bench run`: train for real, once per seed."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bench.cli.options import AsJson, takes
from bench.core.config.job import MEASUREMENT, OUTPUT
from bench.core.config.run import RunConfig
from bench.core.config.seeds import parse_seeds, seeds_text
from bench.core.errors import Interrupted, RunFailed, UsageError
from bench.core.locks import locked
from bench.core.run_folder import RunFolder

if TYPE_CHECKING:
    from bench.launch.jobs.fork_server import ForkServer
    from bench.launch.run import Result

EXAMPLES = """[bold]Examples[/bold]

  bench run --dataset digits --epochs 5

  bench run --compressor group_topk:ratio=0.01 --collective ring --seeds 1,2,3 --target-accuracy 0.97

  bench run --hosts 4 --bandwidth 100mbit --model resnet18 --dataset synthetic --batch-size 4 --steps 20

  bench run --model resnet18 --dataset cifar10 --world-size 4 --compressor topk:ratio=0.001 --dry-run

Components are written name:key=value,key=value; `bench list compressors --long` shows every option."""

_BESIDE_RESUME = ("resume", "as_json", "world_size", "resume_residuals", "timeout_s")


@takes(RunConfig)
def run(
    asked: RunConfig,
    context: typer.Context,
    seeds: Annotated[
        str | None, typer.Option(help="Several runs, one per seed: 1,2,3 or 1-5.", rich_help_panel=MEASUREMENT)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder in which a new run folder is made.", rich_help_panel=OUTPUT)] = Path(
        "results/runs"
    ),
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_FOLDER",
            help="Go on with this run from its last checkpoint; it is what its configuration says, but for --timeout.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    resume_residuals: Annotated[
        Literal["sum", "drop"] | None,
        typer.Option(
            help="With --resume and another --world-size: sum shares out what those before had not sent, or drop it.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the plan and the torchrun line, run nothing.", rich_help_panel=OUTPUT),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model in several processes with a chosen compressor x collective x optimizer, and record everything."""
    if resume is not None:
        _check_alone(context)
        timeout_s = asked.timeout_s if _is_given(context, "timeout_s") else None
        _resume(resume, asked.world_size, resume_residuals, timeout_s, as_json)
        return
    if resume_residuals is not None:
        raise UsageError("--resume-residuals is for a run that goes on with other ranks; add --resume and --world-size")
    if seeds and _is_given(context, "seed"):
        raise UsageError("--seed and --seeds contradict each other; give one of them")
    numbers = parse_seeds(seeds) if seeds else [asked.seed]
    from bench.cli.output.run import print_notes
    from bench.launch.jobs.fork_server import TRAIN, ForkServer
    from bench.launch.refusals import without_torch
    from bench.launch.resolve import check, prepare, resolve

    with ForkServer(TRAIN) as server:  # which refuses kernels that there are not, for a plan too
        without_torch(check, asked)
        if dry_run:
            resolved = resolve(asked)
            _print_plan([dataclasses.replace(resolved, seed=seed) for seed in numbers], out, as_json)
            return
        server.warm_up_for(asked)
        configs, warnings = server.call(prepare, asked, numbers)
        print_notes(configs[0], warnings)
        _execute(configs, out, as_json, server)


def _check_alone(context: typer.Context) -> None:
    """Refuse what else was given beside --resume."""
    if given := [name for name in context.params if name not in _BESIDE_RESUME and _is_given(context, name)]:
        flags = {option.name: option.flag_name for option in RunConfig.options()}
        named = ", ".join(flags.get(name, f"--{name.replace('_', '-')}") for name in given)
        raise UsageError(f"--resume takes everything from the run's own configuration; leave out {named}")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _resume(path: Path, world_size: int | None, waiting: str | None, timeout_s: float | None, as_json: bool) -> None:
    from bench.cli.output.run import Display, print_summary
    from bench.launch.jobs.fork_server import TRAIN, ForkServer
    from bench.launch.resolve import with_ranks
    from bench.launch.resuming import ask_anew, change_ranks, check_left, configuration_of
    from bench.launch.run import resume

    folder = RunFolder(path.resolve())  # a run is known by its folder's name, which `.` and links do not tell
    check_left(folder)
    config = configuration_of(folder)
    _check_waiting(folder, config.world_size, world_size, waiting)
    with ForkServer(TRAIN) as server:
        if world_size is not None and waiting is not None:
            server.warm_up(config.threads)
            config = server.call(with_ranks, config, world_size)
            with locked(folder.path) as is_held:
                if is_held:  # else what follows says so
                    change_ranks(folder, config, waiting)
        if timeout_s is not None:
            config = dataclasses.replace(config, timeout_s=timeout_s)
            with locked(folder.path) as is_held:
                if is_held:
                    ask_anew(folder, config)
        with Display(f"{config.name} seed {config.seed}, resumed") as display:
            result = resume(folder, display.report, server)
    if as_json:
        print(json.dumps([result.summary | {"folder": str(result.folder.path)}], indent=2))
    else:
        print_summary([config], [result])
    _raise_failure(result)


def _check_waiting(folder: RunFolder, before: int, now: int | None, waiting: str | None) -> None:
    """What waits to be sent differs between ranks; where their number changes, the user says what becomes of it."""
    is_other = now not in (None, before)
    if is_other and waiting is None:
        raise UsageError(
            f"{folder.path} had {before} ranks, each with something that it had not sent; add --resume-residuals sum "
            "to share that out or drop to drop it, or leave out --world-size"
        )
    if waiting is not None and not is_other:
        raise UsageError(
            f"--resume-residuals is for another number of ranks than the {before} of the run; give --world-size"
        )


def _execute(configs: list[RunConfig], out: Path, as_json: bool, server: ForkServer) -> None:
    from bench.cli.output.run import Display, print_summary
    from bench.launch.run import execute

    results: list[Result] = []
    for number, config in enumerate(configs, 1):
        position = f"{number}/{len(configs)} " if len(configs) > 1 else ""
        with Display(f"{position}{config.name} seed {config.seed}") as display:
            results.append(execute(config, out, display.report, server))
        if results[-1].status != "ok":
            break
    if as_json:
        print(json.dumps([result.summary | {"folder": str(result.folder.path)} for result in results], indent=2))
    else:
        print_summary(configs, results)
    _raise_failure(results[-1], [config.seed for config in configs[len(results) :]])


def _raise_failure(last: Result, left: Sequence[int] = ()) -> None:
    """End as the last run did; `left`: seeds that were not run for it."""
    if last.status == "ok":
        return
    from bench.launch.resuming import last_step

    step, path = last_step(last.folder), last.folder.path
    advice = f"; to go on from step {step}: bench run --resume {path}" if step is not None else ""
    if left:
        advice += f"; not run: --seeds {seeds_text(left)}"
    if last.status == "interrupted":
        raise Interrupted(f"{last.error} in {path}{advice}")
    raise RunFailed(f"{last.error}; rows and logs so far are in {path}{advice}")


def _print_plan(configs: list[RunConfig], out: Path, as_json: bool) -> None:
    from bench.cli.output.run import print_layers, print_notes, print_plan
    from bench.core.run_folder import RunFolder
    from bench.launch.jobs import torchrun
    from bench.launch.layer_plan import plan_layers

    config = configs[0]
    layers = plan_layers(config)
    folder = RunFolder(out / f"<utc>-{config.name}-s{config.seed}-{config.digest}")
    lines = torchrun.shell_lines(config, folder)
    if as_json:
        plan: dict[str, Any] = {
            "configs": [dataclasses.asdict(c) | {"digest": c.digest} for c in configs],
            "layers": dataclasses.asdict(layers),
            "torchrun": lines,
        }
        json.dump(plan, sys.stdout, indent=2)
        print()
    else:
        print_plan(configs)
        print_layers(layers)
        print(*lines, sep="\n")
    print_notes(config, layers.warnings)
