"""Shell completion of component names, which reads the registry in milliseconds and without torch."""

from __future__ import annotations

from collections.abc import Callable

from bench.core import registry


def complete(kind: str) -> Callable[[str], list[tuple[str, str]]]:
    """Return a completer for one kind of component, which gives (name, one-line description) of those that match."""

    def completer(incomplete: str) -> list[tuple[str, str]]:
        return [
            (entry.name, entry.description)
            for entry in registry.entries(kind).values()
            if entry.name.startswith(incomplete)
        ]

    return completer


def complete_list(kind: str) -> Callable[[str], list[tuple[str, str]]]:
    """Return a completer like that of `complete`, for the last of several names separated by commas."""
    completer = complete(kind)

    def last_completer(incomplete: str) -> list[tuple[str, str]]:
        before, comma, last = incomplete.rpartition(",")
        return [(f"{before}{comma}{name}", description) for name, description in completer(last)]

    return last_completer
