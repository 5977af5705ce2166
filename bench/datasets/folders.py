"""Find the files below a user's folder, in the same way in every process, and say what is left out and why."""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from bench.core.run_folder import PLOTS_FOLDER, REPORT, RUNS_FOLDER, RunFolder

# Of each file: name relative to the folder, size in bytes and time of change in ns; sorted.
Listing = tuple[tuple[str, int, int], ...]
# (reason, name) of each file and folder that is left out. In messages, a reason follows a number: "2 hidden".
LeftOut = tuple[tuple[str, str], ...]

UNREADABLE = "unreadable"
# Names of files that commands write, in any folder. Files with these names are always left out, so that a listing is
# the same before and after a command has written.
_RESULTS = (
    *(str(path) for path in (RUNS_FOLDER, PLOTS_FOLDER, REPORT)),
    *("study.json", "step-times"),  # of `bench decide`, like the next line
    *("decision.csv", "decision.json", "decision.svg", "decision.html"),
    *("tuned.toml", "calibration.json", "calibration.json.parts", "profile.json"),
)
_SHOWN = 3  # number of names that a note shows for each reason


def find_files(folder: Path) -> tuple[Listing, LeftOut]:
    """Return (all regular files below a folder that are not hidden or empty, everything that is left out).

    Links are followed. A file or folder that is reached under several names counts once: under the name with the fewest
    links on the way, and among such names under the first. Links to the folder itself, or to a folder that contains it,
    are left out, because they would be loops. Results of `bench` are left out, because the runs that read the folder
    may write there.
    """
    root = folder.resolve()
    known = {_identity(path.stat()) for path in root.parents}
    ahead = [(0, "", _identity(root.stat()))]  # a heap: number of links on the way, name, identity
    found, left_out = [], []
    while ahead:
        num_links, parent, identity = heapq.heappop(ahead)
        if identity in known:
            left_out.append(("known by another name", parent))
            continue
        known.add(identity)
        try:
            with os.scandir(folder / parent) as entries:
                inside = list(entries)
        except OSError:
            left_out.append((UNREADABLE, parent or "."))
            continue
        for entry in inside:
            name = f"{parent}/{entry.name}" if parent else entry.name
            if entry.name.startswith("."):
                left_out.append(("hidden", name))
                continue
            if _is_result(folder / name):
                left_out.append(("with results of bench", name))
                continue
            try:
                facts = entry.stat()
            except OSError as error:
                is_broken = entry.is_symlink() and not isinstance(error, PermissionError)
                left_out.append(("behind a broken link" if is_broken else UNREADABLE, name))
                continue
            reached = num_links + entry.is_symlink(), name, _identity(facts)
            if stat.S_ISDIR(facts.st_mode):
                heapq.heappush(ahead, reached)
            elif not stat.S_ISREG(facts.st_mode):  # opening a pipe would wait for its writer
                left_out.append(("of another kind, such as pipes and sockets", name))
            elif not facts.st_size:
                left_out.append(("empty", name))
            else:
                found.append((reached, (name, facts.st_size, facts.st_mtime_ns)))
    listing = []
    for (_, name, identity), each in sorted(found):
        if identity in known:
            left_out.append(("known by another name", name))
        else:
            known.add(identity)
            listing.append(each)
    return tuple(sorted(listing)), tuple(sorted(left_out))


def note_of(subject: str, left_out: LeftOut) -> list[str]:
    """Return a list of one sentence that says how much was left out and why; empty if nothing was left out.

    Args:
        subject: what left the files out, such as "text".
        left_out: reason and name of each file and folder.
    """
    names: dict[str, list[str]] = {}
    for reason, name in left_out:
        names.setdefault(reason, []).append(shown(name))
    parts = [f"{len(each)} {reason} ({_first_of(each)})" for reason, each in names.items()]
    return [f"{subject} leaves out {', '.join(parts)}"] if parts else []


def shown(name: str) -> str:
    """Return a file's name as printable text: bytes that are not UTF-8 are replaced."""
    return os.fsencode(name).decode(errors="replace")


def _first_of(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _identity(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


def _is_result(path: Path) -> bool:
    """Return True if a path is the folder of a run, or has the usual name of a file that a `bench` command writes."""
    return bool(RunFolder(path).digest) or any(path.match(name) for name in _RESULTS)
