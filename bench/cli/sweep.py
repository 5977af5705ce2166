"""`bench sweep`: every run that a file asks for, each done once, however often the sweep is stopped and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.cli.options import AsJson
from bench.core.config.job import OUTPUT
from bench.core.errors import UsageError
from collectives.options import MOST

WHICH = "Which runs"
RETRY = "--retry-failed runs them again"
EXAMPLES = """[bold]Examples[/bold]

  bench sweep examples/sweep.toml --dry-run

  bench sweep examples/sweep.toml --out results/runs/sweep

  bench sweep examples/sweep.toml --out results/runs/sweep --retry-failed

  bench sweep examples/sweep.toml --out /shared/sweep --slurm

The file: \\[base] holds options of `bench run`, \\[matrix] lists of them, \\[\\[method]] options that go together, with
all of the matrix, \\[\\[include]] one more configuration, \\[\\[exclude]] what is left out of the matrix; seeds = "1-3"
repeats all of them."""


def sweep(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="TOML file of the runs: base, matrix, method, include, exclude.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which each run gets its own; what is done there is not done again.",
            show_default="results/runs/ and the file's name",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, run nothing.", rich_help_panel=OUTPUT)
    ] = False,
    slurm: Annotated[
        bool,
        typer.Option(
            "--slurm", help="Print the sbatch line that does it as an array of single runs.", rich_help_panel=OUTPUT
        ),
    ] = False,
    as_json: AsJson = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Do runs that failed again.", rich_help_panel=WHICH)
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Do at most so many runs now.", rich_help_panel=WHICH)
    ] = None,
    only: Annotated[
        int | None,
        typer.Option(
            min=0, max=MOST, metavar="INDEX", help="Only this run of the plan, from 0.", rich_help_panel=WHICH
        ),
    ] = None,
) -> None:
    """Do every run that a file asks for: seeds outermost, what is done skipped, a failure a row like any other.

    Stop it at any time; the same command goes on. Several at once share the work.
    """
    from bench.cli.output.sweep import SweepProgress, print_agenda, say_plan
    from bench.launch.jobs.fork_server import TRAIN, ForkServer
    from bench.launch.sweeps.agenda import SweepState
    from bench.launch.sweeps.file import read_sweep
    from bench.launch.sweeps.plan import plan_runs
    from bench.launch.sweeps.slurm import sbatch_line

    if slurm and only is not None:
        raise UsageError("--slurm asks for an array of all runs, and --only for one of them; leave out one")
    asked = read_sweep(file)
    with ForkServer(TRAIN) as server:
        runs = plan_runs(asked, server)
        if only is not None and only >= len(runs):
            raise UsageError(f"--only {only} is none of the {len(runs)} runs; they count from 0")
        chosen = runs if only is None else [runs[only]]
        agenda = SweepState.look_up(chosen, out or Path("results/runs") / file.stem)
        configs = agenda.to_do(retry_failed=retry_failed, limit=limit)
        say_plan(agenda, configs, RETRY)
        if slurm:
            if configs:
                print(sbatch_line(file, agenda, configs, retry_failed=retry_failed))
            return
        if not dry_run:
            agenda = SweepProgress(agenda, configs, server).run_all()
    print_agenda(agenda, as_json=as_json)
    if not dry_run:
        agenda.raise_failures(RETRY)
