"""The run folder: which file of a run lies where. Launcher, ranks and reports all look here."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from pathlib import Path
from typing import Any, Self

from bench.core.errors import UsageError


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths inside one run's folder.

    Attributes:
        path: the folder, named ``<utc>-<name>-<digest>``.
    """

    path: Path

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
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The run's configuration."""
        return self.path / "config.json"

    @property
    def environment(self) -> Path:
        """Machine, versions and checkout."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """One row per evaluation."""
        return self.path / "metrics.csv"

    @property
    def layers(self) -> Path:
        """One row per layer and evaluation."""
        return self.path / "layers.csv"

    @property
    def status(self) -> Path:
        """How the run ended, written last."""
        return self.path / "status.json"

    @property
    def progress(self) -> Path:
        """One JSON object per line while the run goes on."""
        return self.path / "progress.jsonl"

    @property
    def link(self) -> Path:
        """What was measured on the links before training (virtual hosts)."""
        return self.path / "link.json"

    @property
    def logs(self) -> Path:
        """What torchrun and the ranks printed."""
        return self.path / "logs"

    @property
    def log(self) -> Path:
        """What whoever started the ranks printed: torchrun, or the fork server."""
        return self.logs / "torchrun.log"

    @property
    def rendezvous(self) -> Path:
        """Where ranks on one machine meet: a folder of their own, gone when the job has ended."""
        return self.path / "rendezvous"

    @property
    def errors(self) -> Path:
        """One file per rank that failed."""
        return self.path / "errors"

    @property
    def model(self) -> Path:
        """The trained weights, where asked for."""
        return self.path / "model.pt"

    def error_of(self, rank: int) -> Path:
        """Where a failing rank says why."""
        return self.errors / f"rank-{rank}.json"

    def trace_of(self, rank: int) -> Path:
        """A rank's Chrome trace."""
        return self.path / f"trace-rank-{rank}.json"


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader sees the old content or the new, never half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)  # noqa: PTH105 - atomic on POSIX, which is the point


def read_json(path: Path) -> Any:
    """The file's content, or None where there is no complete JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
