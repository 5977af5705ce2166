"""Rows: appending to and reading back the CSV files of a run, so that no crash costs more than the row being written.

A row is one line: texts lose their line breaks on the way in. Every line can therefore be read for itself, and a torn
line (the machine went down, the disk was full) never takes its neighbours along.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from bench.core.errors import RunFailed
from bench.core.schema.cells import from_cell, to_cells
from bench.core.schema.column import Column
from bench.core.schema.metrics import METRICS

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


class MissingColumns(ValueError):
    """A file lacks columns without which its rows say nothing.

    Attributes:
        names: what it lacks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"it has no column {', '.join(names)}")
        self.names = names


class RepeatedColumns(ValueError):
    """A file has a column more than once, so that nothing says which of its values counts."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"it has more than one column {', '.join(names)}")


def read_rows(
    path: Path,
    columns: tuple[Column, ...] = METRICS,
    *,
    required: tuple[str, ...] = (),
    warn: Warn = warn_on_stderr,
) -> list[dict[str, Any]]:
    """The rows of a CSV file, as far as they can be read; none of an empty file.

    Columns that the schema does not know are left out, columns that the file lacks are missing in the rows, empty
    cells are None.

    Args:
        path: a file that ``RowWriter`` or any other CSV writer made (no line breaks inside cells).
        columns: the schema of the rows.
        required: columns that every row must fill.
        warn: told one sentence for every line that is skipped because it is cut, a cell is unreadable or one that is
            required is empty; by default the sentence goes to stderr.

    Raises:
        OSError: the file cannot be read.
        MissingColumns: the file lacks required columns; of a file that is no CSV file at all, all of them.
        RepeatedColumns: the file has a column of the schema twice.
    """
    lines = _lines(path)
    if not lines:
        return []
    reader = _reader(lines[0], columns, required)
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if line:
            try:
                rows.append(reader.read(line))
            except ValueError as error:
                warn(f"{path} line {number} is skipped: {error}")
    return rows


@functools.cache
def _reader(header: str, columns: tuple[Column, ...], required: tuple[str, ...]) -> RowReader:
    return RowReader(_header(header), columns, required)


def _header(line: str) -> list[str]:
    try:
        return _cells(line)
    except ValueError:
        return []  # a foreign file like any other: it has none of the columns


class _Values(dict[str, Any]):
    """Cell -> value of one column; a text that comes again, as most do, is checked and converted once."""

    def __init__(self, column: Column) -> None:
        self._column = column

    def __missing__(self, cell: str) -> Any:
        value = self[cell] = from_cell(cell, self._column.type)
        return value


@functools.cache
def _values_of(column: Column) -> _Values:
    return _Values(column)


class RowReader:
    """Turns lines under one header into rows.

    Args:
        header: names of the cells.
        columns: the schema of the rows; cells of other names are left out.
        required: columns that every row must fill.

    Raises:
        MissingColumns: the header lacks some of these.
        RepeatedColumns: the header has a column of the schema twice.
    """

    def __init__(self, header: list[str], columns: tuple[Column, ...], required: Sequence[str] = ()) -> None:
        if missing := [name for name in required if name not in header]:
            raise MissingColumns(missing)
        if repeated := [column.name for column in columns if header.count(column.name) > 1]:
            raise RepeatedColumns(repeated)
        self._required = required
        by_name = {column.name: column for column in columns}
        self._empty = dict.fromkeys(name for name in header if name in by_name)
        self._num_cells = len(header)
        self._known = [name in by_name for name in header]
        self._names = [name for name in header if name in by_name]
        self._values = [_values_of(by_name[name]) for name in self._names]

    def read(self, line: str) -> dict[str, Any]:
        """One row.

        Raises:
            ValueError: the line is cut or damaged, a cell does not hold its column's type, or a required one is empty.
        """
        cells = _cells(line)
        if len(cells) != self._num_cells:
            raise ValueError(f"it is cut or damaged ({len(cells)} cells under {self._num_cells} columns)")
        known = itertools.compress(cells, self._known)
        row = self._empty.copy()
        row.update(zip(self._names, map(operator.getitem, self._values, known), strict=True))
        if empty := [name for name in self._required if row[name] is None]:
            raise ValueError(f"{', '.join(empty)} is empty")
        return row


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
