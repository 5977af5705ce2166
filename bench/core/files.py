"""Check, find, create and read files and folders that a user names; every mistake of the user is a `UsageError`.

Pipes and devices are refused before they are opened, because reading from them or writing to them might never end.
"""

import contextlib
import fcntl
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.core.errors import UsageError


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a file or folder exclusively while the block runs; yield True if this process holds the lock.

    Args:
        path: the file or folder, which must exist.
        wait: True to wait until the lock is free. If False, the block runs at once, and the yielded value is False if
            another process holds the lock.

    Raises:
        UsageError: the file system does not support locks.
    """
    # Some network file systems lock only files opened for writing; a folder cannot be opened for writing.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    is_held = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            is_held = False
        except OSError as error:
            raise UsageError(
                f"{path} cannot be locked: {error.strerror or error}; choose a folder on a file system with locks"
            ) from None
        yield is_held
    finally:
        os.close(descriptor)


def check_regular(path: Path) -> None:
    """Refuse a path that is a folder, a pipe or a device; accept a file, and a path that does not exist yet.

    Raises:
        UsageError: "x.csv is not a regular file; give the path of a file".
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file; give the path of a file")


def check_writable(path: Path) -> None:
    """Check that a file can be written, before its content is computed; an existing file is not changed.

    Raises:
        UsageError: "cannot write x.json: Permission denied; choose another file".
    """
    with writing(path, "file"):
        check_regular(path)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()


@contextlib.contextmanager
def writing(path: Path, option: str = "--out") -> Iterator[None]:
    """Turn an `OSError` of the block, which writes `path`, into an error that names the option to change.

    Raises:
        UsageError: "cannot write x.json: Permission denied; choose another --out".
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another {option}") from None


def walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield (path, folder names, file names) for a folder and all folders below it, like `os.walk`, sorted by name.

    Folders whose names begin with a dot are left out. Links to folders are followed, but no folder is visited twice.
    """
    seen = set()
    for path, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if (real := os.path.realpath(path)) in seen:
            folders.clear()
        else:
            seen.add(real)
            yield Path(path), folders, sorted(files)


def files_below(folder: Path, name: str) -> list[Path]:
    """Return the sorted paths of all files with this name in a folder, at any depth."""
    return sorted(path / name for path, _, files in walk(folder) if name in files)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, unless they exist.

    Raises:
        UsageError: "cannot make the folder x: Permission denied; choose another --out".
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror or error}; choose another --out") from None


def sync_folder(path: Path) -> None:
    """Wait until the names of a folder's files, including new and changed names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file; at the end of the block, sync that file and atomically rename it to `path`.

    If the block or the renaming fails, `path` keeps its old content.

    Raises:
        OSError: the disk is full or the file cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the content of a TOML file.

    Args:
        path: the file.
        what: kind of file, such as "cluster file", for error messages.

    Raises:
        UsageError: the file cannot be read, or is not TOML.
    """
    check_regular(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"the {what} {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number too long, nested too deeply
        raise UsageError(f"{path} is not TOML: {error}") from None


def tables(content: Mapping[str, Any], name: str, *, where: str) -> list[Mapping[str, Any]]:
    """Return the tables under the heading [[name]] of a TOML file; an empty list if there are none.

    Args:
        content: content of the file.
        name: the heading.
        where: path of the file, for error messages.

    Raises:
        UsageError: the key `name` holds something other than tables.
    """
    found = content.get(name, [])
    if isinstance(found, list) and all(isinstance(table, dict) for table in found):
        return found
    raise UsageError(f"{where}: write each {name} as its own table under the heading [[{name}]]")


def refuse_unknown(table: Mapping[str, Any], known: Collection[str], *, where: str) -> None:
    """Check that a TOML table has only known keys.

    Raises:
        UsageError: "x.toml: there is no 'hots' (did you mean 'host'?); known are ...".
    """
    from collectives.options import did_you_mean  # imported only when needed, because it imports pydantic

    for key in table:
        if key not in known:
            raise UsageError(f"{where}: there is no '{key}'{did_you_mean(key, known)}; known are {', '.join(known)}")


def whole_number(value: object, *, where: str) -> int:
    """Return a value of a TOML file, after checking that it is a whole number of at least 1.

    Raises:
        UsageError: "x.toml: count=0 is not possible; give a whole number of at least 1".
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{where}={value!r} is not possible; give a whole number of at least 1")
    return value


def text(table: Mapping[str, Any], key: str, default: str | None, *, where: str) -> str:
    """Return the text under a key of a TOML table, or the default if the key is missing.

    Raises:
        UsageError: the value is not text or is blank, or the key is missing and there is no default.
    """
    value = table.get(key, default)
    if value is None:
        raise UsageError(f'{where} has no {key}; add a line like {key} = "..."')
    if not (isinstance(value, str) and value.strip()):
        raise UsageError(f'{where}: {key}={value!r} is not text; write it like {key} = "..."')
    return value
