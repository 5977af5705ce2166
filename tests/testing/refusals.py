"""Walk tables of refusals: each applies to some choice and names it in a sentence, and what it advises is possible."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence, Set
from typing import Any

import pytest

from bench.core import registry, spec
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.launch.plan import plan
from collectives.options import Spec, value_text
from collectives.refusals import Refused


def shown(choice: dict[str, Any]) -> str:
    return " ".join(str(value).rpartition("/")[2] for value in choice.values())


def refused(choice: dict[str, Any]) -> tuple[str, Refused]:
    """Return the sentence that the user reads, and the refusal."""
    with pytest.raises(UsageError) as raised:
        plan(RunConfig(**choice))
    cause = raised.value.__context__
    assert isinstance(cause, Refused), cause
    return str(raised.value), cause


def taking(choice: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return the choice with what a refusal advises."""
    changed = dict(choice)
    for name, value in change.items():
        field, _, option = name.partition(".")
        if option:
            asked = Spec.parse(changed[field])
            options = {each: text for each, text in asked.options.items() if each != option}
            changed[field] = str(Spec(asked.name, options | ({} if value is None else {option: value_text(value)})))
        else:
            changed[field] = value
    return {name: value for name, value in changed.items() if value is not None}


def names_of(choice: dict[str, Any]) -> set[str]:
    """Return how a sentence can name what was chosen: options, components, and options of components."""
    names = {f"--{name.replace('_', '-')}" for name in choice}
    for text in (text for name, text in choice.items() if f"{name}s" in registry.KINDS or name == "strategy"):
        asked = spec.parse(text)
        names |= {asked.name, *(f"{option}=" for option in asked.options)}
    return names


def check_choice(choice: dict[str, Any]) -> None:
    """Check that a choice is refused in a sentence that names it, and that every advised change makes it legal."""
    sentence, cause = refused(choice)
    assert "\n" not in sentence
    assert any(name in cause.refusal.reason for name in names_of(choice)), sentence
    assert cause.refusal.advice
    for change in cause.refusal.advice:
        plan(RunConfig(**taking(choice, dict(change))))


def check_complete(choices: Sequence[dict[str, Any]], tables: Mapping[str, int], never: Set[tuple[str, int]]) -> None:
    """Check that every refusal of some tables applies to one of the choices.

    Args:
        choices: what is refused.
        tables: qualified names of the functions that return the tables, each with the number of refusals at its end
            that belong to another table.
        never: table and place of the refusals that no choice can reach.
    """
    fired: dict[str, set[int]] = collections.defaultdict(set)
    sizes: dict[str, int] = {}
    for choice in choices:
        _, cause = refused(choice)
        fired[cause.table].add(cause.number)
        sizes[cause.table] = min(cause.size, sizes.get(cause.table, cause.size))  # kfac's includes that of its inner
    assert set(tables) <= set(sizes)
    expected = {(name, number) for name, size in sizes.items() for number in range(size - tables.get(name, 0))} - never
    assert {(name, number) for name, numbers in fired.items() for number in numbers} >= expected
