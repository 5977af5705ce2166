"""TOML files that a user writes: read, and checked word by word, with one sentence for what is wrong."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.core.errors import UsageError
from bench.core.files import check_regular
from collectives.options import did_you_mean


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The file's content.

    Args:
        path: the file.
        what: what it is, for messages: "cluster file".

    Raises:
        UsageError: it cannot be read, or is not TOML.
    """
    check_regular(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"the {what} {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number without end, nested without end
        raise UsageError(f"{path} is not TOML: {error}") from None


def tables(content: Mapping[str, Any], name: str, *, where: str) -> list[Mapping[str, Any]]:
    """The tables under the heading [[name]]; none where it is absent.

    Raises:
        UsageError: something else stands there.
    """
    found = content.get(name, [])
    if not (isinstance(found, list) and all(isinstance(table, dict) for table in found)):
        raise UsageError(f"{where}: write each {name} as its own table under the heading [[{name}]]")
    return found


def refuse_unknown(table: Mapping[str, Any], known: Iterable[str], *, where: str) -> None:
    """Refuse keys that mean nothing.

    Raises:
        UsageError: "x.toml: there is no 'hots' (did you mean 'host'?); known are ...".
    """
    known = tuple(known)
    for key in table:
        if key not in known:
            raise UsageError(f"{where}: there is no '{key}'{did_you_mean(key, known)}; known are {', '.join(known)}")


def whole_number(value: object, *, where: str) -> int:
    """A count.

    Raises:
        UsageError: "x.toml: count=0 is not possible; give a whole number of at least 1".
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{where}={value!r} is not possible; give a whole number of at least 1")
    return value


def text(table: Mapping[str, Any], key: str, default: str | None, *, where: str) -> str:
    """A text under a key.

    Raises:
        UsageError: it is no text, or missing and there is no default.
    """
    value = table.get(key, default)
    if value is None:
        raise UsageError(f'{where} has no {key}; add a line like {key} = "..."')
    if not (isinstance(value, str) and value.strip()):
        raise UsageError(f'{where}: {key}={value!r} is not a text; write it like {key} = "..."')
    return value
