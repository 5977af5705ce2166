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


def complete_list(kind: str) -> Callable[[str], list[tuple[str, str]]]:
    """As `complete`, for the last of several names separated by commas."""
    completer = complete(kind)

    def last_completer(incomplete: str) -> list[tuple[str, str]]:
        before, comma, last = incomplete.rpartition(",")
        return [(f"{before}{comma}{name}", description) for name, description in completer(last)]

    return last_completer
