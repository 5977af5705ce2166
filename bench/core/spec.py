"""Spec: how a user names a component and its options, ``name:key=value,key=value``."""

from __future__ import annotations

import dataclasses
from typing import Self

from bench.core import registry
from bench.core.errors import UsageError
from collectives.options import OptionError, Options


@dataclasses.dataclass(frozen=True)
class Spec:
    """A component's name and the option texts given for it.

    Attributes:
        name: the component, e.g. ``topk``.
        options: the options as they were written, e.g. ``{"ratio": "0.001"}``.
    """

    name: str
    options: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``topk:ratio=0.001,value_dtype=fp32``.

        Raises:
            UsageError: the text is not of that form.
        """
        name, colon, rest = text.strip().partition(":")
        options: dict[str, str] = {}
        for item in rest.split(",") if colon else []:
            key, equals, value = (part.strip() for part in item.partition("="))
            if not (key and equals and value):
                raise UsageError(f"'{text}' is malformed at '{item}'; write name:key=value,key=value")
            if key in options:
                raise UsageError(f"'{text}' gives {key} twice; give it once")
            options[key] = value
        if not name:
            raise UsageError(f"'{text}' names no component; write name:key=value,key=value")
        return cls(name, options)

    def __str__(self) -> str:
        items = ",".join(f"{key}={value}" for key, value in sorted(self.options.items()))
        return f"{self.name}:{items}" if items else self.name


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


def build(kind: str, text: str) -> Options:
    """The component that a spec text names, its options validated.

    Args:
        kind: the room, e.g. ``compressors``.
        text: the spec, e.g. ``topk:ratio=0.001``.

    Raises:
        UsageError: unknown component or option, or a value out of range.
    """
    spec = Spec.parse(text)
    component = registry.load(kind, spec.name)
    try:
        return component.from_text(spec.options)
    except OptionError as error:
        raise UsageError(f"{error}; `bench list {kind} --long` shows every option with its range") from None


def short_text(component: Options) -> str:
    """The spec with only the options that differ from their default, sorted: what the CSV shows."""
    return str(Spec(component.component_name, component.option_texts(only_changed=True)))


def full_text(component: Options) -> str:
    """The spec with every option filled in: what identifies an experiment."""
    return str(Spec(component.component_name, component.option_texts()))
