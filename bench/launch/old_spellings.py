"""Refuse options of earlier versions, with the spelling that replaced them."""

from __future__ import annotations

from bench.core.errors import UsageError
from bench.core.spec import parse
from collectives.options import Spec

MOVED_OPTIONS = ("mode", "staleness")


def refuse_old_spelling(collective: str) -> None:
    """Refuse `server:mode=...`; a server that does not wait for all ranks is now a strategy.

    Raises:
        UsageError: the collective has such an option; the message gives the new spelling.
    """
    given = parse(collective)
    moved = {name: text for name, text in given.options.items() if name in MOVED_OPTIONS}
    if given.name != "server" or not moved:
        return
    if moved.get("mode") == "bsp":
        raise UsageError(f"server always waits for all ranks; leave mode=bsp out of --collective {collective}")
    root = {name: text for name, text in given.options.items() if name == "root"}
    raise UsageError(
        f"a server that does not wait is a strategy now: instead of --collective {collective} write "
        f"`bench run --strategy {Spec('async_server', moved | root)}`"
    )
