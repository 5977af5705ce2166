"""Explain why a job failed, record the ending in the run's folder, and clean up after launchers that were killed."""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from bench.core import environment
from bench.core.config.run import RanksConfig, RunConfig
from bench.core.environment import possible_causes
from bench.core.errors import BenchError
from bench.core.files import locked
from bench.core.processes import killed_by
from bench.core.rows import RowWriter, read_rows
from bench.core.run_folder import RunFolder, read_json, write_json


@dataclasses.dataclass
class ProgressReader:
    """Reads the reports that a job adds to a run's progress file.

    Attributes:
        path: the file, which holds one JSON object per line and may not exist yet.
        last: the newest report of training progress, with the epoch and step of a later evaluation if one was reported;
            empty before the first report.
    """

    path: Path
    last: dict[str, Any] = dataclasses.field(default_factory=dict)
    _position: int = 0

    def new_lines(self) -> list[dict[str, Any]]:
        """Return the reports added since the last call, oldest first; an incomplete line is left for the next call."""
        text = b""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._position += len(whole)
        reports: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        for report in reports:
            evaluated = {key: value for key, value in report.get("evaluated", {}).items() if key in ("epoch", "step")}
            self.last = report if "step" in report else self.last | evaluated
        return reports


# Ranks need up to three grace periods of the failure detector to agree on which rank was lost. The value is not
# imported from the detector's module, because that module imports torch.
FIND_OUT_S = 12.0
# Time for torchrun to see that a rank ended, and to end the other ranks of its host.
END_S = 3.0
# Time for the other hosts to find out why a host failed, and to write their reports.
HOSTS_GRACE_S = FIND_OUT_S + END_S
# Smallest limit before the first report, because starting many processes on few cores takes longer than most steps.
START_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchdogTimeouts:
    """Limits of the time without a report of rank 0, in seconds; when a limit is exceeded, the job is stopped.

    Machines other than machine 0 do not see these reports. There, each connection that machine 0 accepts counts as a
    report.

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
        if job.cluster is not None:  # a host that hangs is stopped some time after another host failed
            next_s += HOSTS_GRACE_S
        return cls(first_s=max(next_s, START_S), next_s=next_s)


_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
_CRASH = re.compile(r"SIG(SEGV|ABRT|BUS|FPE|ILL)")
_IN_TORCH = re.compile(r'^  File "[^"]*/torch/[^"]*", line (?!.*^  File ")', re.MULTILINE | re.DOTALL)
# Error of a backend about a lost connection, which is a consequence of another rank's end.
_LOST_CONNECTION = re.compile(r"closed by peer|Connection reset|Broken pipe|onnection refused|timed out", re.I)
_FREE_BYTES_NEEDED = 1 << 20  # not 0, because a job that ended frees some space


def explain(folder: RunFolder) -> str:
    """Return one sentence that explains why a job failed.

    The sentence is the error of the first rank that failed, names a rank that was killed, or is the last line of a log.
    """
    reports, log = reports_of(folder), _log_of(folder)
    if report := _first_failure(folder):
        return _sentence(report)
    if killed := _killed(log):
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


def _first_failure(folder: RunFolder) -> dict[str, Any] | None:
    """Return the report of the first rank that failed by its own error, not because it lost another rank.

    Return None if there is no such report, or if its error is a consequence of a killed rank.
    """
    own = [report for report in reports_of(folder) if not report["lost_a_peer"]]
    is_by_another = own and _LOST_CONNECTION.search(own[0]["message"]) and _killed(_log_of(folder))
    return None if not own or is_by_another else own[0]


def _log_of(folder: RunFolder) -> str:
    return folder.log.read_text(encoding="utf-8", errors="replace") if folder.log.exists() else ""


def is_disk_full(folder: RunFolder) -> bool:
    """Return True if less than 1 MiB of disk space is left, so that a rank may have failed without reporting it."""
    return shutil.disk_usage(folder.path).free < _FREE_BYTES_NEEDED


def reports_of(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the error reports of the ranks that failed, the contents of `rank-<rank>.json`, oldest first."""
    found = (read_json(path) for path in sorted(folder.errors.glob("rank-*.json")))
    return sorted(filter(None, found), key=lambda report: float(report["time"]))


def _sentence(report: dict[str, Any]) -> str:
    is_torchs = _IN_TORCH.search(report.get("traceback", "")) or "Too many open files" in report["message"]
    return f"rank {report['rank']}: {report['message']}{possible_causes() if is_torchs else ''}"


def _killed(log: str) -> str | None:
    """Return a sentence that names the rank that was killed according to the job's log; None if no rank was killed."""
    # The log has a root cause for every virtual host on which a rank failed.
    causes = (match for match in _ROOT_CAUSE.finditer(log) if int(match[2]) < 0)
    return next((killed_by(f"rank {match[1]}", -int(match[2])) for match in causes), None)


# Endings that the launcher records.


def record_ending(
    config: RunConfig, folder: RunFolder, status: str, error: str, wall_time_s: float | None = None
) -> dict[str, Any]:
    """Write the last row of `metrics.csv`, and `status.json`; return the content of `status.json`.

    All processes of the run must have ended.

    Args:
        config: the run's configuration.
        folder: the run's folder.
        status: "failed", "timeout" or "interrupted".
        error: the reason, in one sentence.
        wall_time_s: duration in seconds of the run's last job, without the jobs before the run was resumed; None if
            the duration is unknown.

    Raises:
        OSError: `status.json` cannot be written.
        StoreError: the row cannot be written.
    """
    shutil.rmtree(folder.rendezvous, ignore_errors=True)
    progress = ProgressReader(folder.progress)
    progress.new_lines()
    known = progress.last if progress.last.get("step") is not None else _last_row_with(folder, "step")
    reached = {key: known.get(key) for key in ("epoch", "step")}
    resumes = (read_json(folder.resume) or {"resumes": 0})["resumes"]
    failure = _first_failure(folder) if status == "failed" else None
    ending = {"run_id": folder.run_id, "status": status, "error": error, "error_kind": failure and failure["type"]}
    origin = environment.origin_columns(config.device)
    row = {
        **config.columns(),
        **origin,
        **{key: value for key, value in (read_json(folder.environment) or {}).items() if key in origin},
        **reached,
        **ending,
        "resumes": resumes,
    }
    summary = ending | reached
    try:
        if wall_time_s is not None and (last := _last_row_with(folder, "wall_time_s")):
            # The last row holds the duration of the run's earlier jobs, or of the earlier jobs and this job together.
            before_s: float = last["wall_time_s"]
            is_included = last.get("resumes") == resumes
            wall_time_s = max(before_s, wall_time_s) if is_included else before_s + wall_time_s
        RowWriter(folder.metrics).append(row | {"wall_time_s": wall_time_s})
    finally:
        write_json(folder.status, summary)
    return summary


def _last_row_with(folder: RunFolder, column: str) -> dict[str, Any]:
    """Return the last row of `metrics.csv` in which the column is not empty; an empty dict if there is none."""
    rows = read_rows(folder.metrics) if folder.metrics.is_file() else []
    return next((row for row in reversed(rows) if row.get(column) is not None), {})


def noted(command: str, folder: Path) -> AbstractContextManager[object]:
    """While the block runs, keep a file that names a job's folder.

    If this process is killed, the file stays: the next command finds the job by it and cleans up (`clear_away`).

    Do nothing if the file cannot be written.

    Args:
        command: name of the command. After a kill, the folder of "run" is kept; folders of other commands are removed.
        folder: the job's folder.
    """
    try:
        _notes().mkdir(mode=0o700, parents=True, exist_ok=True)
        note = tempfile.NamedTemporaryFile(dir=_notes(), buffering=0)  # noqa: SIM115 - removed when it is closed
        fcntl.flock(note, fcntl.LOCK_EX)
        note.write(json.dumps({"command": command, "path": str(folder.absolute())}).encode())
    except (OSError, RuntimeError):  # the disk is full, or the user has no home; then a kill leaves the folder behind
        return contextlib.nullcontext()
    return note


def clear_away() -> None:
    """Clean up after every job whose launcher was killed, and print on stderr what was done."""
    try:
        paths = sorted(_notes().glob("*"))
    except RuntimeError:  # the user has no home, and so no notes
        return
    for path in paths:
        with contextlib.suppress(FileNotFoundError), locked(path) as is_left:  # its job may end meanwhile
            text = path.read_bytes() if is_left else b""
            if not text:  # its launcher is alive, or another command is cleaning up
                continue
            try:
                job = json.loads(text)
                command, folder = str(job["command"]), RunFolder(Path(job["path"]))
            except (ValueError, TypeError, KeyError):
                said = f"{path} is not a note of a job and is removed"
            else:
                said = _clear_away(command, folder)
            if said:
                print(f"note: {said}", file=sys.stderr)
            path.unlink()


def _clear_away(command: str, folder: RunFolder) -> str:
    """Record in a run's folder that `bench` was killed, or remove the folder; return a sentence about what was done.

    The sentence is empty if nothing had to be done.
    """
    path = folder.path
    if not path.exists() or folder.status.exists():  # the folder was removed already, or the job had ended
        return ""
    if command == "run" and any(inside.is_file() for inside in path.rglob("*")):
        try:
            record_ending(RunConfig.from_json(folder.config), folder, "interrupted", "bench was killed")
            kept = "its rows so far are kept"
        except (OSError, BenchError) as error:
            kept = f"a last row that records this could not be written ({error})"
        return f"bench was killed during an earlier run; {kept} in {path}"
    shutil.rmtree(path, ignore_errors=True)
    if command == "run":
        return f"bench was killed before a run started; its empty folder {path} is removed"
    return f"`bench {command}` was killed earlier; its temporary folder {path} is removed"


def _notes() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "gradwire" / "jobs"
