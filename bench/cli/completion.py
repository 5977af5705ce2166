"""Shell completion of component names; reads the registry, so it costs milliseconds and no torch."""

from __future__ import annotations

from collections.abc import Callable

from bench.core import registry


def complete(kind: str) -> Callable[[str], list[tuple[str, str]]]:
    """A completer for one room: (name, one-line description) of every component that starts with what was typed."""

    def completer(incomplete: str) -> list[tuple[str, str]]:
        return [
            (entry.name, entry.description)
            for entry in registry.entries(kind).values()
            if entry.name.startswith(incomplete)
        ]

    return completer
