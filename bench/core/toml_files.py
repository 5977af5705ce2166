"""Read and check TOML files that a user writes; every mistake is reported in one sentence."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.core.errors import UsageError
from bench.core.files import check_regular
from collectives.options import did_you_mean


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the content of a TOML file.

    Args:
        path: the file.
        what: kind of file, for messages: "cluster file".

    Raises:
        UsageError: the file cannot be read, or is not TOML.
    """
    check_regular(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"the {what} {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number too long, nested too deeply
        raise UsageError(f"{path} is not TOML: {error}") from None


def tables(content: Mapping[str, Any], name: str, *, where: str) -> list[Mapping[str, Any]]:
    """Return the tables under the heading [[name]]; an empty list if there are none.

    Raises:
        UsageError: the key `name` holds something else.
    """
    found = content.get(name, [])
    if not (isinstance(found, list) and all(isinstance(table, dict) for table in found)):
        raise UsageError(f"{where}: write each {name} as its own table under the heading [[{name}]]")
    return found


def refuse_unknown(table: Mapping[str, Any], known: Iterable[str], *, where: str) -> None:
    """Refuse keys that are not known.

    Raises:
        UsageError: "x.toml: there is no 'hots' (did you mean 'host'?); known are ...".
    """
    known = tuple(known)
    for key in table:
        if key not in known:
            raise UsageError(f"{where}: there is no '{key}'{did_you_mean(key, known)}; known are {', '.join(known)}")


def whole_number(value: object, *, where: str) -> int:
    """Check that a value is a whole number of at least 1, and return it.

    Raises:
        UsageError: "x.toml: count=0 is not possible; give a whole number of at least 1".
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{where}={value!r} is not possible; give a whole number of at least 1")
    return value


def text(table: Mapping[str, Any], key: str, default: str | None, *, where: str) -> str:
    """Return the text under a key.

    Raises:
        UsageError: the value is not a text, or is missing and there is no default.
    """
    value = table.get(key, default)
    if value is None:
        raise UsageError(f'{where} has no {key}; add a line like {key} = "..."')
    if not (isinstance(value, str) and value.strip()):
        raise UsageError(f'{where}: {key}={value!r} is not a text; write it like {key} = "..."')
    return value
