"""Parse component specs such as ``topk:ratio=0.01``, build the components they name, and write components as specs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from bench.core import registry
from bench.core.errors import UsageError
from collectives.options import OptionError, Options, Spec


def split_list(text: str) -> list[str]:
    """Split ``none,topk:ratio=0.01,value_dtype=fp32`` into spec texts; a bare ``key=value`` belongs to the spec before.

    Raises:
        UsageError: the text names no component.
    """
    specs: list[str] = []
    for item in (part.strip() for part in text.split(",")):
        if specs and ":" in specs[-1] and "=" in item.partition(":")[0]:
            specs[-1] += f",{item}"
        elif item:
            specs.append(item)
    if not specs:
        raise UsageError(f"'{text}' names no component; write name,name:key=value,key=value")
    return specs


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Show the sentence of an option that is not possible, or of components that do not work together, to the user.

    Raises:
        UsageError: the block raised an `OptionError`, such as `Incompatible`.
    """
    try:
        yield
    except OptionError as error:
        raise UsageError(str(error)) from None


def parse(text: str) -> Spec:
    """Return the name and the options in a spec text.

    Raises:
        UsageError: the text has another form.
    """
    with usage_errors():
        return Spec.parse(text)


def build(kind: str, text: str) -> Any:
    """Return the component that a spec text names, of the kind's base class, with its options validated.

    Args:
        kind: kind of the component, e.g. ``compressors``.
        text: the spec, e.g. ``topk:ratio=0.001``.

    Raises:
        UsageError: unknown component or option, or a value out of range.
    """
    spec = parse(text)
    component = registry.load(kind, spec.name)
    entry = registry.entries(kind)[spec.name]
    try:
        with registry.blaming_provider(registry.KINDS[kind].singular, entry, passing=(OptionError,)):
            return component.from_text(spec.options)
    except OptionError as error:
        raise UsageError(f"{error}; `bench list {kind} --long` shows every option with its range") from None


def short_text(component: Options) -> str:
    """Return the spec with only the options that differ from their default, sorted, as CSV files show it."""
    return str(Spec(component.component_name, component.option_texts(only_changed=True)))


def full_text(component: Options) -> str:
    """Return the spec with every option, which is part of an experiment's identity."""
    return str(Spec(component.component_name, component.option_texts()))
