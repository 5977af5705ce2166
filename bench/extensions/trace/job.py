"""Find and read the traces of one job, one file per rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from bench.core.errors import UsageError
from bench.core.files import walk
from bench.extensions.trace.kineto import Recording, read
from bench.extensions.trace.trace_file import HOW, looks_like_one

# Traces of one job begin at nearly the same time; ranks may wait for each other before a step, but not this long.
_FAR_APART_S = 600.0


def read_job(paths: Sequence[Path], limit: int) -> tuple[list[Recording], list[str]]:
    """Read the traces of a job.

    Args:
        paths: files, and folders in which traces are looked for at any depth.
        limit: most bytes that a file may have after unpacking.

    Returns:
        The recordings in the order of their ranks, and a sentence for each file that is left out.

    Raises:
        UsageError: no file is a trace with a step, or the files are of several jobs.
    """
    files = [file for path in paths for file in _files(path)]
    recordings: list[Recording] = []
    errors: list[UsageError] = []
    for file in dict.fromkeys(files):
        try:
            recordings.append(read(file, limit))
        except UsageError as error:
            errors.append(error)
    if not recordings:
        raise errors[0]
    notes = [f"left out: {error}" for error in errors] + _number(recordings)
    _check_one_job(recordings)
    return sorted(recordings, key=lambda recording: recording.rank or 0), notes


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise UsageError(f"there is no {path}; give a trace, or a folder of traces")
        return [path]
    found = [
        folder / name
        for folder, _, names in walk(path)
        for name in names
        if name.endswith((".json", ".json.gz")) and (folder / name).is_file() and looks_like_one(folder / name)
    ]
    if not found:
        raise UsageError(f"there is no trace in {path}: no .json or .json.gz that begins like one; {HOW}")
    return found


def _number(recordings: Sequence[Recording]) -> list[str]:
    """Give a number to each recording that does not say its rank; return a sentence about each."""
    taken = {recording.rank for recording in recordings}
    notes = []
    for recording in recordings:
        if recording.rank is None:
            recording.rank = next(rank for rank in range(len(recordings) + 1) if rank not in taken)
            taken.add(recording.rank)
            notes.append(f"{recording.path.name} does not say its rank; it is called rank {recording.rank} here")
    return notes


def _check_one_job(recordings: Sequence[Recording]) -> None:
    """Refuse recordings that cannot be of one job.

    Raises:
        UsageError: two are of one rank, the jobs have different sizes or backends, or the steps or times differ.
    """
    first, advice = recordings[0], "give the traces of one job, recorded at one time"
    by_rank: dict[int | None, Path] = {}
    for recording in recordings:
        if (other := by_rank.get(recording.rank)) is not None:
            raise UsageError(f"{other} and {recording.path} are both of rank {recording.rank}; {advice}")
        by_rank[recording.rank] = recording.path
        if None not in (first.world_size, recording.world_size) and first.world_size != recording.world_size:
            raise UsageError(
                f"{first.path} is of a job with {first.world_size} ranks and {recording.path} of one with "
                f"{recording.world_size}; {advice}"
            )
        apart_s = recording.began_s - first.began_s if recording.has_clock and first.has_clock else 0.0
        if (first.backends and recording.backends and first.backends != recording.backends) or math.fabs(
            apart_s
        ) > _FAR_APART_S:
            raise UsageError(f"{first.path} and {recording.path} are of different jobs; {advice}")
    if not set.intersection(*({*each.steps} for each in recordings)):
        raise UsageError(f"no step was recorded by all of {len(recordings)} ranks; {advice}")
