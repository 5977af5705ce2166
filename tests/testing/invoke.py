"""Run `bench` in a test: in this process for a sentence and an exit code, as a program for a job."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import typer.main
import typer.testing

from bench.cli.app import shown_error

# Otherwise the runner would read the signatures of all commands for every call, which takes longer than most calls.
vars(typer.testing)["_get_command"] = functools.cache(typer.main.get_command)
REPOSITORY = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Answer:
    """Exit code and output of a command."""

    code: int
    out: str
    error: str


def invoke(*arguments: str) -> Answer:
    """Run a command in this process; errors become exit codes as in `bench.cli.app.main`."""
    from bench.cli.app import app

    result = typer.testing.CliRunner().invoke(app, list(arguments))
    if result.exception is not None and (told := shown_error(result.exception)):
        return Answer(told.exit_code, result.stdout, str(told))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


def commands() -> dict[str, Any]:
    """Return all commands of `bench` by name, including those of extensions."""
    from bench.cli.app import app

    group: Any = typer.main.get_command(app)
    return {name: group.get_command(None, name) for name in group.list_commands(None)}


def start(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
    """Start `bench` as a program with the packages of this checkout, in any working directory."""
    path = [str(REPOSITORY), *filter(None, [variables.get("PYTHONPATH", os.environ.get("PYTHONPATH"))])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "bench", *arguments],
        cwd=cwd,
        env=os.environ | {"COLUMNS": "200"} | variables | {"PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def execute(*arguments: str, cwd: Path | None = None, **variables: str) -> Answer:
    """Run `bench` as a program to its end; its answer is without the lines that it prints if the machine is slow."""
    process = start(*arguments, cwd=cwd, **variables)
    out, error = process.communicate()
    return Answer(process.returncode, out, without_waiting(error))


def without_waiting(error: str) -> str:
    """Return what a program wrote to stderr, without the lines of `bench.core.waiting`."""
    return re.sub(r"^bench [a-z-]+: .* \([0-9.]+ s\)\n", "", error, flags=re.MULTILINE)


def decoys(folder: Path) -> Path:
    """Write a user's modules with the names of our packages to the folder, and return it."""
    (folder / "collectives").mkdir()
    for module in ("bench.py", "collectives/__init__.py", "torch.py"):
        (folder / module).write_text("raise ImportError('a module of the working directory')", encoding="utf-8")
    return folder


def processes_of(folder: Path) -> dict[psutil.Process, list[str]]:
    """Return the processes that still work on a run, with the files of its folder that each has open."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            files = [file.path for file in process.open_files() if Path(file.path).is_relative_to(folder)]
            if files or any(str(folder) in word for word in process.info["cmdline"] or []):
                found[process] = files
    return found


def only_run(out: Path) -> Path:
    """Return the only run folder below `out`."""
    (folder,) = out.iterdir()
    return folder


def rows(folder: Path, name: str = "metrics.csv") -> list[dict[str, str]]:
    """Return the rows of a run, with cells as text."""
    with (folder / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def status(folder: Path) -> dict[str, Any]:
    """Return the run's `status.json`."""
    content: dict[str, Any] = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    return content
