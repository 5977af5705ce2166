"""Output of `bench sweep` and `bench tune`: the plan, the progress of each run, and the state of all runs."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import sys
from pathlib import Path
from typing import Any

from bench.cli.output.console import print_json, stdout_console, table_of
from bench.cli.output.run import Display, make_each_ready, warn_of_other_work
from bench.core.config.run import RunConfig
from bench.core.errors import Interrupted
from bench.core.run_folder import RunFolder
from bench.core.units import format_seconds
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.run import Result, execute, resume
from bench.launch.sweeps.file import PlannedRun, table_text
from bench.launch.sweeps.state import SweepState, expected_s, run_missing


def say_plan(state: SweepState, configs: list[RunConfig], again: str) -> None:
    """Print on stderr how many runs the sweep has, how many are done, and how long the others will take.

    Args:
        state: the sweep.
        configs: the runs to execute now.
        again: text that says how to execute failed runs again.
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
    """Return the command for these runs; each element requests as many cores as the largest run uses.

    Args:
        file: the sweep file.
        state: all runs of the sweep.
        configs: the runs to execute.
        retry_failed: whether failed runs are among them.
    """
    wanted = {config.digest for config in configs}
    indices = [index for index, run in enumerate(state.runs) if run.config.digest in wanted]
    runs_of_indices = itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0])
    groups = [[index for _, index in group] for _, group in runs_of_indices]
    ranges = [f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups]  # 0-2,5
    cores = max(config.world_size * config.threads for config in configs)
    again = ["--retry-failed"] if retry_failed else []
    element = shlex.join(["bench", "sweep", str(file.absolute()), "--out", str(state.out.absolute()), *again])
    return shlex.join(
        [
            "sbatch",
            f"--job-name={file.stem}",
            f"--array={','.join(ranges)}",
            "--ntasks=1",
            f"--cpus-per-task={cores}",
            f"--wrap={element} --only $SLURM_ARRAY_TASK_ID",
        ]
    )


def print_state(state: SweepState, *, as_json: bool) -> None:
    """Print one row per configuration, with the numbers of its runs by state; as JSON one entry per run."""
    if as_json:
        folders = {digest: str(past.folder.path) for digest, past in state.past.items()}
        entries = [
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
        print_json(entries)
        return
    groups: dict[str, list[PlannedRun]] = {}
    for run in state.runs:
        groups.setdefault(run.config.config_id, []).append(run)
    rows = []
    for runs in sorted(groups.values(), key=lambda runs: table_text(runs[0].settings)):
        states = [state.progress(run) for run in runs]
        counts = (len(runs), states.count("done"), states.count("failed"))
        rows.append([table_text(runs[0].settings) or runs[0].config.name, *map(str, counts)])
    stdout_console().print(table_of(("configuration",), ("runs", "done", "failed"), rows))


class SweepProgress:
    """Executes runs of a sweep and shows the progress.

    Args:
        state: the sweep.
        configs: the runs to execute.
        server: starts the ranks.
    """

    def __init__(self, state: SweepState, configs: list[RunConfig], server: ForkServer) -> None:
        self._state = state
        self._configs = configs
        self._server = server
        self._titles = {run.config.digest: table_text(run.settings) for run in state.runs}
        self._durations = state.durations()
        self._errors: dict[str, str] = {}  # errors of failed runs, by digest
        self._results: list[Result] = []

    def run_all(self) -> SweepState:
        """Execute the runs and return the new state of the sweep.

        Raises:
            Interrupted: the user stopped a run.
            UsageError: results cannot be written, or this machine does not support virtual hosts.
        """
        make_each_ready(self._configs, self._server)
        run_missing(self._configs, self._state.out, self._state.past, self._train)
        warn_of_other_work(self._results)
        state = SweepState.look_up(self._state.runs, self._state.out)
        missing = [run.config.digest for run in state.runs_with_status("missing")]
        unrecorded = {digest: self._errors[digest] for digest in missing if digest in self._errors}
        return dataclasses.replace(state, unrecorded=unrecorded)

    def _train(self, config: RunConfig, begun: RunFolder | None) -> None:
        number = self._configs.index(config) + 1
        what = self._titles[config.digest] or config.name
        with Display(f"{number}/{len(self._configs)} {what}, seed {config.seed}") as display:

            def report(line: dict[str, Any]) -> None:
                if "evaluated" not in line:
                    display.report(line)

            if begun is None:
                result = execute(config, self._state.out, report, self._server)
            else:
                result = resume(begun, report, self._server, config)
            self._results.append(result)
            if (took_s := result.summary.get("wall_time_s")) is not None:
                self._durations.setdefault(config.config_id, []).append(took_s)
            left_s = expected_s(self._durations, self._configs[number:])
            left = f"; about {format_seconds(left_s)} left" if left_s else ""
            display.say(f"{display.title}: {_outcome(result)}{left}")
        if result.status in ("failed", "timeout"):
            self._errors[config.digest] = result.error
        if result.status == "interrupted":
            raise Interrupted("stopped by the user; the same command continues the sweep")


def _outcome(result: Result) -> str:
    if result.status != "ok":
        return f"{result.status}: {result.error}"
    return f"accuracy {result.summary['test_accuracy']:.2%} in {format_seconds(result.summary['wall_time_s'])}"
