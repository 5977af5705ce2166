"""Find the files that `bench predict` wrote, in the folders where a report looks for runs."""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.core.files import walk
from bench.report.plots.predictions import PREDICTED_KINDS, PredictedKind

_RUN_FILE = "config.json"  # a folder with this file is a run folder
# The kind of a file is recognized by these keys of its JSON, or by the first line of its CSV.
_KEYS = {
    "predicted-curve": {"compressor", "collective", "world_size", "curve", "break_even_bps"},
    "regime-map": {"regimes", "notes"},
    "predicted-measured": {"compressor", "collective", "predicted_step_time_s", "step_time_s", "error"},
}


def predicted_files(paths: Sequence[str | Path]) -> list[tuple[PredictedKind, Path]]:
    """Return every file of predictions that can be plotted, with its kind, in the order of the kinds.

    Args:
        paths: files, folders to search recursively, or glob patterns of these; other files are ignored silently.
    """
    files = {file.absolute(): file for path in paths for file in _candidates(str(path))}
    known = [(kind, file) for file in files.values() if (kind := _kind_of(file))]
    return [(PREDICTED_KINDS[name], file) for name in PREDICTED_KINDS for kind, file in known if kind == name]


def _candidates(path: str) -> Iterator[Path]:
    matches = [path] if Path(path).exists() else sorted(glob.glob(path, recursive=True))  # noqa: PTH207 (absolute ones)
    for match in map(Path, matches):
        if match.is_file():
            yield match
            continue
        for folder, folders, names in walk(match):
            if _RUN_FILE in names:
                folders.clear()
                continue
            files = (folder / name for name in names if name.endswith((".json", ".csv")))
            yield from filter(Path.is_file, files)  # not a pipe: reading it might never end


def _kind_of(file: Path) -> str | None:
    try:
        with file.open(encoding="utf-8", newline="") as text:
            names = next(csv.reader(text), []) if file.suffix == ".csv" else json.load(text)
    except (OSError, ValueError, RecursionError, csv.Error):
        return None  # the reader of runs reports what is wrong with it
    found = {name for name in names if isinstance(name, str)} if isinstance(names, list | dict) else set()
    return next((kind for kind, keys in _KEYS.items() if keys <= found), None)
