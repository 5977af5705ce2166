"""`bench run`, which trains a model with real processes, once per seed and compressor, or resumes a run."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bench.cli.compare import DEFAULT_PATH, compare
from bench.cli.options import AsJson, takes
from bench.core.config.job import MEASUREMENT, OUTPUT
from bench.core.config.run import RunConfig
from bench.core.config.syntax import parse_seeds, seeds_text
from bench.core.errors import Interrupted, RunFailed, UsageError
from bench.core.run_folder import RunFolder
from bench.core.spec import split_list

if TYPE_CHECKING:
    from bench.launch.jobs.fork_server import ForkServer
    from bench.launch.run import Result

EXAMPLES = """[bold]Examples[/bold]

  bench run --dataset digits --epochs 5

  bench run --compressor group_topk:ratio=0.01 --collective ring --seeds 1,2,3 --target-accuracy 0.97

  bench run --compressor none,powersgd,topk:ratio=0.001,skip=norm --steps 100

  bench run --hosts 4 --bandwidth 100mbit --model resnet18 --dataset synthetic --batch-size 4 --steps 20

  bench run --model resnet18 --dataset cifar10 --world-size 4 --compressor topk:ratio=0.001 --dry-run

Components are written name:key=value,key=value; `bench list compressors --long` shows every option."""

_BESIDE_RESUME = ("resume", "as_json", "world_size", "resume_residuals", "timeout_s")


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
    ] = DEFAULT_PATH,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_FOLDER",
            help="Resume this run from its last checkpoint; only --timeout and --world-size can be changed.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    resume_residuals: Annotated[
        Literal["sum", "drop"] | None,
        typer.Option(
            help="With --resume and another --world-size: what happens to the old ranks' residuals; sum: they are "
            "added up and shared out, drop: they are lost.",
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
    if resume is not None:
        _check_alone(context)
        timeout_s = options.timeout_s if _is_given(context, "timeout_s") else None
        _resume(resume, options.world_size, resume_residuals, timeout_s, as_json)
        return
    if resume_residuals is not None:
        raise UsageError("--resume-residuals is for a run resumed with other ranks; add --resume and --world-size")
    if seeds and _is_given(context, "seed"):
        raise UsageError("--seed and --seeds contradict each other; give one of them")
    numbers = parse_seeds(seeds) if seeds else [options.seed]
    from bench.cli.output.run import make_each_ready
    from bench.launch.jobs.fork_server import TRAIN, ForkServer

    with ForkServer(TRAIN) as server:  # also for a dry run, because it refuses kernels that are not available
        configs = _plan(options, numbers, server)
        if dry_run:
            _print_plans(configs, out, as_json, server)
            return
        make_each_ready(configs, server)
        _execute(options, configs, out, as_json, server)


def _plan(options: RunConfig, seeds: list[int], server: ForkServer) -> list[RunConfig]:
    """Return the runs of one compressor, or of several: seed by seed, and within a seed in random order, as in a sweep.

    Raises:
        UsageError: the options are not possible, or name a compressor twice.
    """
    from bench.launch.resolve import resolve_each
    from bench.launch.sweeps.file import SweepFile, plan_runs

    specs = split_list(options.compressor)
    if len(specs) == 1:
        (outcome,) = resolve_each([options], server)
        if isinstance(outcome, UsageError):
            raise outcome
        return [dataclasses.replace(outcome, seed=seed) for seed in seeds]
    if options.nnodes > 1:
        raise UsageError(
            f"--compressor names {len(specs)} methods, which are compared on one machine; give one of them with "
            f"--nnodes {options.nnodes}"
        )
    given = {option.name: getattr(options, option.name) for option in RunConfig.options() if option.flag}
    methods = SweepFile(where="--compressor", base=given, seeds=seeds, matrix={"compressor": specs})
    configs = [run.config for run in plan_runs(methods, server)]
    if len(configs) < len(specs) * len(seeds):
        raise UsageError(f"--compressor {options.compressor} names one method twice; each is run once per seed")
    return configs


def _check_alone(context: typer.Context) -> None:
    """Refuse options that cannot be combined with --resume."""
    if given := [name for name in context.params if name not in _BESIDE_RESUME and _is_given(context, name)]:
        flags = {option.name: option.flag_name for option in RunConfig.options()}
        named = ", ".join(flags.get(name, f"--{name.replace('_', '-')}") for name in given)
        raise UsageError(f"--resume takes everything from the run's own configuration; leave out {named}")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _resume(
    path: Path,
    world_size: int | None,
    residuals: Literal["sum", "drop"] | None,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    from bench.cli.output.run import Display, print_summary, warn_of_other_work
    from bench.launch.jobs.fork_server import TRAIN, ForkServer
    from bench.launch.resolve import with_ranks
    from bench.launch.run import check_left, configuration_of, resume

    folder = RunFolder(path.resolve())  # the folder's name identifies the run, so resolve `.` and links
    check_left(folder)
    config = configuration_of(folder)
    _check_residuals(folder, config.world_size, world_size, residuals)
    with ForkServer(TRAIN) as server:
        if world_size is not None and residuals is not None:
            server.warm_up(config.threads)
            config = server.call(with_ranks, config, world_size)
        if timeout_s is not None:
            config = dataclasses.replace(config, timeout_s=timeout_s)
        with Display(f"{config.name} seed {config.seed}, resumed") as display:
            result = resume(folder, display.report, server, config, residuals)
    if as_json:
        print(json.dumps([result.summary | {"folder": str(result.folder.path)}], indent=2))
    else:
        print_summary([config], [result])
    warn_of_other_work([result])
    _raise_failures([config], [result])


def _check_residuals(folder: RunFolder, before: int, now: int | None, residuals: str | None) -> None:
    """Check that --resume-residuals is given if, and only if, the number of ranks changes."""
    is_other = now not in (None, before)
    if is_other and residuals is None:
        raise UsageError(
            f"{folder.path} had {before} ranks, each with residuals that it had not sent; add --resume-residuals sum "
            "to share them out, or drop to lose them, or leave out --world-size"
        )
    if residuals is not None and not is_other:
        raise UsageError(
            f"--resume-residuals is for another number of ranks than the run's {before}; give --world-size"
        )


def _execute(options: RunConfig, configs: list[RunConfig], out: Path, as_json: bool, server: ForkServer) -> None:
    """Execute the runs; with one compressor, stop at the first failure; with several, go on with the next run."""
    from bench.cli.output.run import Display, print_summary, warn_of_other_work
    from bench.launch.run import execute

    are_several = _num_methods(configs) > 1
    results: list[Result] = []
    for number, config in enumerate(configs, 1):
        position = f"{number}/{len(configs)} " if len(configs) > 1 else ""
        what = config.compressor if are_several else config.name
        with Display(f"{position}{what} seed {config.seed}") as display:
            results.append(execute(config, out, display.report, server))
        if results[-1].status == "interrupted" or (results[-1].status != "ok" and not are_several):
            break
    if as_json:
        data = [
            {"compressor": config.compressor, "seed": config.seed} | each.summary | {"folder": str(each.folder.path)}
            for config, each in zip(configs, results, strict=False)
        ]
        print(json.dumps(data, indent=2))
    elif are_several and any(result.status == "ok" for result in results):
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
    """Return a useful next command: a report of the methods, a comparison with other runs, or runs to compare with."""
    from bench.launch.sweeps.file import run_arguments
    from bench.launch.sweeps.state import past_runs

    place = [] if out == DEFAULT_PATH else [str(out)]
    has_others = len(past_runs(out)) > len(results)
    if _num_methods(configs) > 1:
        return ["bench", "report", *([str(result.folder.path) for result in results] if has_others else place)]
    if has_others:
        return ["bench", "compare", *place]
    values = {option.name: getattr(options, option.name) for option in RunConfig.options() if option.flag}
    given = {name: value for name, value in values.items() if value != getattr(RunConfig, name)}
    others = "none,bf16,powersgd" if options.compressor == "none" else f"none,{options.compressor}"
    seeds = {"seeds": seeds_text(config.seed for config in configs)} if len(configs) > 1 else {}
    folder = {"out": out} if place else {}
    return ["bench", "run", *run_arguments(given | {"compressor": others} | seeds | folder)]


def _raise_failures(configs: Sequence[RunConfig], results: Sequence[Result]) -> None:
    """Raise an error if a run failed, or if the user stopped one."""
    from bench.launch.run import last_step

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
        advice += f"; not run: --seeds {seeds_text(config.seed for config in left)}"
    if last.status == "interrupted":
        raise Interrupted(f"{last.error} in {path}{advice}")
    raise RunFailed(f"{counted}{last.error}; rows and logs so far are in {path}{advice}")


def _print_plans(configs: list[RunConfig], out: Path, as_json: bool, server: ForkServer) -> None:
    """Print the plan of every method; as JSON an object, or a list of objects if there are several methods."""
    from bench.cli.output.run import print_layers, print_notes, print_plan
    from bench.launch.jobs import torchrun
    from bench.launch.layer_plan import plan_layers

    by_method: dict[str, list[RunConfig]] = {}
    for config in configs:
        by_method.setdefault(config.config_id, []).append(config)
    plans: list[dict[str, Any]] = []
    for of_seeds in by_method.values():
        config = of_seeds[0]
        layers = server.call(plan_layers, config)
        folder = RunFolder(out / f"<utc>-{config.name}-s{config.seed}-{config.digest}")
        lines = torchrun.shell_lines(config, folder)
        if not as_json:
            print_plan(of_seeds)
            print_layers(layers)
            print(*lines, sep="\n")
        print_notes(of_seeds)
        described = [dataclasses.asdict(each) | {"digest": each.digest} for each in of_seeds]
        plans.append({"configs": described, "layers": dataclasses.asdict(layers), "torchrun": lines})
    if as_json:
        json.dump(plans if len(plans) > 1 else plans[0], sys.stdout, indent=2)
        print()
