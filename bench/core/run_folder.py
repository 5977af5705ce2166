"""Paths of the files in a run's folder, and functions that write and read JSON files there."""

import datetime
import json
import re
from pathlib import Path
from typing import Any, Self

from bench.core.errors import UsageError
from bench.core.files import replacing

RUNS_FOLDER = Path("results/runs")  # where runs are written and looked for by default
PLOTS_FOLDER = Path("results/plots")  # where `bench plot` writes by default
REPORT = Path("results/report.html")  # what `bench report` writes by default


class RunFolder:
    """The paths of a run's files.

    Args:
        path: the folder, named ``<utc>-<name>-s<seed>-<digest>``.

    Attributes:
        run_id: the folder's name.
        config: JSON file of the configuration.
        environment: JSON file of the machine, versions and checkout.
        metrics: CSV file with one row per evaluation.
        layers: CSV file with one row per layer and evaluation.
        links: CSV file with one row per evaluation and pair of processes that exchange activations.
        tables: the three CSV files, which get rows at every evaluation.
        partition: CSV file of the number of training samples of each rank and class.
        choices: file of the compressors and collectives that were chosen during training, one JSON object per line.
        status: JSON file of the run's result, written last.
        progress: file of the running job's reports, one JSON object per line.
        link: JSON file of the virtual hosts' links as measured before training.
        logs: folder of the output of torchrun and the ranks.
        log: file of the output of torchrun, or of the process that the ranks are forked from.
        rendezvous: temporary folder through which ranks on one machine connect.
        errors: folder with one file per rank that failed, `rank-<rank>.json`.
        model: file of the trained weights, if they are saved.
        checkpoints: folder with one folder per checkpoint.
        resume: JSON file with the number of times the run was resumed; exists only if the run was resumed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name
        self.config = path / "config.json"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.csv"
        self.layers = path / "layers.csv"
        self.links = path / "links.csv"
        self.tables = (self.metrics, self.layers, self.links)
        self.partition = path / "partition.csv"
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

    def joined(self, rank: int) -> Path:
        """Return the file that shows that a rank has joined the others, in jobs where a lost rank may start again."""
        return self.rendezvous / f"joined-{rank}"

    @classmethod
    def create(cls, out: Path, name: str, digest: str, seed: int) -> Self:
        """Make a run's folder in the folder `out`, with a name that no other run has.

        Raises:
            UsageError: the run's folder cannot be made.
        """
        stem = f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}-{name}-s{seed}-{digest}"
        for attempt in range(1000):
            folder = cls(out / (f"{stem}-{attempt}" if attempt else stem))
            try:
                folder.path.mkdir(parents=True)
            except FileExistsError:
                if not out.is_dir():
                    raise UsageError(
                        f"cannot write results to {out}: it is not a folder; choose another one with --out"
                    ) from None
            except OSError as error:
                raise UsageError(
                    f"cannot write results to {out}: {error.strerror or error}; choose another folder with --out"
                ) from None
            else:
                folder.errors.mkdir()
                folder.logs.mkdir()
                return folder
        raise UsageError(f"{out} already holds a thousand runs of this name from this second; choose another --name")

    @property
    def digest(self) -> str:
        """Return the digest of the run's configuration, from the folder's name; empty if the name has no digest."""
        match = re.fullmatch(r".+-s[0-9]+-([0-9a-f]{10})(-[0-9]+)?", self.run_id)
        return match[1] if match else ""


def write_json(path: Path, value: Any) -> None:
    """Write a value to a JSON file atomically; when the function returns, the file is on the disk.

    Raises:
        OSError: the disk is full or the file cannot be written; then the file keeps its old content.
    """
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def append_json_line(path: Path, value: Any) -> None:
    """Append a value to a file as one line of JSON, for a reader that follows the file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file is missing, incomplete or not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
