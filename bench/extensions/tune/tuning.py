"""Choose the best settings for each configuration of a sweep file, by their quality on held-out training samples.

Tuning is a sweep with a seed that no other run uses. It never uses the test set, tries the same settings for every
configuration, and trains all configurations for the same length.
"""

import dataclasses
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cli.console import print_json, stdout_console, table_of
from bench.core import spec
from bench.core.config.run import RunConfig
from bench.core.config.syntax import parse_seeds
from bench.core.errors import RunFailed, UsageError
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.plan import plan_each
from bench.launch.recipes import with_recipe
from bench.launch.sweep_file import (
    OUTER_LR,
    Lists,
    PlannedRun,
    Settings,
    SweepFile,
    combinations,
    read_sweep,
    run_arguments,
    table_text,
    toml_table,
)
from bench.launch.sweep_state import SweepState
from bench.launch.without_torch import without_torch
from bench.report.quality import Metric, quality_of
from collectives.options import Spec, value_text

METHODS = ["none", "topk", "powersgd"]
# Learning rates to try, relative to --lr or the optimizer's default.
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
# Outer learning rates to try with strategy local. Streaming DiLoCo and SparseLoCo use 0.4, DiLoCo 0.7, averaging 1.
OUTER_RATES = (0.4, 0.7, 1.0)
# Share of the training samples that is held out.
HELD_OUT = 0.2


# Settings to try.


def methods_to_tune(
    given: dict[str, Any],
    file: Path | None,
    compressors: str | None,
    rates: str | None,
    outer_rates: str | None,
    seeds: str | None,
    server: ForkServer,
) -> SweepFile:
    """Return the configurations to tune, with the values to try; defaults that are filled in are printed on stderr.

    Args:
        given: the options of `bench run` that the user gave, for all runs, by name.
        file: a sweep file with a table [tune]; None if the command line has the options.
        compressors: compressors to tune, separated by commas.
        rates: learning rates to try, separated by commas.
        outer_rates: outer learning rates of local steps to try, separated by commas.
        seeds: seeds of the runs after tuning.
        server: fills in the settings of runs if `compressors` is None and the defaults are tried.

    Raises:
        UsageError: options contradict each other, the file is not a sweep file, or a component is unknown.
    """
    given, options = dict(given), RunConfig(**given)
    tried: Lists = {"lr": _numbers("--rates", rates)} if rates else {}
    outer = _numbers("--outer-rates", outer_rates) if outer_rates else []
    if file is not None:
        if given or compressors or seeds or rates or outer_rates:
            raise UsageError(
                f"{file} must contain all options; write the other options there, with rates to try as lr and outer_lr "
                "under [tune], or leave out the file"
            )
        return read_sweep(file, "tune")
    if "compressor" in given and compressors:
        raise UsageError("--compressor and --compressors contradict each other; give one of them")
    if options.nnodes > 1:
        raise UsageError("tuning runs on this machine; leave out --nnodes")
    if "seed" in given and seeds:
        raise UsageError("--seed and --seeds contradict each other; give one of them")
    first_seed = [given.pop("seed")] if "seed" in given else []
    return with_defaults(
        SweepFile(
            where="the command line",
            base=given,
            seeds=parse_seeds(seeds) if seeds else first_seed,
            matrix={"compressor": spec.split_list(compressors)} if compressors else {},
            tune=tried,
        ),
        outer,
        server,
    )


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return sorted({float(number) for number in text.split(",")})
    except ValueError:
        raise UsageError(f"{flag} {text} is not a list of numbers; write 0.01,0.02,0.05") from None


def with_defaults(sweep: SweepFile, outer_rates: Sequence[float], server: ForkServer) -> SweepFile:
    """Return the sweep with defaults for missing compressors, learning rates and number of held-out samples.

    Print on stderr the command-line options that set the same values as these defaults.

    Args:
        sweep: the sweep.
        outer_rates: outer learning rates of local steps to try; empty for the default rates.
        server: resolves runs with the default compressors.

    Raises:
        UsageError: a component or one of its options is unknown, outer learning rates are given for another strategy
            than local, or no default compressor works with the other options.
    """
    base, matrix, tune, said = dict(sweep.base), dict(sweep.matrix), dict(sweep.tune), []
    tunes_outer_lr = _without_outer_lr(base) is not None
    if outer_rates and not tunes_outer_lr:
        raise UsageError(
            "--outer-rates needs --strategy local without outer_lr; give that strategy, or leave out --outer-rates"
        )
    if "compressor" not in base | matrix:
        matrix["compressor"] = _default_compressors(base, server)
        said.append(f"--compressors {','.join(matrix['compressor'])}")
    if not tune or not base.get("holdout_size"):
        whole = with_recipe(base)
        lr, train_size = without_torch(_lr_and_size, whole) or _lr_and_size(whole)
        if not tune:
            base.pop("lr", None)
            tune["lr"] = [float(f"{factor * lr:.3g}") for factor in FACTORS]
            said.append(f"--rates {','.join(map(str, tune['lr']))}")
        if not base.get("holdout_size"):
            base["holdout_size"] = max(1, round(HELD_OUT * train_size))
            said.append(f"--holdout-size {base['holdout_size']}")
    if tunes_outer_lr:
        tune[OUTER_LR] = list(outer_rates or OUTER_RATES)
        if not outer_rates:
            said.append(f"--outer-rates {','.join(map(value_text, OUTER_RATES))}")
    if said:
        print(f"chosen by default: {' '.join(said)}", file=sys.stderr)
    return dataclasses.replace(sweep, base=base, matrix=matrix, tune=tune)


def _default_compressors(base: Settings, server: ForkServer) -> list[str]:
    """Return those of `METHODS` that work with the other options; print on stderr why others are left out."""
    outcomes = plan_each([RunConfig(**with_recipe(base | {"compressor": method})) for method in METHODS], server)
    reasons = {m: str(outcome) for m, outcome in zip(METHODS, outcomes, strict=True) if isinstance(outcome, UsageError)}
    all_refused = len(reasons) == len(METHODS)
    if all_refused and len(set(reasons.values())) == 1:
        raise UsageError(reasons[METHODS[0]])  # equal for all compressors, so the reason is another option
    for method, reason in reasons.items():
        print(f"note: {method} is not tried by default: {reason}", file=sys.stderr)
    if all_refused:
        raise UsageError(
            "no compressor that is tried by default works with the other options; choose others with --compressors, or "
            "change these options"
        )
    return [method for method in METHODS if method not in reasons]


def _lr_and_size(base: Settings) -> tuple[float, int]:
    default_lr = spec.build("optimizers", base.get("optimizer", RunConfig.optimizer)).default_lr
    dataset = spec.build("datasets", base.get("dataset", RunConfig.dataset))
    train_size, _ = dataset.resolve_sizes(base.get("train_size"), None)
    return base.get("lr", default_lr), train_size


def tuning_sweep(sweep: SweepFile, seed: int) -> SweepFile:
    """Return the sweep that tries every combination of values in `[tune]` for every configuration, with one seed.

    Raises:
        UsageError: there is nothing to tune, no samples are held out, the seed is one of the sweep's own seeds, a tuned
            option is set elsewhere too, configurations differ in length or number of samples, or no configuration has
            the outer learning rate that is to be tuned.
    """
    if not sweep.tune:
        raise UsageError(f"{sweep.where} tunes nothing; give --rates 0.01,0.02,0.05, or lists of values under [tune]")
    if not sweep.base.get("holdout_size"):
        raise UsageError(f"{sweep.where} holds out no samples, which tuning needs; give --holdout-size")
    if seed in sweep.seeds:
        raise UsageError(f"--tuning-seed {seed} is also a seed of the runs after tuning; choose another --tuning-seed")
    configurations = sweep.configurations()
    for name in ("epochs", "steps", "train_size", "holdout_size", *sweep.tune):
        if any(name in options for options in configurations) or (name in sweep.tune and name in sweep.base):
            raise UsageError(
                f"{sweep.where}: {name} cannot differ between configurations, because all are tuned with the same "
                "budget and values; put it into [base]"
            )
    tried = [each for options in configurations for each in _settings_to_try(sweep, options)]
    if OUTER_LR in sweep.tune and not any(OUTER_LR in values for values, _ in tried):
        raise UsageError(
            f"{sweep.where} tunes outer_lr, but every configuration has another strategy than local, or an outer_lr of "
            "its own; give strategy local without outer_lr, or do not tune outer_lr"
        )
    return SweepFile(where=sweep.where, base=sweep.base, seeds=[seed], include=[settings for _, settings in tried])


def _settings_to_try(sweep: SweepFile, options: Settings) -> list[tuple[Settings, Settings]]:
    """Return the runs that tune one configuration, one for each different combination of the values in `[tune]`.

    Each run is a tuple (the values that it tries, the settings of the run without those of `[base]`). In the settings,
    an `outer_lr` to try becomes an option of strategy local. If the configuration has another strategy, or already sets
    `outer_lr`, the run does not try an `outer_lr`, and the tuple does not contain it.

    Args:
        sweep: the sweep to tune.
        options: options that the configuration adds to `[base]`, or changes in it.
    """
    tried: dict[str, tuple[Settings, Settings]] = {}
    for values in combinations(sweep.tune):
        settings = options | values
        if OUTER_LR in values:
            outer_lr = settings.pop(OUTER_LR)
            if strategy := _without_outer_lr(sweep.base | settings):
                options_of_local = strategy.options | {OUTER_LR: value_text(outer_lr)}
                settings["strategy"] = str(Spec(strategy.name, options_of_local))
            else:
                del values[OUTER_LR]
        tried.setdefault(table_text(settings), (values, settings))
    return list(tried.values())


def _without_outer_lr(options: Settings) -> Spec | None:
    """Return the strategy of a run if it is `local` and has no option `outer_lr`; otherwise None."""
    strategy = spec.parse(str(with_recipe(options).get("strategy") or RunConfig.strategy))
    return strategy if strategy.name == "local" and OUTER_LR not in strategy.options else None


# The best settings.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """The result of tuning one configuration.

    Attributes:
        settings: options that the configuration adds to `[base]`, or changes in it.
        best: the chosen values, by their names in `[tune]`.
        chosen: `settings` with the chosen values and `rates_tried`, for runs of the configuration after tuning.
        accuracy: accuracy with the chosen values on the held-out samples, 0 to 1; for a text, bits per byte.
        rates_tried: number of settings tried, including settings whose runs failed.
        equally_good: number of settings with this accuracy, including the chosen one.
        at_the_end: names in `[tune]` whose chosen value is the smallest or largest tried value, so that a value beyond
            it may be better; only names that have this value in all equally good settings.
        quality: the metric of `accuracy`.
    """

    settings: Settings
    best: Settings
    chosen: Settings
    accuracy: float
    rates_tried: int
    equally_good: int
    at_the_end: list[str]
    quality: Metric


def choose(sweep: SweepFile, state: SweepState) -> list[Tuned]:
    """Return for each configuration the tried settings with the best quality; if several are equally good, the first.

    Args:
        sweep: the sweep to tune.
        state: the finished runs of the sweep that `tuning_sweep` returned.

    Raises:
        RunFailed: every setting of a configuration failed.
    """
    runs = {table_text(run.settings): run for run in state.runs}
    chosen = []
    for options in sweep.configurations():
        texts = [(values, table_text(settings)) for values, settings in _settings_to_try(sweep, options)]
        tried = [(values, runs[text]) for values, text in texts if text in runs]
        if tried:  # otherwise the configuration equals an earlier one
            chosen.append(_best(options, tried, sweep.tune, state))
    return chosen


def tuned_file(sweep: SweepFile, tuned: Sequence[Tuned], seed: int) -> str:
    """Return the text of a sweep file with the chosen settings, whose runs are evaluated on the test set.

    Args:
        sweep: the sweep that was tuned.
        tuned: the chosen settings of each configuration.
        seed: the seed with which the settings were tried.
    """
    holdout_size = sweep.base["holdout_size"]
    seeds = {"seeds": ",".join(map(str, sweep.seeds))} if sweep.seeds else {}
    comment = f"# Written by bench tune: chosen on {holdout_size} held-out training samples with seed {seed}.\n"
    tables = [toml_table("[base]", evaluated_base(sweep) | seeds)]
    tables += [toml_table("[[include]]", each.chosen) for each in tuned]
    return "\n".join([comment, *tables])


def evaluated_base(sweep: SweepFile) -> Settings:
    """Return the options that all runs after tuning share; these runs hold out no samples and use the test set."""
    return {name: value for name, value in sweep.base.items() if name != "holdout_size"}


def _best(options: Settings, tried: list[tuple[Settings, PlannedRun]], lists: Lists, state: SweepState) -> Tuned:
    done = [(values, run) for values, run in tried if state.progress(run) == "done"]
    if not done:
        digest = tried[0][1].config.digest
        error = state.unrecorded.get(digest) or state.past[digest].summary["error"]
        failed = f"{table_text(options) or '[base]'} failed with every setting, first with: {error}"
        raise RunFailed(f"{failed}; see the logs, or try other values")
    summaries = [state.past[run.config.digest].summary for _, run in done]
    quality = quality_of(summaries)
    reached = [summary[quality.column] for summary in summaries]
    costs = [math.inf if math.isnan(value) else quality.cost(value) for value in reached]
    best = [each for each, cost in zip(done, costs, strict=True) if cost == min(costs)]
    values, run = best[0]
    at_the_end = []
    for name in values:
        numbers = [each for each in lists[name] if isinstance(each, (int, float)) and not isinstance(each, bool)]
        is_end = len(numbers) == len(lists[name]) > 1 and values[name] in (min(numbers), max(numbers))
        if is_end and all(others[name] == values[name] for others, _ in best):
            at_the_end.append(name)
    return Tuned(
        settings=options,
        best=values,
        chosen=run.settings | {"rates_tried": len(tried)},
        accuracy=reached[costs.index(min(costs))],
        rates_tried=len(tried),
        equally_good=len(best),
        at_the_end=at_the_end,
        quality=quality,
    )


def _described(tuned: Tuned) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(tuned) if field.name not in ("chosen", "quality")]
    return {tuned.quality.name if name == "accuracy" else name: getattr(tuned, name) for name in names}


def print_tuned(methods: SweepFile, tuned: list[Tuned], *, as_json: bool) -> None:
    """Print the best settings, the `bench run` commands that use them, and warnings about the choice.

    The warnings are about equally good settings, and about best values that are the smallest or largest tried value.

    Args:
        methods: the sweep that was tuned.
        tuned: the chosen settings of each configuration.
        as_json: print JSON instead of a table.
    """
    seeds = {"seeds": ",".join(map(str, methods.seeds))} if methods.seeds else {}
    commands = [shlex.join(["bench", "run", *run_arguments(evaluated_base(methods) | t.chosen | seeds)]) for t in tuned]
    if as_json:
        print_json([_described(each) | {"command": command} for each, command in zip(tuned, commands, strict=True)])
    else:
        rows = [
            (
                table_text(each.settings) or "[base]",
                table_text(each.best),
                each.quality.format(each.accuracy),
                str(each.rates_tried),
            )
            for each in tuned
        ]
        stdout_console().print(
            table_of(("configuration", "best"), (f"held-out {tuned[0].quality.noun}", "tried"), rows)
        )
        print(*commands, sep="\n")
    for each in tuned:
        what = table_text(each.settings) or "[base]"
        if each.equally_good > 1:
            tied = f"{each.equally_good} of {each.rates_tried} settings gave the same {each.quality.noun}"
            print(f"note: {what}: {tied}, so none of them is better; the first was taken", file=sys.stderr)
        for name in each.at_the_end:
            beyond = f"the best {name}, {each.best[name]}, is the smallest or largest tried; try values beyond it"
            print(f"warning: {what}: {beyond}", file=sys.stderr)
