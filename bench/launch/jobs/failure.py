"""Explain in one sentence why a job failed, from its ranks' error reports and its logs."""

from __future__ import annotations

import re
import shutil
from typing import Any

from bench.core.environment import possible_causes
from bench.core.processes import killed_by
from bench.core.run_folder import RunFolder, read_json

_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
_KILLED_AGENT = re.compile(r"^torchrun on .* was killed by .*$", re.MULTILINE)
_CRASH = re.compile(r"SIG(SEGV|ABRT|BUS|FPE|ILL)")
_IN_TORCH = re.compile(r'^  File "[^"]*/torch/[^"]*", line (?!.*^  File ")', re.MULTILINE | re.DOTALL)
_FREE_BYTES_NEEDED = 1 << 20  # not 0, because a job that ended frees some space


def explain(folder: RunFolder) -> str:
    """Return one sentence: the error of the first rank that failed, what was killed, or the last line of a log."""
    reports = reports_of(folder)
    own = [report for report in reports if not report["lost_a_peer"]]
    log = read_log(folder)
    killed = _killed_agent(log) or _killed_rank(log)
    if own and not (killed and _is_echo(own[0])):
        return _sentence(own[0])
    if killed:
        return killed + (possible_causes() if _CRASH.search(killed) else "")
    if reports:  # prefer a report that names the lost rank
        return _sentence(next((report for report in reports if report.get("lost_rank") is not None), reports[0]))
    if is_disk_full(folder):
        return f"the disk that holds {folder.path} is full; free some space or choose another folder with --out"
    if _ROOT_CAUSE.search(log):  # a rank failed before it could report, so its own log says more than torchrun's
        log = _first_log_of_a_rank(folder) or log
    return f"the job ended without an error message; the last line of its log: {_last_line(log)}{possible_causes()}"


def is_disk_full(folder: RunFolder) -> bool:
    """Return whether so little disk space is left that a rank may have failed, and failed to report it."""
    return shutil.disk_usage(folder.path).free < _FREE_BYTES_NEEDED


def reports_of(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the error reports of the ranks that failed, oldest first."""
    reports = [read_json(path) for path in sorted(folder.errors.glob("rank-*.json"))]
    return sorted((report for report in reports if report), key=lambda report: float(report["time"]))


def read_log(folder: RunFolder) -> str:
    """Return the log of torchrun or the fork server; empty if there is none."""
    return folder.log.read_text(encoding="utf-8", errors="replace") if folder.log.exists() else ""


def _sentence(report: dict[str, Any]) -> str:
    is_torchs = _IN_TORCH.search(report.get("traceback", "")) or "Too many open files" in report["message"]
    advice = possible_causes() if is_torchs else ""
    return f"rank {report['rank']}: {report['message']}{advice}"


def _is_echo(report: dict[str, Any]) -> bool:
    """Return whether a report is a backend's error about a lost connection, which follows from another rank's end."""
    return bool(
        re.search(r"closed by peer|Connection reset|Broken pipe|onnection refused|timed out", report["message"], re.I)
    )


def _killed_agent(log: str) -> str | None:
    """Return the line in which the supervisor of virtual hosts says that a torchrun agent was killed, or None."""
    match = _KILLED_AGENT.search(log)
    return match[0] if match else None


def _killed_rank(log: str) -> str | None:
    # Every host has its own agent, and agents whose ranks were not killed print a root cause too.
    match = next((match for match in _ROOT_CAUSE.finditer(log) if int(match[2]) < 0), None)
    if match is None:
        return None
    return killed_by(f"rank {match[1]}", -int(match[2]))


def _first_log_of_a_rank(folder: RunFolder) -> str:
    """Return the log of the rank whose last line is the oldest; empty if no rank printed anything."""
    logs = [path for path in folder.logs.rglob("stderr.log") if path.stat().st_size]
    first = min(logs, key=lambda path: path.stat().st_mtime, default=None)
    return first.read_text(encoding="utf-8", errors="replace") if first else ""


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip(" =-")]
    return lines[-1] if lines else "(empty)"
