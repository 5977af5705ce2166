"""`bench sweep`, which executes every run of a file once, even if it is stopped and started again."""

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

The file: \\[base] holds options of `bench run` for all runs; \\[matrix] lists values to combine; each \\[\\[method]] is
a group of options to combine with the matrix; \\[\\[include]] adds a configuration; \\[\\[exclude]] removes some from
the matrix; seeds = "1-3" runs every configuration with these seeds."""


def sweep(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="TOML file of the runs: base, matrix, method, include, exclude.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the runs' folders; runs that are done there are skipped.",
            show_default="results/runs/ and the file's name",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan; run nothing.", rich_help_panel=OUTPUT)
    ] = False,
    slurm: Annotated[
        bool,
        typer.Option(
            "--slurm",
            help="Print the sbatch command that submits the sweep as an array with one run per element.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    as_json: AsJson = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Also execute runs again that failed.", rich_help_panel=WHICH)
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Largest number of runs to execute now.", rich_help_panel=WHICH)
    ] = None,
    only: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MOST,
            metavar="INDEX",
            help="Execute only the run with this number in the plan, from 0.",
            rich_help_panel=WHICH,
        ),
    ] = None,
) -> None:
    """Execute every run of a file, seed by seed; skip runs that are done, and go on after a failure.

    You can stop a sweep at any time; the same command continues it. Several commands at once share the work.
    """
    from bench.cli.output.sweep import SweepProgress, print_state, say_plan, sbatch_line
    from bench.launch.jobs.fork_server import TRAIN, ForkServer
    from bench.launch.sweeps.file import plan_runs, read_sweep
    from bench.launch.sweeps.state import SweepState

    if slurm and only is not None:
        raise UsageError("--slurm submits all runs, and --only selects one of them; leave out one of these options")
    content = read_sweep(file)
    with ForkServer(TRAIN) as server:
        runs = plan_runs(content, server)
        if only is not None and only >= len(runs):
            raise UsageError(f"--only {only} is none of the {len(runs)} runs; they count from 0")
        chosen = runs if only is None else [runs[only]]
        state = SweepState.look_up(chosen, out or Path("results/runs") / file.stem)
        configs = state.to_do(retry_failed=retry_failed, limit=limit)
        say_plan(state, configs, RETRY)
        if slurm:
            if configs:
                print(sbatch_line(file, state, configs, retry_failed=retry_failed))
            return
        if not dry_run:
            state = SweepProgress(state, configs, server).run_all()
    print_state(state, as_json=as_json)
    if not dry_run:
        state.raise_failures(RETRY)
