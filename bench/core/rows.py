"""Append rows to the CSV files of a run and read them back; a crash loses at most the row being written.

A row is always one line, because line breaks in texts are replaced with spaces. So each line can be read on its own,
and a line cut by a crash or a full disk does not damage its neighbours.
"""

import csv
import functools
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from bench.core.columns import Column, from_cell, to_cells
from bench.core.errors import RunFailed
from bench.core.schema import METRICS

Warn = Callable[[str], None]


def warn_on_stderr(sentence: str) -> None:
    """Print a warning on stderr, so that it does not mix with data on stdout."""
    sys.stderr.write(f"warning: {sentence}\n")


class StoreError(RunFailed):
    """A row could not be written; the rows before it are complete and kept."""


class RowWriter:
    """Appends rows to one CSV file, which begins with a header; each call returns when its rows are on the disk.

    The file is opened for every call, so the launcher can append a row after rank 0 has crashed.

    Args:
        path: the CSV file; its folder must exist. If the file exists, rows are added to it.
        columns: columns of the file, in order.

    Raises:
        StoreError: the file cannot be written, or it exists with other columns.
    """

    def __init__(self, path: Path, columns: tuple[Column, ...] = METRICS) -> None:
        self.path = path
        self.columns = columns
        self._header = _line(column.name for column in columns)
        self._append("")  # so that a folder that cannot be written fails now, not after the first epoch

    def append(self, values: Mapping[str, Any]) -> None:
        """Write one row and wait until the disk has it.

        Args:
            values: column name -> value; missing columns stay empty.

        Raises:
            StoreError: the disk is full or the file cannot be written; then the file ends with the last whole row.
            KeyError: a value belongs to a column that the file does not have (a programming error).
        """
        self.extend([values])

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write several rows at once; raise the same errors as ``append``. After an error, none of the rows is kept."""
        self._append("".join(_line(to_cells(values, self.columns).values()) for values in rows))

    def _append(self, lines: str) -> None:
        try:
            with self.path.open("a+b", buffering=0) as file:
                rest = memoryview((self._repair(file) + lines).encode("utf-8", errors="backslashreplace"))
                end = file.seek(0, os.SEEK_END)
                try:
                    while rest:
                        rest = rest[file.write(rest) :]
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(end)  # remove the row that was written in part
                    raise
        except OSError as error:
            raise StoreError(
                f"cannot write {self.path}: {error.strerror or error}; rows written before are kept: make room or "
                "choose another --out"
            ) from None

    def _repair(self, file: BinaryIO) -> str:
        """Return the text to write before the next row: the missing part of the header, or the line end of a cut line.

        The text is empty if the file ends with a whole row.
        """
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


class MissingColumns(ValueError):
    """A CSV file lacks required columns."""


class RepeatedColumns(ValueError):
    """A CSV file has a column more than once, so the column's value is ambiguous."""


def read_rows(
    path: Path,
    columns: tuple[Column, ...] = METRICS,
    *,
    required: tuple[str, ...] = (),
    warn: Warn = warn_on_stderr,
) -> list[dict[str, Any]]:
    """Return the readable rows of a CSV file; an empty list for an empty file.

    A row maps column names to values. It has the columns that are both in the file and in `columns`. The value of an
    empty cell is None.

    Args:
        path: a file written by ``RowWriter`` or any other CSV writer, without line breaks inside cells.
        columns: the columns to read.
        required: names of columns that must not be empty in any row.
        warn: called with one sentence for every line that is skipped because the line is cut, a cell is unreadable, or
            a required cell is empty; by default the sentence is printed on stderr.

    Raises:
        OSError: the file cannot be read.
        MissingColumns: the file lacks required columns; a file that is not CSV lacks all of them.
        RepeatedColumns: the file has one of `columns` more than once.
    """
    text = path.read_bytes().decode("utf-8-sig", errors="replace")
    if not text:
        return []
    first, *lines = text.split("\n")  # no other character ends a line
    try:
        header = _cells(first)
    except ValueError:
        header = []  # not CSV, so it has none of the columns
    if missing := [name for name in required if name not in header]:
        raise MissingColumns(f"it has no column {', '.join(missing)}")
    if repeated := [column.name for column in columns if header.count(column.name) > 1]:
        raise RepeatedColumns(f"it has more than one column {', '.join(repeated)}")
    types = {column.name: column.type for column in columns}
    known = [(index, name, types[name]) for index, name in enumerate(header) if name in types]
    rows = []
    for number, line in enumerate(lines, start=2):
        if line.strip():
            try:
                cells = _cells(line)
                if len(cells) != len(header):
                    raise ValueError(f"it is cut or damaged ({len(cells)} cells under {len(header)} columns)")
                row = {name: _value(cells[index], type_) for index, name, type_ in known}
                if empty := [name for name in required if row[name] is None]:
                    raise ValueError(f"{', '.join(empty)} is empty")
                rows.append(row)
            except ValueError as error:
                warn(f"{path} line {number} is skipped: {error}")
    return rows


_value = functools.cache(from_cell)  # cached, because most cells have the same text as earlier cells


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line.rstrip("\r\n")], strict=True), [])
    except csv.Error as error:
        raise ValueError(f"it is cut or damaged ({error})") from None


def _line(cells: Iterable[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow([" ".join(cell.splitlines()) for cell in cells])
    return buffer.getvalue()
