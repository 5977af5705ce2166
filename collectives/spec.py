"""Spec: how a user names a component and its options, ``name:key=value,key=value``, and the component it names."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Self, TypeVar

from collectives.options import OptionError, Options, did_you_mean

T = TypeVar("T", bound=Options)


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
            OptionError: the text is not of that form.
        """
        name, colon, rest = text.strip().partition(":")
        options: dict[str, str] = {}
        for item in rest.split(",") if colon else []:
            key, equals, value = (part.strip() for part in item.partition("="))
            if not (key and equals and value):
                raise OptionError(f"'{text}' is malformed at '{item}'; write name:key=value,key=value")
            if key in options:
                raise OptionError(f"'{text}' gives {key} twice; give it once")
            options[key] = value
        if not name:
            raise OptionError(f"'{text}' names no component; write name:key=value,key=value")
        return cls(name, options)

    def __str__(self) -> str:
        items = ",".join(f"{key}={value}" for key, value in sorted(self.options.items()))
        return f"{self.name}:{items}" if items else self.name


def build(package: str, base: type[T], text: str) -> T:
    """The component that a spec text names, its options validated.

    Args:
        package: where components lie, e.g. ``collectives``.
        base: what they derive from, e.g. `Collective`.
        text: the spec, e.g. ``server:placement=sharded``.

    Raises:
        OptionError: unknown component or option, or a value out of range; the message names the nearest one.
    """
    spec = Spec.parse(text)
    component = _component(package, base, spec.name)
    if component is None:
        near = did_you_mean(spec.name, component_names(package, base))
        raise OptionError(f"there is no {base.__name__.lower()} '{spec.name}'{near}")
    return component.from_text(spec.options)


def component_names(package: str, base: type[Options]) -> list[str]:
    """All components of a package, sorted; imports every one."""
    return [name for name in _modules(package) if _component(package, base, name)]


def _modules(package: str) -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__))


def _component(package: str, base: type[T], name: str) -> type[T] | None:
    """The class that is named after its file; None where there is no such file, or it holds something else."""
    if name not in _modules(package):
        return None
    module = importlib.import_module(f"{package}.{name}")
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, base)]
    return next((cls for cls in classes if cls.__name__.lower() == name.replace("_", "")), None)
