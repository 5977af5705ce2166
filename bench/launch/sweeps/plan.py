"""The plan of a sweep: its runs, complete and checked, in the order in which they are done."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.core.config.configuration import short_digest
from bench.core.config.job import RanksConfig
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.refusals import check_each, without_torch
from bench.launch.resolve import place_run, resolve_each
from bench.launch.sweeps.file import Options, SweepFile, table_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a sweep.

    Attributes:
        settings: what the file says of its configuration beside `[base]`.
        config: complete.
    """

    settings: Options
    config: RunConfig


def plan_runs(sweep: SweepFile, server: ForkServer) -> list[PlannedRun]:
    """Every run that the file asks for, each once, in an order that the file alone decides.

    Seeds come outermost, so that a sweep that is stopped has as many seeds of one configuration as of the other. Within
    a seed, runs with equal ranks follow each other; among these the order is by chance, so that no configuration has a
    place of its own in a machine's day.

    Args:
        sweep: the file.
        server: knows torch; it begins to import here.

    Raises:
        UsageError: every configuration that is not possible, and why.
    """
    settings = sweep.configurations()
    outcomes = [_asked(sweep.base | each) for each in settings]
    asked = [outcome for outcome in outcomes if isinstance(outcome, RunConfig)]
    if asked:
        answers: Sequence[RunConfig | UsageError | None] = without_torch(check_each, asked) or []
        if not any(answers):  # nothing is refused yet
            server.warm_up_for(asked[0])
            answers = server.call(resolve_each, asked)
        given = iter(answers)
        outcomes = [next(given) or outcome if isinstance(outcome, RunConfig) else outcome for outcome in outcomes]
    configs = [outcome for outcome in outcomes if isinstance(outcome, RunConfig)]
    if len(configs) < len(outcomes):
        raise UsageError(_refusals(sweep.where, settings, outcomes))
    runs = [PlannedRun(settings=each, config=config) for each, config in zip(settings, configs, strict=True)]
    return _in_order(runs, sweep)


def _asked(options: Options) -> RunConfig | UsageError:
    """The configuration as far as numbers alone show that it is possible."""
    try:
        asked = RunConfig(**options)
        place_run(asked)
    except UsageError as refusal:
        return refusal
    return asked


def _refusals(where: str, settings: list[Options], outcomes: Sequence[RunConfig | UsageError]) -> str:
    """One line per reason, with the settings that all configurations share which it refuses."""
    shared: dict[str, Options] = {}
    for each, outcome in zip(settings, outcomes, strict=True):
        if isinstance(outcome, UsageError):
            before = shared.get(str(outcome), each)
            shared[str(outcome)] = {name: value for name, value in before.items() if each.get(name) == value}
    lines = [f"{table_text(options) or '[base]'}: {reason}" for reason, options in shared.items()]
    return "\n  ".join([f"{where} asks for what is not possible, so nothing was started:", *lines])


def _in_order(runs: list[PlannedRun], sweep: SweepFile) -> list[PlannedRun]:
    runs = _each_once(runs)  # of doubles the first, so that all settings of one configuration stay together
    placements = list(dict.fromkeys(_placement(run.config) for run in runs))
    ordered: dict[str, PlannedRun] = {}
    for seed in sweep.seeds or [RunConfig.seed]:
        turns = [
            (placements.index(_placement(run.config)), short_digest([sweep.digest, seed, number]), run)
            for number, run in enumerate(runs)
        ]
        for *_, run in sorted(turns, key=lambda turn: turn[:2]):
            config = dataclasses.replace(run.config, seed=seed)
            ordered.setdefault(config.digest, dataclasses.replace(run, config=config))
    return list(ordered.values())


def _each_once(runs: list[PlannedRun]) -> list[PlannedRun]:
    by_digest: dict[str, PlannedRun] = {}
    for run in runs:
        by_digest.setdefault(run.config.digest, run)
    return list(by_digest.values())


def _placement(config: RunConfig) -> str:
    return short_digest([getattr(config, option.name) for option in RanksConfig.options()])
