"""Specs on the command line: lists of them, and the components that they name, third parties' included."""

from __future__ import annotations

from bench.core import registry
from bench.core.errors import UsageError
from collectives.options import OptionError, Options, Spec


def split_list(text: str) -> list[str]:
    """``none,topk:ratio=0.01,value_dtype=fp32`` -> two spec texts; a bare ``key=value`` belongs to the spec before it.

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


def parse(text: str) -> Spec:
    """The name and the options in a spec text.

    Raises:
        UsageError: the text is not of that form.
    """
    try:
        return Spec.parse(text)
    except OptionError as error:
        raise UsageError(str(error)) from None


def build(kind: str, text: str) -> Options:
    """The component that a spec text names, its options validated.

    Args:
        kind: the room, e.g. ``compressors``.
        text: the spec, e.g. ``topk:ratio=0.001``.

    Raises:
        UsageError: unknown component or option, or a value out of range.
    """
    spec = parse(text)
    component = registry.load(kind, spec.name)
    try:
        with registry.blaming_provider(kind, spec.name, passing=(OptionError,)):
            return component.from_text(spec.options)
    except OptionError as error:
        raise UsageError(f"{error}; `bench list {kind} --long` shows every option with its range") from None


def short_text(component: Options) -> str:
    """The spec with only the options that differ from their default, sorted: what the CSV shows."""
    return str(Spec(component.component_name, component.option_texts(only_changed=True)))


def full_text(component: Options) -> str:
    """The spec with every option filled in: what identifies an experiment."""
    return str(Spec(component.component_name, component.option_texts()))
