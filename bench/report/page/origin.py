"""Where rows come from: machines, versions and the commands that were typed."""

from __future__ import annotations

import collections
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.core.rows import Warn
from bench.report.formats import format_value
from bench.report.runs import collect_runs
from bench.report.store import Row
from bench.report.tables import Cell, Column, Table

_MACHINE = ("host", "cpu", "device", "threads", "torch_version", "kernels", "git_sha", "git_dirty")


def machines(rows: Sequence[Row]) -> Table:
    """One row per machine and version of the code, with the number of runs made there."""
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
    """What the environment.json of each run says; a file that cannot be read is left out."""
    return [found for file in files if (found := _environment(file, warn)) is not None]


def _environment(file: Path, warn: Warn) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        warn(f"{file} is left out: {error}")
        return None
    if not isinstance(found, dict):
        warn(f"{file} is left out: it holds no environment")
        return None
    return found


def commands(found: Sequence[dict[str, Any]]) -> list[str]:
    """The command lines behind the runs, each once, as a shell takes them."""
    lines = (["bench", *map(str, each["command"][1:])] for each in found if isinstance(each.get("command"), list))
    return list(dict.fromkeys(map(shlex.join, lines)))


def versions(found: Sequence[dict[str, Any]]) -> list[str]:
    """System, Python and packages behind the runs, each combination once."""
    return list(dict.fromkeys(", ".join(_versions(each)) for each in found))


def _versions(environment: dict[str, Any]) -> Iterator[str]:
    yield str(environment.get("system", "unknown system"))
    yield f"Python {environment.get('python', 'unknown')}"
    packages = environment.get("packages")
    if isinstance(packages, dict):
        yield from (f"{name} {version}" for name, version in packages.items())
