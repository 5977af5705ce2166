"""Explain in one sentence why a job failed, from its ranks' error reports and its logs."""

import contextlib
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any, Self

from bench.core.config.run import RanksConfig
from bench.core.environment import possible_causes
from bench.core.processes import STOP_GRACE_S, killed_by
from bench.core.run_folder import RunFolder, read_json


class ProgressReader:
    """Reads the reports that a job adds to a run's progress file.

    Args:
        path: the file, which holds one JSON object per line and may not exist yet.

    Attributes:
        last: the last report of a step; if an evaluation was reported after it, with the evaluation's epoch and step.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.last: dict[str, Any] = {}

    def new_lines(self) -> list[dict[str, Any]]:
        """Return the reports added since the last call, oldest first; an incomplete line is left for the next call."""
        text = b""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._position += len(whole)
        reports: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        for report in reports:
            evaluated = {key: value for key, value in report.get("evaluated", {}).items() if key in ("epoch", "step")}
            self.last = report if "step" in report else self.last | evaluated
        return reports


# Ranks need up to three grace periods of the failure detector to agree which rank they lost. Not imported from the
# detector's module, because that imports torch.
FIND_OUT_S = 12.0
# Time for torchrun to see that a rank ended, and to end the other ranks of its host.
END_S = 3.0
# Time for the other hosts to find out why a host failed, and to write their reports.
HOSTS_GRACE_S = FIND_OUT_S + END_S
# Starting many processes on few cores takes longer than most steps do.
START_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchdogTimeouts:
    """Seconds without a report of rank 0 after which a job is stopped; an answer of machine 0 counts as a report.

    Attributes:
        first_s: limit before the first report; all machines must start within this time.
        next_s: limit after each report.
    """

    first_s: float
    next_s: float

    @classmethod
    def with_job(cls, job: RanksConfig) -> Self:
        """Return the limits for this machine's processes of a job."""
        if job.world_size == 1:
            return cls(first_s=max(job.timeout_s, START_S), next_s=job.timeout_s)
        next_s = job.timeout_s + FIND_OUT_S + END_S
        if job.cluster is not None:  # a host that hangs is stopped some time after another one failed
            next_s += HOSTS_GRACE_S + STOP_GRACE_S
        return cls(first_s=max(next_s, START_S), next_s=next_s)


_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
_KILLED_AGENT = re.compile(r"^torchrun on .* was killed by .*$", re.MULTILINE)
_CRASH = re.compile(r"SIG(SEGV|ABRT|BUS|FPE|ILL)")
_IN_TORCH = re.compile(r'^  File "[^"]*/torch/[^"]*", line (?!.*^  File ")', re.MULTILINE | re.DOTALL)
# A backend's error about a lost connection, which follows from another rank's end.
_LOST_CONNECTION = re.compile(r"closed by peer|Connection reset|Broken pipe|onnection refused|timed out", re.I)
_FREE_BYTES_NEEDED = 1 << 20  # not 0, because a job that ended frees some space


def explain(folder: RunFolder) -> str:
    """Return one sentence that explains why a job failed.

    It is the error of the first rank that failed, the name of a process that was killed, or the last line of a log.
    """
    reports = reports_of(folder)
    own = [report for report in reports if not report["lost_a_peer"]]
    log = folder.log.read_text(encoding="utf-8", errors="replace") if folder.log.exists() else ""
    killed = _killed(log)
    if own and not (killed and _LOST_CONNECTION.search(own[0]["message"])):
        return _sentence(own[0])
    if killed:
        return killed + (possible_causes() if _CRASH.search(killed) else "")
    if reports:  # prefer a report that names the lost rank
        return _sentence(next((report for report in reports if report.get("lost_rank") is not None), reports[0]))
    if is_disk_full(folder):
        return f"the disk that holds {folder.path} is full; free some space or choose another folder with --out"
    if _ROOT_CAUSE.search(log):  # a rank failed before it could report, so its own log says more than torchrun's
        logs = [path for path in folder.logs.rglob("stderr.log") if path.stat().st_size]
        if first := min(logs, key=lambda path: path.stat().st_mtime, default=None):
            log = first.read_text(encoding="utf-8", errors="replace")
    *_, last = ["(empty)", *(line.strip() for line in log.splitlines() if line.strip(" =-"))]
    return f"the job ended without an error message; the last line of its log: {last}{possible_causes()}"


def is_disk_full(folder: RunFolder) -> bool:
    """Return True if less than 1 MiB of disk space is left: a rank may have failed without being able to report it."""
    return shutil.disk_usage(folder.path).free < _FREE_BYTES_NEEDED


def reports_of(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the error reports of the ranks that failed, the contents of `rank-<rank>.json`, oldest first."""
    found = (read_json(path) for path in sorted(folder.errors.glob("rank-*.json")))
    return sorted(filter(None, found), key=lambda report: float(report["time"]))


def _sentence(report: dict[str, Any]) -> str:
    is_torchs = _IN_TORCH.search(report.get("traceback", "")) or "Too many open files" in report["message"]
    return f"rank {report['rank']}: {report['message']}{possible_causes() if is_torchs else ''}"


def _killed(log: str) -> str | None:
    """Return a sentence that names the agent or rank that was killed according to the job's log; None if none was."""
    if match := _KILLED_AGENT.search(log):
        return match[0]
    # Every host has its own agent, and agents whose ranks were not killed print a root cause too.
    causes = (match for match in _ROOT_CAUSE.finditer(log) if int(match[2]) < 0)
    return next((killed_by(f"rank {match[1]}", -int(match[2])) for match in causes), None)
