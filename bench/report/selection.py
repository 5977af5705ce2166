"""Selection: which runs take part in a comparison (``--where``), and in which order its rows stand (``--sort``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from bench.core.errors import NothingToCompare, UsageError
from bench.core.schema.cells import from_cell
from bench.core.schema.metrics import METRICS_BY_NAME
from bench.report.columns import COLUMNS_BY_NAME, find_column
from bench.report.configurations import Configuration
from bench.report.formats import NOTHING, format_value
from bench.report.runs import Run
from bench.report.targets import TO_TARGET, Target, mean_need, needs, num_reached

ALSO_OPTIONS = {"collective", "error", "seed", "test_size", "train_size", "warmup_epochs"}
"""Names of columns that are options of some component too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Condition:
    """A column must have a value, or none; a component's bare name stands for it with any options."""

    column: str
    value: Any

    def holds(self, run: Run) -> bool:
        """Whether the run fulfils it."""
        found = run[self.column]
        return bool(found == self.value) or (isinstance(found, str) and found.partition(":")[0] == self.value)


def parse_conditions(text: str) -> list[Condition]:
    """Read ``dataset=digits,compressor=topk:ratio=0.01,skip=norm``: what names no column belongs to the value before.

    So does what names both a column and an option of the component before; the column's condition then goes before it.

    Raises:
        UsageError: a part names no column, or its value does not fit the column.
    """
    parts: list[str] = []
    for part in text.split(","):
        name = part.partition("=")[0].strip()
        is_option = name not in METRICS_BY_NAME or (name in ALSO_OPTIONS and parts and name in _options(parts[-1]))
        if parts and ":" in parts[-1] and is_option:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return [_condition(part) for part in parts]


def _options(condition: str) -> Collection[str]:
    """Of the component that a condition like ``compressor=topk:ratio=0.01`` names; none where there is no such one."""
    from bench.core import registry

    column, _, value = condition.partition("=")
    kinds = {room.singular: kind for kind, room in registry.ROOMS.items()}
    kind, name = kinds.get(column.strip()), value.partition(":")[0].strip()
    if kind is None or name not in registry.entries(kind):
        return ()
    return registry.load(kind, name).option_names()  # brings torch along: only where it is needed


def _condition(text: str) -> Condition:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise UsageError(f"'{text}' is no condition; write --where COLUMN=VALUE, as dataset=digits")
    column = find_column(name)
    try:  # tables show an empty cell as NOTHING
        return Condition(column=column.name, value=from_cell("" if value == NOTHING else value, column.type))
    except ValueError as error:
        raise UsageError(f"--where {text}: {error}") from None


def select(runs: Sequence[Run], conditions: Sequence[Condition]) -> list[Run]:
    """The runs that fulfil every condition.

    Raises:
        NothingToCompare: a condition leaves none (the message says which values there are).
    """
    kept = list(runs)
    for condition in conditions:
        found = dict.fromkeys(run[condition.column] for run in kept)
        kept = [run for run in kept if condition.holds(run)]
        if not kept:
            listing = ", ".join(format_value(condition.column, value) for value in found)
            raise NothingToCompare(
                f"no run has {condition.column} {format_value(condition.column, condition.value)}; there are: {listing}"
            )
    return kept


def in_order_of(name: str | None, candidates: Sequence[Configuration], target: Target) -> list[Configuration]:
    """The candidates by a column, the best first, or in rising order where none is best; what lacks it comes last.

    What is needed until the target stands by the share of seeds that missed it first.

    Raises:
        UsageError: there is no such column.
    """
    if name is None:
        return list(candidates)
    column = COLUMNS_BY_NAME.get(name) or find_column(name)
    sign = -1.0 if column.better == "higher" else 1.0

    def place(candidate: Configuration) -> tuple[bool, Any]:
        if name in TO_TARGET:
            seeds = needs(candidate, name, target)
            mean = mean_need(seeds)
            return mean is None, (1 - num_reached(seeds) / len(seeds), mean.mean) if mean else None
        mean = candidate.estimate(name) if column.better else None
        value = sign * mean.mean if mean else next(iter(candidate.distinct(name)), None)
        return value is None, value

    return sorted(candidates, key=place)
