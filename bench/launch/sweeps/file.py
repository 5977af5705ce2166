"""The sweep file: which runs a user asks for, in options of `bench run`.

`[base]` holds what all runs share, and `[matrix]` lists, every combination of which is a configuration. Each
`[[method]]` holds options that belong together, as a compressor and its learning rate, and is combined with all of the
matrix. Each `[[include]]` is one more configuration, each `[[exclude]]` takes those out of the matrix that agree with
it. Every configuration is run with every seed (`seeds`, in `[base]` or `[matrix]`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.core.config.configuration import short_digest
from bench.core.config.job import MACHINES
from bench.core.config.run import RunConfig
from bench.core.config.seeds import parse_seeds, seeds_text
from bench.core.errors import UsageError
from bench.core.toml_files import read_toml, refuse_unknown, tables

Options = dict[str, Any]
"""Values by the name of the option that they are given for."""

Lists = dict[str, list[Any]]
"""Several values by the name of their option."""

_SEED_KEYS = ("seed", "seeds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepFile:
    """What stands in a sweep file.

    Attributes:
        where: the file, for messages.
        base: what all runs share.
        seeds: of every configuration; empty where the file names none.
        matrix: whose combinations are configurations.
        method: each is combined with all of the matrix.
        include: further configurations.
        exclude: what is left out of the matrix.
        tune: whose combinations `bench tune` tries for every configuration.
    """

    where: str
    base: Options
    seeds: list[int] = dataclasses.field(default_factory=list)
    matrix: Lists = dataclasses.field(default_factory=dict)
    method: list[Options] = dataclasses.field(default_factory=list)
    include: list[Options] = dataclasses.field(default_factory=list)
    exclude: list[Options] = dataclasses.field(default_factory=list)
    tune: Lists = dataclasses.field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Ten hex digits over what the file says."""
        return short_digest({**dataclasses.asdict(self), "where": ""})

    def configurations(self) -> list[Options]:
        """What each configuration adds to `base`, or takes another value for.

        Raises:
            UsageError: nothing is left, or something is excluded that is not there.
        """
        only_included = bool(self.include) and not (self.matrix or self.method)
        in_matrix = [] if only_included else combinations(self.matrix)
        combined = [options | method for options in in_matrix for method in self.method or [{}]]
        for table in self.exclude:
            kept = [options for options in combined if not table.items() <= (self.base | options).items()]
            if len(kept) == len(combined):
                raise UsageError(f"{self.where} [[exclude]]: {table_text(table)} excludes nothing; correct it")
            combined = kept
        if not combined + self.include:
            raise UsageError(f"{self.where} excludes every configuration; take an [[exclude]] out")
        return combined + self.include


def combinations(lists: Lists) -> list[Options]:
    """Every way to take one value from each list."""
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def table_text(options: Mapping[str, Any]) -> str:
    """Options in one line, as they are shown to people."""
    return ", ".join(f"{name} = {value}" for name, value in options.items())


def read_sweep(path: Path, *further: str) -> SweepFile:
    """Read a sweep file.

    Args:
        path: the file.
        further: headings that it may have beside its own: "tune".

    Raises:
        UsageError: it is no sweep file; values of options are not checked here.
    """
    content = read_toml(path, "sweep file")
    refuse_unknown(content, ("base", "matrix", "method", "include", "exclude", *further), where=str(path))
    base, base_seeds = _without_seeds(_table(content, "base", path), path)
    matrix, matrix_seeds = _without_seeds(_table(content, "matrix", path), path)
    if base_seeds and matrix_seeds:
        raise UsageError(f"{path} gives seeds in [base] and in [matrix]; give them once")
    sweep = SweepFile(
        where=str(path),
        base=_single(base, f"{path} [base]"),
        seeds=base_seeds + matrix_seeds,
        matrix=_several(matrix, f"{path} [matrix]"),
        method=[_single(table, f"{path} [[method]]") for table in tables(content, "method", where=str(path))],
        include=[_single(table, f"{path} [[include]]") for table in tables(content, "include", where=str(path))],
        exclude=[_single(table, f"{path} [[exclude]]") for table in tables(content, "exclude", where=str(path))],
        tune=_several(_table(content, "tune", path), f"{path} [tune]"),
    )
    if both := sweep.base.keys() & sweep.matrix.keys():
        raise UsageError(f"{path} gives {', '.join(sorted(both))} in [base] and in [matrix]; give it once")
    if both := sweep.matrix.keys() & {name for options in sweep.method for name in options}:
        raise UsageError(f"{path} gives {', '.join(sorted(both))} in [matrix] and in [[method]]; give it once")
    return sweep


@functools.cache
def options_by_key() -> dict[str, str]:
    """An option's name by its key in a file: the flag with underscores.

    A sweep runs on this machine, and seeds have their own place.
    """
    return {
        option.flag_name.removeprefix("--").replace("-", "_"): option.name
        for option in RunConfig.options()
        if option.flag and option.flag.panel != MACHINES and option.name != "seed"
    }


def _table(content: Mapping[str, Any], heading: str, path: Path) -> Options:
    """The table under [heading], its keys with underscores."""
    table = content.get(heading, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: write {heading} as a table under the heading [{heading}]")
    return {key.replace("-", "_"): value for key, value in table.items()}


def _without_seeds(table: Options, path: Path) -> tuple[Options, list[int]]:
    given = [table[key] for key in _SEED_KEYS if key in table]
    if len(given) > 1:
        raise UsageError(f"{path} gives seed and seeds; give one of them")
    rest = {key: value for key, value in table.items() if key not in _SEED_KEYS}
    texts = (seeds_text(value) if isinstance(value, list) else str(value) for value in given)
    return rest, [seed for text in texts for seed in parse_seeds(text, f"{path}: seeds =")]


def _single(table: Mapping[str, Any], where: str) -> Options:
    options = _by_name(table, where)
    for name, value in options.items():
        if isinstance(value, (list, dict)):
            raise UsageError(f"{where}: {name} = {value} is not one value; lists stand under [matrix]")
    return options


def _several(table: Mapping[str, Any], where: str) -> Lists:
    lists = _by_name(table, where)
    for name, values in lists.items():
        if not (isinstance(values, list) and values):
            raise UsageError(f"{where}: {name} = {values} is no list of values; write {name} = [..., ...]")
    return lists


def _by_name(table: Mapping[str, Any], where: str) -> Options:
    spelled = {key.replace("-", "_"): value for key, value in table.items()}
    names = options_by_key()
    refuse_unknown(spelled, names, where=where)
    return {names[key]: value for key, value in spelled.items()}
