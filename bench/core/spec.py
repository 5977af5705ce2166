"""Parse component specs such as ``topk:ratio=0.01``, build the components they name, and write components as specs."""

import contextlib
from collections.abc import Iterator
from typing import Any

from bench.core import registry
from bench.core.errors import UsageError
from collectives.options import Incompatible, OptionError, Options, Spec


def split_list(text: str) -> list[str]:
    """Split a list such as ``none,topk:ratio=0.01,value_dtype=fp32`` into spec texts, two in this example.

    An item ``key=value`` without a component name is an option of the spec before it.

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
    """Turn an `OptionError` of the block into a `UsageError` with the same message, which is shown to the user.

    Raises:
        UsageError: the block raised an `OptionError`: an option is not possible, or components do not work together.
    """
    try:
        yield
    except OptionError as error:
        raise UsageError(str(error)) from None


def parse(text: str) -> Spec:
    """Parse a spec text into the component's name and options.

    Raises:
        UsageError: the text is not of the form ``name:key=value,key=value``.
    """
    with usage_errors():
        return Spec.parse(text)


def build(kind: str, text: str) -> Any:
    """Build the component that a spec text names, an instance of the kind's base class, with validated options.

    Args:
        kind: kind of the component, e.g. ``compressors``.
        text: the spec, e.g. ``topk:ratio=0.001`` or ``path/net.py:build:width=64``.

    Raises:
        UsageError: the component or an option is unknown, or a value is out of range.
    """
    name, _, function = text.partition(":")
    is_known = kind not in registry.FROM_FUNCTIONS or name in registry.entries(kind)
    if function.isidentifier() and name.isidentifier() and not is_known:
        raise UsageError(
            f"there is no {registry.KINDS[kind].singular} '{name}'; a function in your own file is named "
            f"{name}.py:{function}"
        )
    spec = parse(text)
    component = registry.load(kind, spec.name)
    try:
        if spec.is_function:
            with usage_errors():
                return component.from_text(spec.options)
        entry = registry.entries(kind)[spec.name]
        with registry.blaming_provider(registry.KINDS[kind].singular, entry, passing=(OptionError,)):
            return component.from_text(spec.options)
    except Incompatible as error:  # its message says which components would work together
        raise UsageError(str(error)) from None
    except OptionError as error:
        raise UsageError(f"{error}; `bench list {kind} --long` shows every option with its range") from None


def full_text(component: Options) -> str:
    """Return a component as text such as ``topk:ratio=0.1``, with every option, for the experiment's identity."""
    return str(Spec(component.component_name, component.option_texts()))
