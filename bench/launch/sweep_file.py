"""Read sweep files, which describe many runs with the options of `bench run`.

`[base]` holds options that all runs share. `[matrix]` gives some options a list of values each; every
combination of these values is a configuration. Each `[[method]]` holds options that belong together, such as a
compressor and its learning rate, and is combined with the whole matrix. Each `[[include]]` adds one configuration; each
`[[exclude]]` removes the matching configurations from the matrix. Every configuration is run with every seed (`seeds`,
in `[base]` or `[matrix]`).
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.core.config.configuration import short_digest
from bench.core.config.run import MACHINES, RanksConfig, RunConfig
from bench.core.config.syntax import parse_seeds
from bench.core.errors import UsageError
from bench.core.files import read_toml, refuse_unknown, tables
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.plan import plan_each
from bench.launch.recipes import with_recipe
from bench.launch.without_torch import result_or_refusal

# Option name -> value.
Settings = dict[str, Any]

# Option name -> values.
Lists = dict[str, list[Any]]

# Key in [tune] for an option of the strategy `local`. The option is tuned like the learning rate.
OUTER_LR = "outer_lr"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepFile:
    """The content of a sweep file.

    Attributes:
        where: the file's path, for error messages.
        base: options that all runs share.
        seeds: seeds with which every configuration is run; empty if the file names none.
        matrix: list of values by option; every combination of values is a configuration.
        method: groups of options, each combined with the whole matrix.
        include: options of additional configurations.
        exclude: options that identify configurations to remove from the matrix.
        tune: list of values by option, or by `OUTER_LR`; `bench tune` tries every combination of values for every
            configuration.
    """

    where: str
    base: Settings
    seeds: list[int] = dataclasses.field(default_factory=list)
    matrix: Lists = dataclasses.field(default_factory=dict)
    method: list[Settings] = dataclasses.field(default_factory=list)
    include: list[Settings] = dataclasses.field(default_factory=list)
    exclude: list[Settings] = dataclasses.field(default_factory=list)
    tune: Lists = dataclasses.field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Return ten hex digits, a hash of the file's content."""
        return short_digest({**dataclasses.asdict(self), "where": ""})

    def configurations(self) -> list[Settings]:
        """Return one dict per configuration: the options that the configuration adds to `base` or changes in `base`.

        Raises:
            UsageError: all configurations are excluded, or an [[exclude]] matches no configuration.
        """
        is_all_included = self.include and not (self.matrix or self.method)
        methods = [] if is_all_included else self.method or [{}]
        combined = [options | method for options in combinations(self.matrix) for method in methods]
        for table in self.exclude:
            kept = [options for options in combined if not table.items() <= (self.base | options).items()]
            if len(kept) == len(combined):
                raise UsageError(f"{self.where} [[exclude]]: {table_text(table)} matches no configuration; correct it")
            combined = kept
        if not combined + self.include:
            raise UsageError(f"{self.where} excludes every configuration; remove an [[exclude]]")
        return combined + self.include


def combinations(lists: Lists) -> list[Settings]:
    """Return every combination of one value from each list, as option name -> value."""
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def table_text(options: Mapping[str, Any]) -> str:
    """Return the options in one line, such as "lr = 0.1, epochs = 5", for messages and tables."""
    return ", ".join(f"{name} = {value}" for name, value in options.items())


def read_sweep(path: Path, *further: str) -> SweepFile:
    """Read a sweep file.

    Args:
        path: the file.
        further: headings that are allowed in addition to those of `bench sweep`, such as "tune".

    Raises:
        UsageError: the file is not a sweep file. The values of options are not checked.
    """
    content = read_toml(path, "sweep file")
    refuse_unknown(content, ("base", "matrix", "method", "include", "exclude", *further), where=str(path))
    base, matrix = _table(content, "base", path), _table(content, "matrix", path)
    base_seeds, matrix_seeds = _pop_seeds(base, path), _pop_seeds(matrix, path)
    if base_seeds and matrix_seeds:
        raise UsageError(f"{path} gives seeds in [base] and in [matrix]; give them once")
    sweep = SweepFile(
        where=str(path),
        base=_by_name(base, f"{path} [base]"),
        seeds=base_seeds + matrix_seeds,
        matrix=_by_name(matrix, f"{path} [matrix]", lists=True),
        method=[_by_name(table, f"{path} [[method]]") for table in tables(content, "method", where=str(path))],
        include=[_by_name(table, f"{path} [[include]]") for table in tables(content, "include", where=str(path))],
        exclude=[_by_name(table, f"{path} [[exclude]]") for table in tables(content, "exclude", where=str(path))],
        tune=_by_name(_table(content, "tune", path), f"{path} [tune]", OUTER_LR, lists=True),
    )
    if both := sweep.base.keys() & sweep.matrix.keys():
        raise UsageError(f"{path} gives {', '.join(sorted(both))} both in [base] and in [matrix]; leave out one")
    if both := sweep.matrix.keys() & {name for options in sweep.method for name in options}:
        raise UsageError(f"{path} gives {', '.join(sorted(both))} both in [matrix] and in [[method]]; leave out one")
    return sweep


@functools.cache
def options_by_key() -> dict[str, str]:
    """Return a dict from each key of a sweep file to an option's name; keys are command-line options with underscores.

    Options for several machines are left out, because a sweep runs on one machine. `seed` is left out, because seeds
    are read separately.
    """
    return {
        option.keyword: option.name
        for option in RunConfig.options()
        if option.flag and option.flag.panel != MACHINES and option.name != "seed"
    }


def toml_table(heading: str, options: Mapping[str, Any]) -> str:
    """Return the text of a table of a sweep file: the heading, and one line per option."""
    keys = {name: key for key, name in options_by_key().items()}
    # JSON strings, numbers and booleans are also valid TOML.
    lines = [f"{keys.get(name, name)} = {json.dumps(value)}\n" for name, value in options.items()]
    return "".join([f"{heading}\n", *lines])


def run_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the command-line arguments of `bench run` that set these options."""
    flags = {option.name: option.flag_name for option in RunConfig.options()}
    without_no = {option.name for option in RunConfig.options() if option.flag and option.flag.name}
    arguments = []
    for name, value in options.items():
        flag = flags.get(name, f"--{name}")
        if not isinstance(value, bool):
            arguments += [flag, str(value)]
        elif value or name not in without_no:  # such options have no --no- form and are off by default
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
    return arguments


def _table(content: Mapping[str, Any], heading: str, path: Path) -> Settings:
    table = content.get(heading, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: write {heading} as a table under the heading [{heading}]")
    return {key.replace("-", "_"): value for key, value in table.items()}


def _pop_seeds(table: Settings, path: Path) -> list[int]:
    given = [table.pop(key) for key in ("seed", "seeds") if key in table]
    if len(given) > 1:
        raise UsageError(f"{path} gives seed and seeds; give one of them")
    if not given:
        return []
    text = ",".join(map(str, given[0])) if isinstance(given[0], list) else str(given[0])
    return parse_seeds(text, f"{path}: seeds =")


def _by_name(table: Mapping[str, Any], where: str, *further: str, lists: bool = False) -> Settings:
    """Check the keys of a sweep file's table and the form of its values; return the values by option name.

    If `lists` is True, each value must be a list that is not empty; otherwise, each must be a single value. `further`
    are keys that are allowed in addition to the keys of options.
    """
    spelled = {key.replace("-", "_"): value for key, value in table.items()}
    names = {**options_by_key(), **{key: key for key in further}}
    refuse_unknown(spelled, names, where=where)
    options = {names[key]: value for key, value in spelled.items()}
    for name, value in options.items():
        if lists and not (isinstance(value, list) and value):
            raise UsageError(f"{where}: {name} = {value} is not a list of values; write {name} = [..., ...]")
        if not lists and isinstance(value, (list, dict)):
            raise UsageError(f"{where}: {name} = {value} is not a single value; write lists under [matrix]")
    return options


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a sweep.

    Attributes:
        settings: options that the run adds to `[base]` of the sweep file, or changes in `[base]`.
        config: the run's complete configuration.
    """

    settings: Settings
    config: RunConfig


def plan_runs(sweep: SweepFile, server: ForkServer) -> list[PlannedRun]:
    """Return every run of a sweep file once, in an order that depends only on the file.

    All runs of one seed come before the runs of the next seed, so that a sweep that is stopped early has equally many
    seeds of each configuration. Within a seed, runs with the same placement of ranks are consecutive, in random order,
    so that changes of the machine's load over time do not favour a configuration.

    Args:
        sweep: content of the file.
        server: plans the runs in its process; this function starts the process, which imports torch.

    Raises:
        UsageError: some configurations are impossible; the message lists them with the reasons.
    """
    settings = sweep.configurations()
    given = [result_or_refusal(_options, sweep.base | each) for each in settings]
    resolved = iter(plan_each([each for each in given if isinstance(each, RunConfig)], server))
    outcomes = [next(resolved) if isinstance(each, RunConfig) else each for each in given]
    configs = [outcome for outcome in outcomes if isinstance(outcome, RunConfig)]
    if len(configs) < len(outcomes):
        raise UsageError(_refusals(sweep.where, settings, outcomes))
    first: dict[str, PlannedRun] = {}  # first run of each configuration; its settings describe all seeds
    for each, config in zip(settings, configs, strict=True):
        first.setdefault(config.digest, PlannedRun(settings=each, config=config))
    names = [option.name for option in RanksConfig.options()]
    ranks = {digest: short_digest([getattr(run.config, name) for name in names]) for digest, run in first.items()}
    placements = list(dict.fromkeys(ranks.values()))
    ordered: dict[str, PlannedRun] = {}
    for seed in sweep.seeds or [RunConfig.seed]:
        order = {digest: short_digest([sweep.digest, seed, number]) for number, digest in enumerate(first)}
        for digest in sorted(first, key=lambda digest: (placements.index(ranks[digest]), order[digest])):
            config = first[digest].config.changed(seed=seed)
            ordered.setdefault(config.digest, dataclasses.replace(first[digest], config=config))
    return list(ordered.values())


def _options(settings: Settings) -> RunConfig:
    return RunConfig(**with_recipe(settings))


def _refusals(where: str, settings: list[Settings], outcomes: Sequence[RunConfig | UsageError]) -> str:
    """Return an error message with one line per reason: the options that the refused runs share, then the reason."""
    shared: dict[str, Settings] = {}
    for each, outcome in zip(settings, outcomes, strict=True):
        if isinstance(outcome, UsageError):
            before = shared.get(str(outcome), each)
            shared[str(outcome)] = {name: value for name, value in before.items() if each.get(name) == value}
    lines = [f"{table_text(options) or '[base]'}: {reason}" for reason, options in shared.items()]
    return "\n  ".join([f"{where} has configurations that are not possible, so nothing was started:", *lines])
