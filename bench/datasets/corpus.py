"""The files of a text: their hash, which of them are held out, and a copy of the whole that all processes map.

The copy is made once per machine, in the user's cache folder, and again when a file has another size or time. All
processes that map it share its memory. The user may delete the folder at any time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import mmap
import os
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import BinaryIO

from bench.core.errors import UsageError
from bench.core.files import locked, replacing
from bench.core.functions import HASH_DIGITS
from bench.datasets.base import DatasetError
from bench.datasets.folders import UNREADABLE, LeftOut, Listing, shown
from bench.datasets.split import held_out_among

# Changes whenever the same files would be split or stored in another way.
_RULE = 1
_UNUSED_S = 30 * 24 * 3600  # copies that were not used for this long are deleted
_LENGTH = 8  # bytes at the end of a copy that say how long its description is

# By the name in the column: module and options of the compressor.
_COMPRESSORS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "gzip": ("gzip", {"compresslevel": 9}),
    "bz2": ("bz2", {"compresslevel": 9}),
    "xz": ("lzma", {}),
}


@dataclasses.dataclass(frozen=True)
class Files:
    """The files that a text consists of.

    Attributes:
        folder: the folder that contains the files.
        choice: which of the folder's files belong to the text, in words.
        listing: name relative to `folder`, size and time of change of each file, sorted.
        left_out: (reason, name) of each file and folder that is not part of the text, sorted.
    """

    folder: Path
    choice: str
    listing: Listing
    left_out: LeftOut = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """A text, as its files were when it was copied.

    Attributes:
        folder: the folder that contains the files.
        sizes: bytes of each file by its name relative to `folder`, sorted.
        held_out: names of the files that are held out; empty if the last tenth of the whole text is held out.
        left_out: (reason, name) of each file and folder that is not part of the text, sorted.
        hash: first hexadecimal digits of the SHA-256 of the files' names, contents and sides.
        nbytes: (bytes of the training text, bytes of the held-out text).
        yardsticks: bits per byte of the held-out text for each of Python's compressors, by column name.
        content: the training text, then the held-out text, then a description.
    """

    folder: Path
    sizes: Mapping[str, int]
    held_out: frozenset[str]
    left_out: LeftOut
    hash: str
    nbytes: tuple[int, int]
    yardsticks: Mapping[str, float]
    content: mmap.mmap = dataclasses.field(repr=False, compare=False)

    def check_hash(self, expected: str) -> None:
        """Raise DatasetError if the text's hash is not `expected`; "any" accepts every text."""
        if expected not in ("any", self.hash):
            raise DatasetError(
                f"the text in {self.folder} has the hash {self.hash} instead of {expected}, so it has changed; restore "
                "it, or leave out hash and start a new run"
            )

    def check_content(self) -> None:
        """Raise DatasetError if the copy of the text is damaged: it no longer has the hash that it had."""
        digest, places = hashlib.sha256(), [0, self.nbytes[0]]
        with memoryview(self.content) as content:
            for name, size in self.sizes.items():
                start = places[name in self.held_out]
                _add(digest, name, content[start : start + size])
                places[name in self.held_out] += size
        if _hash(digest, self.held_out) != self.hash:
            raise DatasetError(f"the copy of the text in {_cache()} is damaged; delete this folder and start again")


@functools.lru_cache(maxsize=4)  # a file that changes gets another time
def corpus_of(files: Files) -> Corpus:
    """Return the text that the files contain; copy it, if there is no copy of these files on this machine yet.

    Raises:
        DatasetError: a file changes or disappears while it is copied, or there is no room for the copy.
    """
    folder, key = _cache(), hashlib.sha256(os.fsencode(f"{files.folder} {files.choice}")).hexdigest()[:16]
    path = folder / f"{key}.text"
    if (found := _opened(path, files)) is None:
        found = _copied_into(folder, path, files)
    if found is not None:
        with contextlib.suppress(OSError):  # a folder that cannot be written may hold a good copy
            os.utime(path)
        return found
    try:  # the copy is this process's own
        with tempfile.TemporaryFile() as file:
            _write(file, files)
            file.flush()
            return _mapped(file, files)
    except OSError as error:
        raise DatasetError(
            f"there is no room for a copy of the text in {files.folder} ({error.strerror}); free space in {_cache()} "
            f"or in {tempfile.gettempdir()}"
        ) from None


def _copied_into(folder: Path, path: Path, files: Files) -> Corpus | None:
    """Copy the text to a path in the cache folder; return None if the folder cannot be written or locked."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = folder / "lock"  # some network file systems lock files only
        lock.touch()
        with locked(lock, wait=True):
            if (found := _opened(path, files)) is None:
                _delete_unused(folder)
                with replacing(path) as temporary, temporary.open("w+b") as file:
                    _write(file, files)
                found = _opened(path, files)
            return found
    except DatasetError:
        raise
    except (OSError, UsageError):
        return None


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradwire" / "texts"


def _delete_unused(folder: Path) -> None:
    for path in folder.glob("*.text"):
        if path.stat().st_mtime < time.time() - _UNUSED_S:
            path.unlink()


def _opened(path: Path, files: Files) -> Corpus | None:
    """Return the text whose copy is at a path; None if there is none, or if it is of other files."""
    try:
        with path.open("rb") as file:
            return _mapped(file, files)
    except (OSError, ValueError):
        return None


def _mapped(file: BinaryIO, files: Files) -> Corpus:
    """Return the text whose copy is in an open file.

    Raises:
        ValueError: the copy is of other files.
    """
    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory that it could write
    length = int.from_bytes(content[-_LENGTH:])
    described = json.loads(content[-_LENGTH - length : -_LENGTH])
    if described.pop("of") != _identity(files):
        raise ValueError("a copy of other files")
    described["left_out"] = tuple(map(tuple, described["left_out"]))
    described["held_out"] = frozenset(described["held_out"])
    described["nbytes"] = tuple(described["nbytes"])
    return Corpus(folder=files.folder, content=content, **described)


def _identity(files: Files) -> str:
    return hashlib.sha256(repr((_RULE, files)).encode()).hexdigest()


def _write(file: BinaryIO, files: Files) -> None:
    """Split the files' text, and write it with its description, without a copy of the whole in memory."""
    sizes, left_out = {}, list(files.left_out)
    for name, _, _ in files.listing:
        try:
            content = (files.folder / name).read_bytes()
        except OSError:
            left_out.append((UNREADABLE, name))
            continue
        if _is_text(content):
            sizes[name] = len(content)
        else:
            left_out.append(("without UTF-8 text", name))
    total, read = sum(sizes.values()), functools.partial(_read, files.folder)
    held_out = held_out_among(sizes, read)
    num_held_out = sum(sizes[name] for name in held_out) if held_out else total // 10
    digest, places = hashlib.sha256(), [0, total - num_held_out]
    for name, size in sizes.items():
        content = read(name)
        if len(content) != size:
            raise DatasetError(f"{shown(str(files.folder / name))} changes while it is read; try again later")
        _add(digest, name, content)
        file.seek(places[name in held_out])
        file.write(content)
        places[name in held_out] += size
    file.seek(total - num_held_out)
    described = {
        "of": _identity(files),
        "sizes": sizes,
        "held_out": sorted(held_out),
        "left_out": sorted(left_out),
        "hash": _hash(digest, held_out),
        "nbytes": (total - num_held_out, num_held_out),
        "yardsticks": _compressed(file.read()),
    }
    description = json.dumps(described).encode()
    file.write(description + len(description).to_bytes(_LENGTH))


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        path = shown(str(folder / name))
        raise DatasetError(f"{path} could be read before, but not now ({error.strerror}); restore it") from None


def _add(digest: hashlib._Hash, name: str, content: bytes | memoryview) -> None:
    digest.update(b"%b\0%d\0" % (os.fsencode(name), len(content)))
    digest.update(content)


def _hash(digest: hashlib._Hash, held_out: Collection[str]) -> str:
    for name in sorted(held_out):
        digest.update(b"held out %b\0" % os.fsencode(name))
    return digest.hexdigest()[:HASH_DIGITS]


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _compressed(text: bytes) -> dict[str, float]:
    found = {}
    for name, (module, options) in _COMPRESSORS.items() if text else ():
        with contextlib.suppress(ImportError):  # Python can be built without it
            size = len(importlib.import_module(module).compress(text, **options))
            found[f"{name}_bits_per_byte"] = 8 * size / len(text)
    return found
