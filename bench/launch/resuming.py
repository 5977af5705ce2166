"""Runs that go on where they stopped: which can, and how a folder is made ready for it."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path

from bench.core.checkpoints import Checkpoints
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.core.locks import locked
from bench.core.run_folder import RunFolder, read_json, write_json


def check_left(folder: RunFolder) -> None:
    """See that nobody is at the run; what its folder holds says nothing before its end.

    Raises:
        UsageError: somebody is.
    """
    if folder.path.is_dir():
        with locked(folder.path) as is_held:
            if not is_held:
                raise UsageError(f"{folder.path} is still under way; wait for its end")


def configuration_of(folder: RunFolder) -> RunConfig:
    """The configuration of a run that can go on from its last checkpoint.

    Raises:
        UsageError: it cannot, and what to do.
    """
    path = folder.path
    if not folder.config.is_file():
        raise UsageError(f"{path} is no run folder (it holds no config.json); give one below results/runs")
    if (read_json(folder.status) or {}).get("status") == "ok":
        raise UsageError(f"{path} came to its end; begin another with bench run")
    try:
        config = RunConfig.from_json(folder.config)
    except UsageError as error:
        raise UsageError(f"{error}; go on with the version that began the run, or begin it anew") from None
    checkpoints = Checkpoints(folder)
    if not (steps := checkpoints.steps()):
        advice = "begin the run anew" + ("" if config.checkpoint_every else " with --checkpoint-every")
        raise UsageError(f"{path} holds no checkpoint; {advice}")
    checkpoints.check(steps[0], config)
    return config


def change_ranks(folder: RunFolder, config: RunConfig, waiting: str) -> None:
    """Let the run go on with the number of ranks of a configuration; the one that it had is kept beside it.

    Args:
        folder: the run's.
        config: from `resolve.with_ranks`.
        waiting: sum or drop: what becomes of what the ranks have not sent yet.
    """
    checkpoints = Checkpoints(folder)
    manifest = checkpoints.manifest(checkpoints.steps()[0])
    told = read_json(folder.resume) or {"resumes": 0}
    write_json(folder.resume, told | {"waiting": waiting, "digest_before": manifest.digest})
    before = folder.config.with_name(f"config-before-{told['resumes'] + 1}.json")
    before.write_text(folder.config.read_text(encoding="utf-8"), encoding="utf-8")
    write_json(folder.config, dataclasses.asdict(config))


def ask_anew(folder: RunFolder, config: RunConfig) -> None:
    """Let a run go on with what identifies none, its timeout say, as this configuration of the same digest has it."""
    write_json(folder.config, dataclasses.asdict(config))


def refusal(folder: RunFolder) -> str | None:
    """Why a run cannot go on, or has come to its end, a sentence; None where it can."""
    try:
        configuration_of(folder)
    except UsageError as error:
        return str(error)
    return None


def last_step(folder: RunFolder) -> int | None:
    """The step from which a run can go on; None where it cannot, or has come to its end."""
    return None if refusal(folder) else Checkpoints(folder).steps()[0]


def prepare_folder(folder: RunFolder) -> None:
    """Put away what a job that ended has left, and count that another one goes on; no process may be left of it."""
    told = read_json(folder.resume) or {"resumes": 0}
    attempt = told["resumes"] + 1
    write_json(folder.resume, told | {"resumes": attempt})
    for path in (folder.status, folder.progress):
        path.unlink(missing_ok=True)
    for left in (folder.errors, folder.rendezvous):
        shutil.rmtree(left, ignore_errors=True)
    folder.errors.mkdir()
    _put_away(folder.logs, attempt)
    folder.logs.mkdir()


def _put_away(logs: Path, attempt: int) -> None:
    """The logs of the job before become a folder of their own, with the first number that is free."""
    if logs.exists():
        names = (logs.with_name(f"logs-before-{number}") for number in itertools.count(attempt))
        logs.replace(next(name for name in names if not name.exists()))
