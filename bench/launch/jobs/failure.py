"""Why a job failed, in one sentence, from what its ranks left behind."""

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
_FREE_BYTES_NEEDED = 1 << 20  # a job that ended has given some back


def explain(folder: RunFolder) -> str:
    """One sentence: the first rank that failed by itself, who was killed, or the end of a rank's log or torchrun's."""
    reports = reports_of(folder)
    own = [report for report in reports if not report["lost_a_peer"]]
    log = read_log(folder)
    killed = _killed_agent(log) or _killed_rank(log)
    if own and not (killed and _is_echo(own[0])):
        return _sentence(own[0])
    if killed:
        return killed + (possible_causes() if _CRASH.search(killed) else "")
    if reports:  # who names the lost one says more than who lost everybody
        return _sentence(next((report for report in reports if report.get("lost_rank") is not None), reports[0]))
    if is_disk_full(folder):
        return f"the disk that holds {folder.path} is full; free some space or choose another folder with --out"
    if _ROOT_CAUSE.search(log):  # a rank that could not begin: torchrun knows its exit code alone
        log = _first_log_of_a_rank(folder) or log
    return f"the job ended without saying why; the end of its log: {_last_line(log)}{possible_causes()}"


def is_disk_full(folder: RunFolder) -> bool:
    """Whether a rank may have failed for want of room, and to say so too."""
    return shutil.disk_usage(folder.path).free < _FREE_BYTES_NEEDED


def reports_of(folder: RunFolder) -> list[dict[str, Any]]:
    """What ranks that failed have left, oldest first."""
    reports = [read_json(path) for path in sorted(folder.errors.glob("rank-*.json"))]
    return sorted((report for report in reports if report), key=lambda report: float(report["time"]))


def read_log(folder: RunFolder) -> str:
    """What torchrun printed."""
    return folder.log.read_text(encoding="utf-8", errors="replace") if folder.log.exists() else ""


def _sentence(report: dict[str, Any]) -> str:
    is_torchs = _IN_TORCH.search(report.get("traceback", "")) or "Too many open files" in report["message"]
    advice = possible_causes() if is_torchs else ""
    return f"rank {report['rank']}: {report['message']}{advice}"


def _is_echo(report: dict[str, Any]) -> bool:
    """A backend's own complaint about a lost connection: the echo of another rank's death."""
    return bool(
        re.search(r"closed by peer|Connection reset|Broken pipe|onnection refused|timed out", report["message"], re.I)
    )


def _killed_agent(log: str) -> str | None:
    """On virtual hosts the supervisor sees it; ranks that end for want of their agent only follow."""
    match = _KILLED_AGENT.search(log)
    return match[0] if match else None


def _killed_rank(log: str) -> str | None:
    # every host has its own agent, and those on which nobody was killed have a root cause too
    match = next((match for match in _ROOT_CAUSE.finditer(log) if int(match[2]) < 0), None)
    if match is None:
        return None
    return killed_by(f"rank {match[1]}", -int(match[2]))


def _first_log_of_a_rank(folder: RunFolder) -> str:
    """Of the one that printed its last line before all others; empty if none printed any."""
    logs = [path for path in folder.logs.rglob("stderr.log") if path.stat().st_size]
    first = min(logs, key=lambda path: path.stat().st_mtime, default=None)
    return first.read_text(encoding="utf-8", errors="replace") if first else ""


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip(" =-")]
    return lines[-1] if lines else "(empty)"
