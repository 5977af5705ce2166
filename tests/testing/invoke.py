"""Running `bench` in a test: in this process for a sentence and an exit code, as a program for a job."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from bench.core.errors import BenchError


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command did."""

    code: int
    out: str
    error: str


def invoke(*arguments: str) -> Answer:
    """Run a command in this process; errors become exit codes as in `bench.cli.app.main`."""
    from bench.cli.app import app

    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, BenchError):
        return Answer(result.exception.exit_code, result.stdout, str(result.exception))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start `bench` as a program."""
    return subprocess.Popen(
        [sys.executable, "-m", "bench", *arguments],
        env=os.environ | {"COLUMNS": "200"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def execute(*arguments: str, **variables: str) -> Answer:
    """Run `bench` as a program to its end."""
    process = start(*arguments, **variables)
    out, error = process.communicate(timeout=240)
    return Answer(process.returncode, out, error)


def only_run(out: Path) -> Path:
    """The one run folder below `out`."""
    (folder,) = out.iterdir()
    return folder


def rows(folder: Path, name: str = "metrics.csv") -> list[dict[str, str]]:
    """The rows of a run, cells as texts."""
    with (folder / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def status(folder: Path) -> dict[str, Any]:
    """The run's `status.json`."""
    content: dict[str, Any] = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    return content
