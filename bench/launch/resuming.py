"""Decide whether a run can be resumed from its last checkpoint, and prepare its folder."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path

from bench.core.checkpoints import Checkpoints
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.core.files import locked
from bench.core.run_folder import RunFolder, read_json, write_json


def check_left(folder: RunFolder) -> None:
    """Check that no command is executing the run.

    Raises:
        UsageError: one is.
    """
    if folder.path.is_dir():
        with locked(folder.path) as is_held:
            if not is_held:
                raise UsageError(f"{folder.path} is still running; wait until it ends")


def configuration_of(folder: RunFolder) -> RunConfig:
    """Return the configuration of a run, after checking that it can be resumed from its last checkpoint.

    Raises:
        UsageError: it cannot; the message says what to do.
    """
    path = folder.path
    if not folder.config.is_file():
        raise UsageError(f"{path} is not a run folder (it holds no config.json); give one below results/runs")
    if (read_json(folder.status) or {}).get("status") == "ok":
        raise UsageError(f"{path} is complete, so there is nothing to resume; start a new run with bench run")
    try:
        config = RunConfig.from_json(folder.config)
    except UsageError as error:
        raise UsageError(f"{error}; resume with the version that started the run, or start it again") from None
    checkpoints = Checkpoints(folder)
    if not (steps := checkpoints.steps()):
        advice = "start the run again" + ("" if config.checkpoint_every else " with --checkpoint-every")
        raise UsageError(f"{path} holds no checkpoint; {advice}")
    checkpoints.check(steps[0], config)
    return config


def change_ranks(folder: RunFolder, config: RunConfig, waiting: str) -> None:
    """Store a configuration with another number of ranks for the next resume; keep a copy of the old one beside it.

    Args:
        folder: the run's folder.
        config: from `resolve.with_ranks`.
        waiting: "sum" or "drop", for the residuals that the ranks have not sent yet.
    """
    checkpoints = Checkpoints(folder)
    manifest = checkpoints.manifest(checkpoints.steps()[0])
    resumed = read_json(folder.resume) or {"resumes": 0}
    write_json(folder.resume, resumed | {"waiting": waiting, "digest_before": manifest.digest})
    before = folder.config.with_name(f"config-before-{resumed['resumes'] + 1}.json")
    before.write_text(folder.config.read_text(encoding="utf-8"), encoding="utf-8")
    write_json(folder.config, dataclasses.asdict(config))


def ask_anew(folder: RunFolder, config: RunConfig) -> None:
    """Store a configuration of the same digest for the next resume, with options such as another timeout."""
    write_json(folder.config, dataclasses.asdict(config))


def obstacle_to_resuming(folder: RunFolder) -> str | None:
    """Return a sentence that says why a run cannot be resumed, or None if it can."""
    try:
        configuration_of(folder)
    except UsageError as error:
        return str(error)
    return None


def last_step(folder: RunFolder) -> int | None:
    """Return the step from which a run can be resumed, or None if it cannot."""
    return None if obstacle_to_resuming(folder) else Checkpoints(folder).steps()[0]


def prepare_folder(folder: RunFolder) -> None:
    """Clear the folder for the next job and count one more resume; no process of the old job may be left."""
    resumed = read_json(folder.resume) or {"resumes": 0}
    attempt = resumed["resumes"] + 1
    write_json(folder.resume, resumed | {"resumes": attempt})
    for path in (folder.status, folder.progress):
        path.unlink(missing_ok=True)
    for left in (folder.errors, folder.rendezvous):
        shutil.rmtree(left, ignore_errors=True)
    folder.errors.mkdir()
    _put_away(folder.logs, attempt)
    folder.logs.mkdir()


def _put_away(logs: Path, attempt: int) -> None:
    """Rename the old job's logs to `logs-before-N`, with the first free number N."""
    if logs.exists():
        names = (logs.with_name(f"logs-before-{number}") for number in itertools.count(attempt))
        logs.replace(next(name for name in names if not name.exists()))
