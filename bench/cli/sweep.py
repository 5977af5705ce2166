"""`bench sweep`, which executes all runs of a sweep file once, even if the command is stopped and started again."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.api.execution import make_each_ready, warn_of_runs
from bench.api.progress import Display
from bench.cli.console import print_json, stdout_console, table_of
from bench.cli.options import AsJson
from bench.core.config.run import OUTPUT, RunConfig
from bench.core.errors import Interrupted, UsageError
from bench.core.run_folder import RUNS_FOLDER, RunFolder
from bench.core.units import format_seconds
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.run import Result, execute, resume
from bench.launch.sweep_file import plan_runs, read_sweep, table_text
from bench.launch.sweep_state import SweepState, expected_s, run_missing
from bench.report.quality import quality_of
from bench.report.store import grouped
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
        bool, typer.Option("--retry-failed", help="Also execute failed runs again.", rich_help_panel=WHICH)
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
    """Execute all runs of a sweep file, seed by seed; skip runs that are done, and continue after a failure.

    You can stop a sweep at any time; the same command continues it. If several such commands run at the same time, each
    executes some of the runs.
    """
    if slurm and only is not None:
        raise UsageError("--slurm submits all runs, and --only selects one of them; leave out one of these options")
    content = read_sweep(file)
    with ForkServer(TRAIN) as server:
        runs = plan_runs(content, server)
        if only is not None and only >= len(runs):
            raise UsageError(f"--only {only} is not the number of a run; the {len(runs)} runs are numbered from 0")
        out = out or RUNS_FOLDER / file.stem
        state = SweepState.look_up(runs if only is None else [runs[only]], out)
        configs = state.to_do(retry_failed=retry_failed, limit=limit)
        say_plan(state, configs, RETRY)
        if slurm:
            if configs:
                print(sbatch_line(file, state, configs, retry_failed=retry_failed))
            return
        if not dry_run:
            state = run_all(state, configs, server)
    print_state(state, as_json=as_json)
    if not dry_run:
        state.raise_failures(RETRY)


def say_plan(state: SweepState, configs: list[RunConfig], again: str) -> None:
    """Print on stderr how many runs the sweep has, how many are done, and how long the runs to execute will take.

    Args:
        state: the sweep.
        configs: the runs to execute now.
        again: text that says how the user can execute failed runs again.
    """
    seconds = expected_s(state.durations(), configs)
    time = f"about {format_seconds(seconds)}" if seconds is not None else "duration not known yet"
    failed = len(state.runs_with_status("failed"))
    parts = [
        f"{len(state.runs)} runs of {len({run.config.config_id for run in state.runs})} configurations",
        f"{len(state.runs_with_status('done'))} done",
        *([f"{failed} failed ({again})"] if failed else []),
        f"{len(configs)} to do now" + (f", {time}" if configs else ""),
    ]
    print("; ".join(parts), file=sys.stderr)


def sbatch_line(file: Path, state: SweepState, configs: list[RunConfig], *, retry_failed: bool) -> str:
    """Return the command that submits these runs to Slurm as one job array with one run per element.

    Each element requests as many cores as the largest of the runs uses.

    Args:
        file: the sweep file.
        state: the sweep.
        configs: the runs to execute.
        retry_failed: True if `configs` includes failed runs; the submitted commands then get ``--retry-failed``.
    """
    wanted = {config.digest for config in configs}
    indices = [index for index, run in enumerate(state.runs) if run.config.digest in wanted]
    consecutive = grouped(enumerate(indices), lambda pair: pair[1] - pair[0]).values()
    ends = [(group[0][1], group[-1][1]) for group in consecutive]
    ranges = [f"{first}-{last}" if first < last else str(first) for first, last in ends]  # 0-2,5
    again = ["--retry-failed"] if retry_failed else []
    element = shlex.join(["bench", "sweep", str(file.absolute()), "--out", str(state.out.absolute()), *again])
    return shlex.join(
        [
            "sbatch",
            f"--job-name={file.stem}",
            f"--array={','.join(ranges)}",
            "--ntasks=1",
            f"--cpus-per-task={max(config.world_size * config.threads for config in configs)}",
            f"--wrap={element} --only $SLURM_ARRAY_TASK_ID",
        ]
    )


def print_state(state: SweepState, *, as_json: bool) -> None:
    """Print a table with one row per configuration: how many runs it has, and how many of them are done or failed.

    Args:
        state: the sweep.
        as_json: print JSON with one entry per run instead.
    """
    if as_json:
        folders = {digest: str(past.folder.path) for digest, past in state.past.items()}
        print_json(
            [
                {
                    "index": index,
                    "settings": run.settings,
                    "seed": run.config.seed,
                    "digest": run.config.digest,
                    "config_id": run.config.config_id,
                    "status": state.progress(run),
                    "folder": folders[run.config.digest] if state.progress(run) != "missing" else None,
                }
                for index, run in enumerate(state.runs)
            ]
        )
        return
    rows = []
    groups = grouped(state.runs, lambda run: run.config.config_id).values()
    for runs in sorted(groups, key=lambda runs: table_text(runs[0].settings)):
        states = [state.progress(run) for run in runs]
        counts = (len(runs), states.count("done"), states.count("failed"))
        rows.append([table_text(runs[0].settings) or runs[0].config.name, *map(str, counts)])
    stdout_console().print(table_of(("configuration",), ("runs", "done", "failed"), rows))


def run_all(state: SweepState, configs: list[RunConfig], server: ForkServer) -> SweepState:
    """Execute runs of a sweep, show their progress, and return the new state of the sweep.

    Args:
        state: the sweep.
        configs: the runs to execute.
        server: starts the ranks.

    Raises:
        Interrupted: the user stopped a run.
        UsageError: results cannot be written, or this machine does not support virtual hosts.
    """
    titles = {run.config.digest: table_text(run.settings) for run in state.runs}
    durations = state.durations()
    errors: dict[str, str] = {}  # error messages of failed runs, by digest
    results: list[Result] = []

    def train(config: RunConfig, begun: RunFolder | None) -> None:
        number = configs.index(config) + 1
        what = titles[config.digest] or config.name
        with Display(f"{number}/{len(configs)} {what}, seed {config.seed}") as display:

            def report(line: dict[str, Any]) -> None:
                if "evaluated" not in line:
                    display.report(line)

            if begun is None:
                result = execute(config, state.out, report, server)
            else:
                result = resume(begun, report, server, config)
            results.append(result)
            if (took_s := result.summary.get("wall_time_s")) is not None:
                durations.setdefault(config.config_id, []).append(took_s)
            left_s = expected_s(durations, configs[number:])
            left = f"; about {format_seconds(left_s)} left" if left_s else ""
            ending = f"{result.status}: {result.error}"
            if result.status == "ok":
                took = format_seconds(result.summary["wall_time_s"])
                quality = quality_of([result.summary | {"target_accuracy": config.target_accuracy}])
                ending = f"{quality.noun} {quality.format(result.summary[quality.column])} in {took}"
            display.say(f"{display.title}: {ending}{left}")
        if result.status in ("failed", "timeout"):
            errors[config.digest] = result.error
        if result.status == "interrupted":
            raise Interrupted("stopped by the user; the same command continues the sweep")

    make_each_ready(configs, server)
    run_missing(configs, state.out, state.past, train)
    warn_of_runs(results)
    state = SweepState.look_up(state.runs, state.out)
    missing = [run.config.digest for run in state.runs_with_status("missing")]
    return dataclasses.replace(state, unrecorded={digest: errors[digest] for digest in missing if digest in errors})
