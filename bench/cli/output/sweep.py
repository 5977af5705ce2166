"""Output of `bench sweep` and `bench tune`: the plan, the progress of each run, and the state of all runs."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from rich.markup import escape

from bench.cli.output.console import plain_table, print_json, stdout_console
from bench.cli.output.run import Display, make_each_ready, warn_of_other_work
from bench.core.config.run import RunConfig
from bench.core.errors import Interrupted
from bench.core.run_folder import RunFolder
from bench.core.units import format_seconds
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.run import Result, execute, resume
from bench.launch.sweeps.file import table_text
from bench.launch.sweeps.state import SweepState, run_missing


def say_plan(agenda: SweepState, configs: list[RunConfig], again: str) -> None:
    """Print on stderr how many runs the sweep has, how many are done, and how long the others will take.

    Args:
        agenda: the sweep.
        configs: the runs to execute now.
        again: text that says how to execute failed runs again.
    """
    seconds = agenda.estimate().total_s(configs)
    time = f"about {format_seconds(seconds)}" if seconds is not None else "duration not known yet"
    failed = len(agenda.runs_with_status("failed"))
    parts = [
        f"{len(agenda.runs)} runs of {len({run.config.config_id for run in agenda.runs})} configurations",
        f"{len(agenda.runs_with_status('done'))} done",
        *([f"{failed} failed ({again})"] if failed else []),
        f"{len(configs)} to do now" + (f", {time}" if configs else ""),
    ]
    print("; ".join(parts), file=sys.stderr)


def print_agenda(agenda: SweepState, *, as_json: bool) -> None:
    """Print one row per configuration, with the numbers of its runs by state; as JSON one entry per run."""
    if as_json:
        print_json(agenda.as_data())
        return
    table = plain_table()
    table.add_column("configuration")
    for heading in ("runs", "done", "failed"):
        table.add_column(heading, justify="right")
    for runs in _by_configuration(agenda):
        states = [agenda.progress(run) for run in runs]
        counts = (len(runs), states.count("done"), states.count("failed"))
        table.add_row(escape(table_text(runs[0].settings) or runs[0].config.name), *map(str, counts))
    stdout_console().print(table)


def _by_configuration(agenda: SweepState) -> list[list[Any]]:
    """Return the runs of each configuration, sorted by the text of their settings."""
    groups: dict[str, list[Any]] = {}
    for run in agenda.runs:
        groups.setdefault(run.config.config_id, []).append(run)
    return sorted(groups.values(), key=lambda runs: table_text(runs[0].settings))


class SweepProgress:
    """Executes runs of a sweep and shows the progress.

    Args:
        agenda: the sweep.
        configs: the runs to execute.
        server: starts the ranks.
    """

    def __init__(self, agenda: SweepState, configs: list[RunConfig], server: ForkServer) -> None:
        self._agenda = agenda
        self._configs = configs
        self._server = server
        self._titles = {run.config.digest: table_text(run.settings) for run in agenda.runs}
        self._estimate = agenda.estimate()
        self._errors: dict[str, str] = {}  # errors of failed runs, by digest
        self._results: list[Result] = []

    def run_all(self) -> SweepState:
        """Execute the runs and return the new state of the sweep.

        Raises:
            Interrupted: the user stopped a run.
            UsageError: results cannot be written, or this machine does not support virtual hosts.
        """
        make_each_ready(self._configs, self._server)
        run_missing(self._configs, self._agenda.out, self._agenda.past, self._train)
        warn_of_other_work(self._results)
        agenda = SweepState.look_up(self._agenda.runs, self._agenda.out)
        missing = [run.config.digest for run in agenda.runs_with_status("missing")]
        unrecorded = {digest: self._errors[digest] for digest in missing if digest in self._errors}
        return dataclasses.replace(agenda, unrecorded=unrecorded)

    def _train(self, config: RunConfig, begun: RunFolder | None) -> None:
        number = self._configs.index(config) + 1
        what = self._titles[config.digest] or config.name
        with Display(f"{number}/{len(self._configs)} {what}, seed {config.seed}") as display:

            def report(line: dict[str, Any]) -> None:
                if "evaluated" not in line:
                    display.report(line)

            if begun is None:
                result = execute(config, self._agenda.out, report, self._server)
            else:
                result = resume(begun, report, self._server, config)
            self._results.append(result)
            self._estimate.learn(config, result.summary.get("wall_time_s"))
            left_s = self._estimate.total_s(self._configs[number:])
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
