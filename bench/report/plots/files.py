"""Find files that pictures are drawn from and that are no runs, in the folders where a report looks for runs."""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.core.files import walk
from bench.report.plots.kinds import FileKind, file_kinds

_RUN_FILE = "config.json"  # a folder with this file is a run folder


def drawn_files(paths: Sequence[str | Path]) -> list[tuple[FileKind, Path]]:
    """Return every file that can be drawn, with its kind of picture, in the order of the kinds.

    Args:
        paths: files, folders to search recursively, or glob patterns of these; other files are ignored silently.
    """
    if not file_kinds():
        return []
    files = {file.absolute(): file for path in paths for file in _candidates(str(path))}
    keys = [(_keys(file), file) for file in files.values()]
    return [(kind, file) for kind in file_kinds().values() for found, file in keys if kind.keys <= found]


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


def _keys(file: Path) -> set[str]:
    """Return the keys of a file's JSON, or the first line of its CSV."""
    try:
        with file.open(encoding="utf-8", newline="") as text:
            names = next(csv.reader(text), []) if file.suffix == ".csv" else json.load(text)
    except (OSError, ValueError, RecursionError, csv.Error):
        return set()  # the reader of runs reports what is wrong with it
    return {name for name in names if isinstance(name, str)} if isinstance(names, list | dict) else set()
