"""Helpers for child processes: their import path, how they were killed, ending with their parent, peak memory."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import sysconfig
from pathlib import Path

_PACKAGES = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1


def import_variables() -> dict[str, str]:
    """Return variables that let a child Python import this process's packages, and nothing from the working directory.

    `python -m` would search the working directory first, where a user's own `bench.py` would hide the package.
    """
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    is_installed = _PACKAGES in map(Path, (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    entries = list(dict.fromkeys(given if is_installed else [str(_PACKAGES), *given]))
    return {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": os.pathsep.join(entries)} if entries else {})


def killed_by(who: str, number: int) -> str:
    """Return a sentence that names the signal that killed a process."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = "; the machine may have run out of memory" if number == signal.SIGKILL else ""
    return f"{who} was killed by {name}{hint}"


def die_with_parent() -> None:
    """Ask Linux to kill this process as soon as its parent ends, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def peak_rss_bytes() -> int:
    """Return the largest resident memory that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
