"""`bench doctor`, which checks whether this machine can execute runs, and says how to fix what is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from bench.cli.output.console import print_json, stdout_console
from bench.core.config.job import DATA_DIR, MAX_RANKS
from bench.core.errors import RunFailed

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
EXAMPLES = """[bold]Examples[/bold]

  bench doctor

  bench doctor --world-size 8 --no-smoke

  bench doctor --json"""


def doctor(
    world_size: Annotated[
        int, typer.Option(min=1, max=MAX_RANKS, help="Number of ranks that you want to run on this machine.")
    ] = 2,
    out: Annotated[Path, typer.Option(help="Folder of results.")] = Path("results/runs"),
    data_dir: Annotated[Path, typer.Option(help="Folder of the data sets.")] = Path(DATA_DIR),
    smoke: Annotated[bool, typer.Option(help="Train a few steps on two real ranks.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Check versions, backends, cores, memory, data, disk and permissions, and train a few steps on two ranks."""
    from bench.launch.doctor import examine

    console = stdout_console()
    checks = []
    for check in examine(world_size=world_size, out=out, data_dir=data_dir, smoke=smoke):
        checks.append(check)
        if not as_json:
            fix = f"; {check.fix}" if check.fix else ""
            level = f"[{COLOURS[check.level]}]{check.level:4}[/]"
            console.print(f"{level}  [bold]{check.name}[/]: {escape(check.finding + fix)}", soft_wrap=True)
    if as_json:
        print_json([dataclasses.asdict(check) for check in checks])
    failed = [check.name for check in checks if check.level == "fail"]
    if failed:
        raise RunFailed(
            f"{len(failed)} of {len(checks)} checks failed ({', '.join(failed)}); each line says what to do"
        )
