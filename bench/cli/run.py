"""`bench run`: train for real, once per seed."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli.options import AsJson, takes
from bench.core.config import RunConfig
from bench.core.errors import Interrupted, RunFailed, UsageError
from bench.core.job_config import MEASUREMENT, OUTPUT

if TYPE_CHECKING:
    from bench.launch.fork_server import ForkServer
    from bench.launch.run import Result

MOST_SEEDS = 1000
EXAMPLES = """[bold]Examples[/bold]

  bench run --dataset digits --epochs 5

  bench run --compressor group_topk:ratio=0.01 --collective ring --seeds 1,2,3 --target-accuracy 0.97

  bench run --hosts 4 --bandwidth 100mbit --model resnet18 --dataset synthetic --batch-size 4 --steps 20

  bench run --model resnet18 --dataset cifar10 --world-size 4 --compressor topk:ratio=0.001 --dry-run

Components are written name:key=value,key=value; `bench list compressors --long` shows every option."""


@takes(RunConfig)
def run(
    asked: RunConfig,
    seeds: Annotated[
        str | None, typer.Option(help="Several runs, one per seed: 1,2,3 or 1-5.", rich_help_panel=MEASUREMENT)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder in which a new run folder is made.", rich_help_panel=OUTPUT)] = Path(
        "results/runs"
    ),
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the plan and the torchrun line, run nothing.", rich_help_panel=OUTPUT),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model in several processes with a chosen compressor x collective x optimizer, and record everything."""
    numbers = _parse_seeds(seeds) if seeds else [asked.seed]
    from bench.launch.fork_server import TRAIN, warmed_server
    from bench.launch.resolve import place_run, prepare, resolve

    place_run(asked)
    if dry_run:
        resolved = resolve(asked)
        _print_plan([dataclasses.replace(resolved, seed=seed) for seed in numbers], out, as_json)
        return
    with warmed_server(TRAIN, asked) as server:
        configs, warnings = server.call(prepare, asked, numbers)
        _print_notes(configs[0], warnings)
        _execute(configs, out, as_json, server)


def _execute(configs: list[RunConfig], out: Path, as_json: bool, server: ForkServer) -> None:
    from bench.cli.display import Display, print_summary
    from bench.launch.run import execute

    results: list[Result] = []
    for number, config in enumerate(configs, 1):
        with Display(config, f"{number}/{len(configs)}" if len(configs) > 1 else "") as display:
            results.append(execute(config, out, display.report, server))
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
    _print_notes(config, layers.warnings)


def _parse_seeds(text: str) -> list[int]:
    seeds: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", item)
        if not match:
            raise UsageError(f"--seeds {text} is not a list of seeds; write 1,2,3 or 1-5")
        named = range(int(match[1]), int(match[2] or match[1]) + 1)
        if len(seeds) + len(named) > MOST_SEEDS:
            raise UsageError(f"--seeds {text} names more than {MOST_SEEDS} runs; give fewer seeds")
        seeds += named
    if not seeds or len(set(seeds)) != len(seeds):
        raise UsageError(f"--seeds {text} names no seed, or one of them twice; each seed is one run")
    return seeds
