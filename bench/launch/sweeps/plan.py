"""Plan the runs of a sweep: check and complete their configurations, and put them in order."""

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
        settings: options that its configuration adds to `[base]` or changes.
        config: complete configuration.
    """

    settings: Options
    config: RunConfig


def plan_runs(sweep: SweepFile, server: ForkServer) -> list[PlannedRun]:
    """Return every run of the file once, in an order that depends only on the file.

    All runs of one seed come before those of the next, so that a sweep that is stopped early has equally many seeds of
    each configuration. Within a seed, runs with the same ranks follow each other, in random order, so that changes of
    the machine's load over time do not favour a configuration.

    Args:
        sweep: the file.
        server: checks the runs with torch, which it starts to import here.

    Raises:
        UsageError: some configurations are impossible; the message lists them with the reasons.
    """
    settings = sweep.configurations()
    outcomes = [_placed(sweep.base | each) for each in settings]
    possible = [outcome for outcome in outcomes if isinstance(outcome, RunConfig)]
    if possible:
        answers: Sequence[RunConfig | UsageError | None] = without_torch(check_each, possible) or []
        if not any(answers):  # no configuration is refused so far
            server.warm_up_for(possible[0])
            answers = server.call(resolve_each, possible)
        given = iter(answers)
        outcomes = [next(given) or outcome if isinstance(outcome, RunConfig) else outcome for outcome in outcomes]
    configs = [outcome for outcome in outcomes if isinstance(outcome, RunConfig)]
    if len(configs) < len(outcomes):
        raise UsageError(_refusals(sweep.where, settings, outcomes))
    runs = [PlannedRun(settings=each, config=config) for each, config in zip(settings, configs, strict=True)]
    return _in_order(runs, sweep)


def _placed(options: Options) -> RunConfig | UsageError:
    """Return the options as a configuration, or the error if numbers alone show that it is impossible."""
    try:
        config = RunConfig(**options)
        place_run(config)
    except UsageError as refusal:
        return refusal
    return config


def _refusals(where: str, settings: list[Options], outcomes: Sequence[RunConfig | UsageError]) -> str:
    """Return one line per reason, with the settings shared by all configurations that it applies to."""
    shared: dict[str, Options] = {}
    for each, outcome in zip(settings, outcomes, strict=True):
        if isinstance(outcome, UsageError):
            before = shared.get(str(outcome), each)
            shared[str(outcome)] = {name: value for name, value in before.items() if each.get(name) == value}
    lines = [f"{table_text(options) or '[base]'}: {reason}" for reason, options in shared.items()]
    return "\n  ".join([f"{where} has configurations that are not possible, so nothing was started:", *lines])


def _in_order(runs: list[PlannedRun], sweep: SweepFile) -> list[PlannedRun]:
    runs = _each_once(runs)  # keeps the first of equal configurations, so that its settings describe all its seeds
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
