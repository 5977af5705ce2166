"""The run folder: which file of a run lies where. Launcher, ranks and reports all look here."""

from __future__ import annotations

import datetime
import json
import os
import re
from pathlib import Path
from typing import Any, Self

from bench.core.errors import UsageError


class RunFolder:
    """Where each file of a run lies.

    Args:
        path: the folder, named ``<utc>-<name>-s<seed>-<digest>``.

    Attributes:
        run_id: the folder's name.
        config: the configuration.
        environment: machine, versions and checkout.
        metrics: one row per evaluation.
        layers: one row per layer and evaluation.
        links: one row per pair of processes between which activations go, and evaluation.
        status: how the run ended, written last.
        progress: one JSON object per line while the run goes on.
        link: what was measured on the links before training (virtual hosts).
        logs: what torchrun and the ranks printed.
        log: what whoever started the ranks printed: torchrun, or the fork server.
        rendezvous: where ranks on one machine meet: a folder of their own, gone when the job has ended.
        errors: one file per rank that failed.
        model: the trained weights, where asked for.
        checkpoints: what training goes on from, one folder per checkpoint.
        resume: how often the run went on from a checkpoint; there once it did.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name
        self.config = path / "config.json"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.csv"
        self.layers = path / "layers.csv"
        self.links = path / "links.csv"
        self.choices = path / "choices.jsonl"
        self.status = path / "status.json"
        self.progress = path / "progress.jsonl"
        self.link = path / "link.json"
        self.logs = path / "logs"
        self.log = self.logs / "torchrun.log"
        self.rendezvous = path / "rendezvous"
        self.errors = path / "errors"
        self.model = path / "model.pt"
        self.checkpoints = path / "checkpoints"
        self.resume = path / "resume.json"

    @classmethod
    def create(cls, out: Path, name: str, digest: str, seed: int) -> Self:
        """Make a new folder below `out`; two runs never share one.

        Raises:
            UsageError: the folder cannot be written.
        """
        utc = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
        stem = f"{utc}-{name}-s{seed}-{digest}"
        for attempt in range(1000):
            path = out / (stem if attempt == 0 else f"{stem}-{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if not out.is_dir():
                    raise UsageError(
                        f"cannot write results to {out}: it is not a folder; choose another one with --out"
                    ) from None
            except OSError as error:
                reason = error.strerror or error
                raise UsageError(f"cannot write results to {out}: {reason}; choose another folder with --out") from None
            else:
                folder = cls(path)
                folder.errors.mkdir()
                folder.logs.mkdir()
                return folder
        raise UsageError(f"{out} already holds a thousand runs of this name and second; choose another --name")

    @property
    def digest(self) -> str:
        """The run's digest, as the folder is named after it; empty for a folder that is no run's."""
        match = re.fullmatch(r".+-s[0-9]+-([0-9a-f]{10})(-[0-9]+)?", self.run_id)
        return match[1] if match else ""

    def error_of(self, rank: int) -> Path:
        """Where a failing rank says why."""
        return self.errors / f"rank-{rank}.json"

    def trace_of(self, rank: int) -> Path:
        """A rank's Chrome trace."""
        return self.path / f"trace-rank-{rank}.json"


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader sees the old content or the new, never half of it; it is on the disk then.

    Raises:
        OSError: the disk is full or the file cannot be written; nothing new is left.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)  # at once, which is the point
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def append_json_line(path: Path, value: Any) -> None:
    """Add one JSON object as a line of its own, for a reader that follows the file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file, or None where there is no complete one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
