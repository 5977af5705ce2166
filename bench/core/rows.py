"""Rows: appending to and reading back the CSV files of a run, so that no crash costs more than the row being written.

A row is one line: texts lose their line breaks on the way in. Every line can therefore be read for itself, and a torn
line (the machine went down, the disk was full) never takes its neighbours along.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from bench.core.errors import RunFailed
from bench.core.schema import METRICS, Column, from_cells, to_cells

Warn = Callable[[str], None]


def warn_on_stderr(sentence: str) -> None:
    """Tell the user of something that was left out, apart from the data on stdout."""
    sys.stderr.write(f"warning: {sentence}\n")


class StoreError(RunFailed):
    """A row could not be written; the rows before it are whole and kept."""


class RowWriter:
    """Appends rows to one CSV file: header first, each call one write that is on disk when it returns.

    The file is opened anew for every call, so rank 0 and, after a crash, the launcher can write to the same file.

    Args:
        path: the CSV file; its folder must exist. A file that exists is continued.
        columns: the schema that the rows follow.

    Raises:
        StoreError: the file cannot be written, or it has the columns of another schema.
    """

    def __init__(self, path: Path, columns: tuple[Column, ...] = METRICS) -> None:
        self.path = path
        self.columns = columns
        self._header = _line(column.name for column in columns)
        self._append("")  # now, not after the first epoch, is when an unwritable folder must show

    def append(self, values: Mapping[str, Any]) -> None:
        """Write one row and wait until the disk has it.

        Args:
            values: column name -> value; columns left out stay empty.

        Raises:
            StoreError: the disk is full or the file cannot be written; the file ends with the last whole row.
            KeyError: a column that the schema does not declare (a programming error).
        """
        self.extend([values])

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write several rows at once: all of them or, with the errors of ``append``, none."""
        self._append("".join(_line(to_cells(values, self.columns).values()) for values in rows))

    def _append(self, lines: str) -> None:
        try:
            with self.path.open("a+b", buffering=0) as file:
                _write_or_take_back(file, (self._repair(file) + lines).encode("utf-8", errors="backslashreplace"))
        except OSError as error:
            raise StoreError(
                f"cannot write {self.path}: {error.strerror or error}; rows written before are kept: make room or "
                "choose another --out"
            ) from None

    def _repair(self, file: BinaryIO) -> str:
        """What must come before the next row: the header or what is missing of it, or the end of a torn line."""
        file.seek(0)
        head = file.read(len(self._header)).decode("utf-8", errors="replace")
        if not head.startswith(self._header):
            if self._header.startswith(head):
                return self._header[len(head) :]
            raise StoreError(f"cannot continue {self.path}: this version writes other columns; choose another --out")
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return ""
        file.seek(0)
        torn = file.read().rpartition(b"\n")[2]
        return '"\n' if torn.count(b'"') % 2 else "\n"  # an open quote would swallow the rows that follow


def read_header(path: Path) -> list[str]:
    """Names of the columns of a CSV file; empty where the file is.

    Raises:
        OSError: the file cannot be read.
        ValueError: its first line is not a line of a CSV file.
    """
    lines = _lines(path)
    return _cells(lines[0]) if lines else []


def read_rows(
    path: Path, columns: tuple[Column, ...] = METRICS, *, warn: Warn = warn_on_stderr
) -> list[dict[str, Any]]:
    """The rows of a CSV file, as far as they can be read.

    Columns that the schema does not know are left out, columns that the file lacks are missing in the rows, empty
    cells are None.

    Args:
        path: a file that ``RowWriter`` or any other CSV writer made (no line breaks inside cells).
        columns: the schema of the rows.
        warn: told one sentence for every line that is skipped because it is cut or a cell is unreadable; by default
            the sentence goes to stderr.

    Raises:
        OSError: the file cannot be read.
        ValueError: its first line is not a line of a CSV file.
    """
    lines = _lines(path)
    if not lines:
        return []
    header = _cells(lines[0])
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if line:
            try:
                rows.append(_row(header, line, columns))
            except ValueError as error:
                warn(f"{path} line {number} is skipped: {error}")
    return rows


def _row(header: list[str], line: str, columns: tuple[Column, ...]) -> dict[str, Any]:
    if not line.endswith("\n"):
        raise ValueError("it is cut (the line has no end)")
    cells = _cells(line)
    if len(cells) != len(header):
        raise ValueError(f"it is cut or damaged ({len(cells)} cells under {len(header)} columns)")
    return from_cells(dict(zip(header, cells, strict=True)), columns)


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line.rstrip("\r\n")], strict=True), [])
    except csv.Error as error:
        raise ValueError(f"it is cut or damaged ({error})") from None


def _line(cells: Iterable[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow([" ".join(cell.splitlines()) for cell in cells])
    return buffer.getvalue()


def _lines(path: Path) -> list[str]:
    """The file's lines with their ends; only a line feed ends a line, and a blank line is an empty text."""
    *whole, rest = path.read_bytes().decode("utf-8-sig", errors="replace").split("\n")
    lines = [line + "\n" if line.strip() else "" for line in whole]
    return [*lines, rest] if rest else lines


def _write_or_take_back(file: BinaryIO, data: bytes) -> None:
    """Write all bytes to the disk, or leave the file as it was and raise the OSError."""
    end = file.seek(0, os.SEEK_END)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    except OSError:
        file.truncate(end)
        raise
