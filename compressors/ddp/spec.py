"""Components from texts: "group_topk:ratio=0.01" without the registry of `bench`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect

from collectives.options import OptionError, Options


def built(room: str, text: str) -> Options:
    """Return the component that a text names, its options checked.

    Args:
        room: its package, "compressors" or "collectives".
        text: name:key=value,key=value

    Raises:
        OptionError: no component of that name, or options that it does not have.
    """
    name, _, rest = text.partition(":")
    known = importlib.util.find_spec(f"{room}.{name}") is not None
    for member in vars(importlib.import_module(f"{room}.{name}")).values() if known else ():
        if inspect.isclass(member) and issubclass(member, Options) and member.component_name == name:
            options = [item.partition("=") for item in rest.split(",") if item]
            return member.from_text({key: value for key, _, value in options})
    raise OptionError(f"there is no '{name}' among the {room}; `bench list {room}` shows them all")
