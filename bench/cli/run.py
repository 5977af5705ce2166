"""`bench run`: train for real, once per seed."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bench.cli import hosts_options as on
from bench.cli.completion import complete
from bench.core.config import Nonfinite, Schedule, Trigger
from bench.core.errors import Interrupted, RunFailed, UsageError
from bench.core.request import DEFAULT_EPOCHS, DEFAULT_WORLD_SIZE, Request

if TYPE_CHECKING:
    from bench.core.config import RunConfig
    from bench.launch.run import Result

WHAT = "What to train"
COMMUNICATION = "Communication"
MEASUREMENT = "Measurement"
MACHINE = "Machines"
OUTPUT = "Output"
EXAMPLES = """[bold]Examples[/bold]

  bench run --dataset digits --epochs 5

  bench run --compressor group_topk:ratio=0.01 --collective ring --seeds 1,2,3 --target-accuracy 0.97

  bench run --hosts 4 --bandwidth 100mbit --model resnet18 --dataset synthetic --batch-size 4 --steps 20

  bench run --model resnet18 --dataset cifar10 --world-size 4 --compressor topk:ratio=0.001 --dry-run

Components are written name:key=value,key=value; `bench list compressors --long` shows every option."""

DEFAULTS = Request()


def run(
    model: Annotated[
        str, typer.Option(help="Network.", rich_help_panel=WHAT, autocompletion=complete("models"))
    ] = DEFAULTS.model,
    dataset: Annotated[
        str, typer.Option(help="Data set.", rich_help_panel=WHAT, autocompletion=complete("datasets"))
    ] = DEFAULTS.dataset,
    optimizer: Annotated[
        str, typer.Option(help="Optimizer.", rich_help_panel=WHAT, autocompletion=complete("optimizers"))
    ] = DEFAULTS.optimizer,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per rank and step.", rich_help_panel=WHAT)] = (
        DEFAULTS.batch_size
    ),
    epochs: Annotated[
        int | None, typer.Option(min=1, help=f"Length in epochs (default {DEFAULT_EPOCHS}).", rich_help_panel=WHAT)
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Length in steps instead; starts at full compression.", rich_help_panel=WHAT),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate (default: the optimizer's own).", rich_help_panel=WHAT)
    ] = None,
    schedule: Annotated[
        Schedule, typer.Option(help="Learning rate over time.", rich_help_panel=WHAT)
    ] = DEFAULTS.schedule,
    warmup_epochs: Annotated[
        float, typer.Option(min=0, help="Epochs over which the learning rate rises from zero.", rich_help_panel=WHAT)
    ] = DEFAULTS.warmup_epochs,
    lr_scaling: Annotated[
        Literal["none", "linear"], typer.Option(help="linear: learning rate times world size.", rich_help_panel=WHAT)
    ] = DEFAULTS.lr_scaling,
    augment: Annotated[bool, typer.Option(help="Random crop and flip.", rich_help_panel=WHAT)] = DEFAULTS.augment,
    amp: Annotated[
        Literal["none", "bf16"], typer.Option(help="Autocast to bf16.", rich_help_panel=WHAT)
    ] = DEFAULTS.amp,
    train_size: Annotated[
        int | None, typer.Option(min=1, help="Use so many training samples (default: all).", rich_help_panel=WHAT)
    ] = None,
    test_size: Annotated[
        int | None, typer.Option(min=1, help="Use so many test samples (default: all).", rich_help_panel=WHAT)
    ] = None,
    data_dir: Annotated[str, typer.Option(help="Where data sets lie.", rich_help_panel=WHAT)] = DEFAULTS.data_dir,
    compressor: Annotated[
        str,
        typer.Option(
            help="Gradient compressor.", rich_help_panel=COMMUNICATION, autocompletion=complete("compressors")
        ),
    ] = DEFAULTS.compressor,
    collective: Annotated[
        str | None,
        typer.Option(
            help="How ranks sum (default: the strategy's own; with ddp the first legal of native and allgather).",
            rich_help_panel=COMMUNICATION,
            autocompletion=complete("collectives"),
        ),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            help="When ranks exchange what.", rich_help_panel=COMMUNICATION, autocompletion=complete("strategies")
        ),
    ] = DEFAULTS.strategy,
    trigger: Annotated[
        Trigger,
        typer.Option(
            help="async: each bucket when it is ready; sync: when rank 0 saw all ranks done.",
            rich_help_panel=COMMUNICATION,
        ),
    ] = DEFAULTS.trigger,
    bucket_mb: Annotated[
        float, typer.Option(min=0.01, help="DDP's bucket size in MiB.", rich_help_panel=COMMUNICATION)
    ] = DEFAULTS.bucket_mb,
    nonfinite: Annotated[
        Nonfinite,
        typer.Option(help="At a non-finite gradient: skip the step, raise, or zero it.", rich_help_panel=COMMUNICATION),
    ] = DEFAULTS.nonfinite,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Ranks of the whole job (default: {DEFAULT_WORLD_SIZE}, or those of the virtual hosts).",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where ranks compute.", rich_help_panel=MACHINE)
    ] = DEFAULTS.device,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads per rank (default: cores / ranks).", rich_help_panel=MACHINE)
    ] = None,
    straggler: Annotated[
        str | None,
        typer.Option(help="Make one rank slow on purpose: rank=1,slowdown=3.", rich_help_panel=MACHINE),
    ] = None,
    nnodes: Annotated[
        int, typer.Option(min=1, help="Machines; give the same command on each.", rich_help_panel=MACHINE)
    ] = DEFAULTS.nnodes,
    node_rank: Annotated[
        int, typer.Option(min=0, help="This machine, from 0.", rich_help_panel=MACHINE)
    ] = DEFAULTS.node_rank,
    rdzv_endpoint: Annotated[str | None, typer.Option(help="HOST:PORT of machine 0.", rich_help_panel=MACHINE)] = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=1,
            help="Seconds that one step may take; then ranks find out who is late, and the run ends.",
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
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.", rich_help_panel=MEASUREMENT)] = (
        DEFAULTS.seed
    ),
    seeds: Annotated[
        str | None, typer.Option(help="Several runs, one per seed: 1,2,3 or 1-5.", rich_help_panel=MEASUREMENT)
    ] = None,
    target_accuracy: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Record when the test accuracy reaches this.", rich_help_panel=MEASUREMENT),
    ] = None,
    eval_every: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Evaluate every so many epochs, or steps with --steps; 0: at the end (default: 1, with --steps 0).",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    warmup_steps: Annotated[
        int, typer.Option(min=0, help="First steps that are trained but not timed.", rich_help_panel=MEASUREMENT)
    ] = DEFAULTS.warmup_steps,
    profile: Annotated[
        int, typer.Option(min=0, help="Record N steps as a Chrome trace on every rank.", rich_help_panel=MEASUREMENT)
    ] = DEFAULTS.profile,
    name: Annotated[
        str | None, typer.Option(help="Label of the run (default: its components).", rich_help_panel=OUTPUT)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder in which a new run folder is made.", rich_help_panel=OUTPUT)] = Path(
        "results/runs"
    ),
    save_model: Annotated[
        bool, typer.Option("--save-model", help="Keep the trained weights.", rich_help_panel=OUTPUT)
    ] = DEFAULTS.save_model,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the plan and the torchrun line, run nothing.", rich_help_panel=OUTPUT),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON on stdout.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Train a model in several processes with a chosen compressor x collective x optimizer, and record everything."""
    given = dict(locals())
    request = Request(
        **{field.name: given[field.name] for field in dataclasses.fields(Request) if field.name in given},
        timeout_s=timeout,
    )
    _check_name(name)
    configs = _plan(request, _parse_seeds(seeds) if seeds else [seed])
    if dry_run:
        _print_plan(configs, out, as_json)
        return
    _execute(request, configs, out, as_json)


def _plan(request: Request, seeds: list[int]) -> list[RunConfig]:
    from bench.launch.plan import plan

    return [plan(dataclasses.replace(request, seed=seed)) for seed in seeds]


def _execute(request: Request, configs: list[RunConfig], out: Path, as_json: bool) -> None:
    from bench.cli.display import Display, print_summary
    from bench.launch.plan import components, prepare_data
    from bench.launch.run import execute

    _print_notes(configs[0], components(request).compressor.warnings())
    prepare_data(configs[0])
    results: list[Result] = []
    for number, config in enumerate(configs, 1):
        with Display(config, f"{number}/{len(configs)}" if len(configs) > 1 else "") as display:
            results.append(execute(config, out, display.report))
        if results[-1].status != "ok":
            break
    if as_json:
        print(json.dumps([result.summary | {"folder": str(result.folder.path)} for result in results], indent=2))
    else:
        print_summary(configs, results)
    _raise_failure(results[-1])


def _print_notes(config: RunConfig, warnings: list[str]) -> None:
    for sentence in warnings:
        print(f"note: {sentence}", file=sys.stderr)
    if config.steps and "warmup_epochs=" in config.filled["compressor"]:
        print(f"note: --steps {config.steps} starts at full compression, without warm-up", file=sys.stderr)


def _raise_failure(last: Result) -> None:
    if last.status == "interrupted":
        raise Interrupted(f"{last.error} in {last.folder.path}")
    if last.status != "ok":
        raise RunFailed(f"{last.error}; rows and logs so far are in {last.folder.path}")


def _print_plan(configs: list[RunConfig], out: Path, as_json: bool) -> None:
    from bench.cli.display import print_layers, print_plan
    from bench.core.run_folder import RunFolder
    from bench.launch import torchrun
    from bench.launch.plan import plan_layers

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
    _print_notes(config, layers.warnings)


def _parse_seeds(text: str) -> list[int]:
    seeds: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
        if not match:
            raise UsageError(f"--seeds {text} is not a list of seeds; write 1,2,3 or 1-5")
        first, last = int(match[1]), int(match[2] or match[1])
        seeds += range(first, last + 1)
    if not seeds or len(set(seeds)) != len(seeds):
        raise UsageError(f"--seeds {text} names no seed, or one of them twice; each seed is one run")
    return seeds


def _check_name(name: str | None) -> None:
    if name is not None and not re.fullmatch(r"[A-Za-z0-9._+-]{1,80}", name):
        raise UsageError(f"--name '{name}' cannot be part of a folder's name; use letters, digits and . _ + -")
