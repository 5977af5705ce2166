"""Collect the origin of the rows: machines, versions and command lines."""

from __future__ import annotations

import collections
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.core.rows import Warn
from bench.report.configurations import format_value
from bench.report.store import Row, collect_runs
from bench.report.tables import Cell, Column, Table

_MACHINE = ("host", "cpu", "device", "threads", "torch_version", "kernels", "git_sha", "git_dirty")


def machines(rows: Sequence[Row]) -> Table:
    """Return a table with one row per machine and version of the code, and the number of runs."""
    groups = collections.Counter(tuple(run[name] for name in _MACHINE) for run in collect_runs(rows))
    return Table(
        title="Machines and versions",
        columns=[Column(heading=name, align="left", priority=int(name != "host")) for name in _MACHINE]
        + [Column(heading="runs")],
        rows=[
            [
                *(Cell(text=format_value(name, value)) for name, value in zip(_MACHINE, values, strict=True)),
                Cell(text=str(num_runs)),
            ]
            for values, num_runs in groups.items()
        ],
    )


def environments(files: Sequence[Path], warn: Warn) -> list[dict[str, Any]]:
    """Read the environment.json of each run; files that cannot be read are skipped with a warning."""
    return [found for file in files if (found := _environment(file, warn)) is not None]


def _environment(file: Path, warn: Warn) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        warn(f"{file} is left out: {error}")
        return None
    if not isinstance(found, dict):
        warn(f"{file} is left out: it is not an environment.json of bench")
        return None
    return found


def commands(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the distinct command lines of the runs, quoted for a shell."""
    lines = (["bench", *map(str, each["command"][1:])] for each in found if isinstance(each.get("command"), list))
    return list(dict.fromkeys(map(shlex.join, lines)))


def versions(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the distinct combinations of system, Python and package versions."""
    return list(dict.fromkeys(", ".join(_versions(each)) for each in found))


def _versions(environment: dict[str, Any]) -> Iterator[str]:
    yield str(environment.get("system", "unknown system"))
    yield f"Python {environment.get('python', 'unknown')}"
    packages = environment.get("packages")
    if isinstance(packages, dict):
        yield from (f"{name} {version}" for name, version in packages.items())
