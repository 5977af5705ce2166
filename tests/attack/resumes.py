"""Runs are stopped at random moments, in one of many ways, and resumed until they end.

Their rows must equal those of an undisturbed run in every reproducible column, and after the first checkpoint there
must always be a good one.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import itertools
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.core import registry
from bench.core.checkpoints import Checkpoints
from bench.core.columns import Column
from bench.core.config.run import RunConfig
from bench.core.errors import BenchError
from bench.core.run_folder import RunFolder, read_json
from bench.core.schema import LAYERS, METRICS
from bench.hosts.support import hosts_supported
from tests.attack.job import ENDS_WITHIN_S
from tests.attack.tally import Tally
from tests.testing.invoke import REPOSITORY, processes_of, start

STEPS = 120
SMALL = (
    "run", "--model", "small_cnn", "--train-size", "384", "--test-size", "64", "--batch-size", "8", "--steps",
    str(STEPS), "--eval-every", "13", "--checkpoint-every", "7", "--timeout", "30", "--threads", "1",
)  # fmt: skip
METHODS: dict[str, tuple[str, ...]] = {
    "topk": ("--compressor", "topk:ratio=0.05,error_feedback=true", "--collective", "allgather"),
    "group_topk": (
        "--compressor", "group_topk:ratio=0.05", "--collective", "ring", "--world-size", "3", "--bucket-mb", "0.05",
    ),
    "powersgd": ("--compressor", "powersgd"),
    "algc": ("--compressor", "algc:min_numel=100", "--collective", "server:downlink=recode"),
    "answers": (
        "--compressor", "group_topk:ratio=0.05", "--collective", "server:placement=sharded,downlink=recode",
        "--world-size", "3", "--bucket-mb", "0.05",
    ),
    "rounded answers": (
        "--compressor", "bf16", "--collective", "server:placement=sharded,split_numel=5000,error_feedback=true",
    ),
    "dgc": ("--compressor", "dgc", "--collective", "allgather"),
    "hylo": ("--compressor", "hylo", "--collective", "allgather"),
    "adaptive_topk": ("--compressor", "adaptive_topk", "--collective", "allgather"),
    "torch_powersgd": ("--compressor", "torch_powersgd"),
    "max_adabelief": ("--optimizer", "max_adabelief", "--compressor", "topk:ratio=0.1", "--collective", "allgather"),
    "demo": ("--optimizer", "demo"),
    "onebit_adam": ("--optimizer", "onebit_adam:warmup_steps=30", "--lr", "0.0001"),
    "zero_one_adam": (
        "--optimizer", "zero_one_adam:var_freeze_step=30,var_update_scaler=5,local_step_scaler=20", "--lr", "0.0001",
    ),
    "kfac": ("--optimizer", "kfac:update_every=5", "--collective", "ring"),
    "kfac moments": (
        "--optimizer", "kfac:update_every=5,inner=max_adabelief,transfer=cholesky", "--collective", "ring",
    ),
    "muon": ("--optimizer", "muon:shard=true", "--compressor", "topk:ratio=0.1", "--collective", "allgather"),
    "dion": ("--optimizer", "dion", "--collective", "ring"),
    "adam": ("--optimizer", "adam", "--compressor", "onebit"),
    "accumulate": ("--accumulate", "2", "--compressor", "topk:ratio=0.05", "--collective", "allgather"),
    "placed": ("--strategy", f"placed:by=type,devices={REPOSITORY / 'examples' / 'cxl.toml'}"),
    "placed replicas": (
        "--strategy", f"placed:by=data,devices={REPOSITORY / 'examples' / 'cxl.toml'}", "--compressor",
        "topk:ratio=0.1,error_feedback=true",
    ),
    "async_server": ("--strategy", "async_server", "--compressor", "topk:ratio=0.1,error_feedback=true"),
}  # fmt: skip
if "auto" in registry.entries("compressors"):
    CHOICES = REPOSITORY / "tests" / "extensions" / "auto" / "choices.jsonl"
    METHODS["auto"] = ("--compressor", f"auto:choices={CHOICES}", "--world-size", "3")
if hosts_supported()[0]:
    METHODS["virtual hosts"] = ("--hosts", "2", "--bandwidth", "200mbit", "--compressor", "topk:ratio=0.05")
WAYS = ("rank", "launcher", "fork server", "Ctrl-C", "full disk")
MOST_STOPS = 3
TOO_LATE = "too late"
ROOM = 40_000
LOOKS = 50
_POLL_S = 0.02
Rows = list[list[dict[str, str]]]
"""Rows of metrics.csv and of layers.csv."""


def attack(rng: random.Random, tally: Tally, tries: int) -> None:
    """Stop runs and resume them.

    Args:
        rng: source of all choices.
        tally: gets one count per run.
        tries: number of runs that are stopped; runs that end before the stop do not count.
    """
    with tempfile.TemporaryDirectory(prefix="bench-attack-") as folder:
        undisturbed: dict[str, _Undisturbed] = {}
        names = rng.sample(sorted(METHODS), len(METHODS))
        num_stopped = 0
        for index in itertools.count():
            if num_stopped == tries or not tally.has_time():
                return
            name = names[index % len(names)]
            if name not in undisturbed:
                whole = _Run(Path(folder) / f"{name} undisturbed", name)
                if problem := whole.go_on():
                    tally.count("nothing", f"{problem} [{name}]")
                    num_stopped += 1
                    continue
                undisturbed[name] = _Undisturbed(whole.rows(), whole.first_checkpoint_s, whole.took_s)
            run = _Run(Path(folder) / f"{name} {index}", name)
            ways = [rng.choice(WAYS) for _ in range(rng.randrange(1, MOST_STOPS + 1))]
            failure = _failure(rng, run, ways, undisturbed[name])
            how = ", ".join(sorted(set(run.stopped_by)))
            tally.count(how or TOO_LATE, failure and f"{failure} [{name}: {ways}]")
            num_stopped += bool(how or failure)
            shutil.rmtree(run.folder, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class _Undisturbed:
    """The results of a run that was not stopped.

    Attributes:
        rows: its rows, reproducible columns only.
        first_checkpoint_s: time from its start to its first checkpoint, in seconds.
        took_s: time from its start to its end, in seconds.
    """

    rows: Rows
    first_checkpoint_s: float
    took_s: float

    def moment(self, rng: random.Random, steps_done: int) -> float:
        """Return a random time after the start of a run that has done `steps_done` steps: mostly while it trains."""
        trains_s = (self.took_s - self.first_checkpoint_s) * (1 - steps_done / STEPS)
        return rng.uniform(0.7 * self.first_checkpoint_s, self.first_checkpoint_s + trains_s)


def _failure(rng: random.Random, run: _Run, ways: list[str], undisturbed: _Undisturbed) -> str | None:
    """Return what went wrong, or None if the run ended with the rows of the undisturbed run."""
    for way in ways:
        problem = run.go_on(way, undisturbed.moment(rng, run.steps_done()))
        if problem:
            return problem
    return run.go_on() or _difference(run.rows(), undisturbed.rows)


def _difference(rows: Rows, expected: Rows) -> str | None:
    """Return the first difference from the rows of the undisturbed run, or None."""
    for found, wanted in zip(rows, expected, strict=True):
        if len(found) != len(wanted):
            return f"{len(found)} rows in place of {len(wanted)}"
        for number, (row, other) in enumerate(zip(found, wanted, strict=True)):
            if row != other:
                cells = {name: (row[name], other[name]) for name in row if row[name] != other[name]}
                return f"row {number} is not the undisturbed run's: {cells}"
    return None


class _Run:
    """A run in its own folder, which is started, stopped and resumed.

    Args:
        folder: holds everything of the run; it must not exist yet.
        method: one of `METHODS`.

    Attributes:
        stopped_by: the ways in which it was stopped before its end.
        first_checkpoint_s: time from the last start to a checkpoint, in seconds.
        took_s: time from the last start to its end, in seconds.
    """

    def __init__(self, folder: Path, method: str) -> None:
        folder.mkdir()
        self.folder = folder
        self._arguments = [*SMALL, *METHODS[method], "--out", str(folder / "out")]
        self._variables = {"XDG_STATE_HOME": str(folder / "state")}
        self.stopped_by: list[str] = []
        self.first_checkpoint_s = self.took_s = 0.0
        self._had_checkpoint = False
        self._was_without = 0

    def rows(self) -> Rows:
        """Return all rows, reproducible columns only."""
        run = self._run()
        assert run is not None
        return [_repeating(run.metrics, METRICS), _repeating(run.layers, LAYERS)]

    def steps_done(self) -> int:
        """Return the number of steps before the newest checkpoint, or 0."""
        run = self._run()
        return max([0, *Checkpoints(run).steps()]) if run is not None and self._had_checkpoint else 0

    def go_on(self, way: str = "", after_s: float = ENDS_WITHIN_S) -> str | None:
        """Start or resume the run, wait for its end, and return what went wrong, or None.

        Args:
            way: how to stop it, if it has not ended before.
            after_s: when to stop it, in seconds after the start.
        """
        if self._ended_well():
            return None
        begun = time.monotonic()
        process = self._start()
        until, end = begun + after_s, begun + ENDS_WITHIN_S
        was_stopped = False
        while process.poll() is None and time.monotonic() < end:
            if way and not was_stopped and time.monotonic() > until:
                self._strike(process, way)
                was_stopped = True
            if not self._has_good_checkpoint():
                process.kill()
                return "there was no good checkpoint any more"
            if not self._had_checkpoint:
                self.first_checkpoint_s = time.monotonic() - begun
            time.sleep(_POLL_S)
        self.took_s = time.monotonic() - begun
        process.kill()
        _, error = process.communicate()
        if (run := self._run()) is not None:
            psutil.wait_procs(list(processes_of(run.path)), timeout=10)
        if was_stopped and not self._ended_well():
            self.stopped_by.append(way)
        return self._verdict(process.returncode, error, was_stopped=was_stopped)

    def _verdict(self, code: int, error: str, *, was_stopped: bool) -> str | None:
        if "Traceback" in error:
            return error[-600:]
        if code == 0 or (was_stopped and code in (3, 130, -signal.SIGKILL)):
            return None
        return f"exit code {code}: {error[-600:]}"

    def _start(self) -> subprocess.Popen[str]:
        """Resume the run, or start it again if it was stopped before its first checkpoint."""
        run = self._run()
        if run is not None and self._had_checkpoint:
            return start("run", "--resume", str(run.path), **self._variables)
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        return start(*self._arguments, **self._variables)

    def _strike(self, process: subprocess.Popen[str], way: str) -> None:
        run = self._run()
        working = processes_of(run.path) if run is not None else {}
        ranks = [each for each, files in working.items() if any(file.endswith("/stdout.log") for file in files)]
        with contextlib.suppress(psutil.NoSuchProcess):
            if way == "Ctrl-C":
                process.send_signal(signal.SIGINT)
            elif way == "launcher" or not ranks:
                process.kill()
            elif way == "rank":
                ranks[-1].kill()
            elif way == "fork server":
                psutil.Process(ranks[0].ppid()).kill()
            else:
                for rank in ranks:  # the next longer file is cut off in the middle
                    rank.rlimit(psutil.RLIMIT_FSIZE, (ROOM, ROOM))

    def _has_good_checkpoint(self) -> bool:
        """Return False if a good checkpoint was there and none is found several times; one may just replace another."""
        run = self._run()
        if run is None or (read_json(run.status) or {}).get("status") == "ok":
            return True
        checkpoints = Checkpoints(run)
        try:
            config = RunConfig.from_json(run.config)
            checkpoints.check(checkpoints.steps()[0], config)
        except (BenchError, OSError, IndexError):
            self._was_without += self._had_checkpoint
            return self._was_without < LOOKS
        self._had_checkpoint, self._was_without = True, 0
        return True

    def _run(self) -> RunFolder | None:
        found = list((self.folder / "out").glob("*-s1-*"))
        return RunFolder(found[0]) if found else None

    def _ended_well(self) -> bool:
        run = self._run()
        return run is not None and (read_json(run.status) or {}).get("status") == "ok"


def _repeating(path: Path, columns: Sequence[Column]) -> list[dict[str, str]]:
    # The commit that the rows name may change between the runs.
    names = [column.name for column in columns if column.deterministic and column.group != "origin"]
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: row[name] for name in names} for row in csv.DictReader(file)]
