"""Checkpoints: which of them a run folder holds, and whether training can go on from one.

A checkpoint is a folder with one file per rank of this machine and a manifest, which is written last: without it there
is no checkpoint. Files are written under another name, synced, and renamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

import pydantic

from bench.core.config.run import RunConfig
from bench.core.environment import version_of
from bench.core.errors import UsageError
from bench.core.run_folder import RunFolder, read_json

FORMAT = 3
_MANIFEST = "manifest.json"
_MARK = "bench checkpoint"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileFacts:
    """A file as it was written.

    Attributes:
        nbytes: its length.
        crc32: of its bytes.
    """

    nbytes: int
    crc32: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        digest: of the run's configuration.
        run_id: of the run.
        step: optimizer steps that were done.
        world_size: ranks of the whole job.
        files: by rank, those that lie on this machine.
        rows: bytes of each CSV file that were written before it.
    """

    digest: str
    run_id: str
    step: int
    world_size: int
    files: dict[int, FileFacts]
    rows: dict[str, int]

    def to_json(self) -> str:
        """As a text; says which form it has and what wrote it."""
        head = {"kind": _MARK, "format": FORMAT, "version": version_of("gradwire")}
        return json.dumps(head | dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `to_json` wrote.

        Raises:
            UsageError: it is none, or of another version.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("kind") != _MARK:
                raise ValueError("it is another program's")
            form, version = values.pop("format"), values.pop("version")
            if form != FORMAT:
                raise UsageError(
                    f"{path.parent} was written by gradwire {version} in form {form}, and this version reads form "
                    f"{FORMAT}; go on with gradwire {version}, or begin the run anew"
                )
            return pydantic.TypeAdapter(cls).validate_python(values)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise _no_manifest(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise _no_manifest(path, f"{type(error).__name__}: {error}") from None


def _no_manifest(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} is no manifest of a checkpoint ({why}); remove {path.parent}, and training goes on from an older one "
        "or begins anew"
    )


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._path = folder.checkpoints

    def at(self, step: int) -> Path:
        """The folder of the checkpoint that is made after so many steps."""
        return self._path / f"step-{step:09d}"

    def file(self, step: int, rank: int) -> Path:
        """A rank's file."""
        return self.at(step) / f"rank-{rank}.state"

    def steps(self) -> list[int]:
        """Steps after which there is a whole one, newest first."""
        found = []
        for manifest in self._path.glob(f"step-*/{_MANIFEST}"):
            with contextlib.suppress(ValueError):
                found.append(int(manifest.parent.name.removeprefix("step-")))
        return sorted(found, reverse=True)

    def manifest(self, step: int) -> Manifest:
        """What the checkpoint says of itself.

        Raises:
            UsageError: it is none, or of another version.
        """
        return Manifest.read(self.at(step) / _MANIFEST)

    def check(self, step: int, config: RunConfig) -> Manifest:
        """The manifest, if the run can go on from this checkpoint as far as can be seen without reading all of it.

        It is of this configuration, or of the one that the run had until its number of ranks was changed.

        Raises:
            UsageError: it cannot.
        """
        manifest, path = self.manifest(step), self.at(step)
        digests = (config.digest, (read_json(self._folder.resume) or {}).get("digest_before"))
        if manifest.digest not in digests or manifest.run_id != self._folder.run_id:
            raise UsageError(
                f"{path} belongs to run {manifest.run_id} ({manifest.digest}), and the configuration here is "
                f"{config.digest}; put the run's own config.json and checkpoints back, or begin the run anew"
            )
        for rank, facts in manifest.files.items():
            file = self.file(step, rank)
            if not file.is_file() or file.stat().st_size != facts.nbytes:
                raise UsageError(
                    f"{file} is cut or missing (it had {facts.nbytes} bytes); put it back, or begin the run anew"
                )
        for name, nbytes in manifest.rows.items():
            rows = self._folder.path / name
            if not rows.is_file() or rows.stat().st_size < nbytes:
                raise UsageError(
                    f"{rows} lacks rows that were there at the checkpoint; put the file back, or begin the run anew"
                )
        return manifest

    def complete(self, manifest: Manifest) -> None:
        """Write the manifest: from now on there is this checkpoint."""
        with _written(self.at(manifest.step) / _MANIFEST) as file:
            file.write(manifest.to_json().encode())

    def write(self, step: int, rank: int, parts: Iterable[memoryview]) -> FileFacts:
        """Write a rank's file; it is on the disk when this returns.

        Raises:
            OSError: the disk is full or the file cannot be written; nothing of it is left.
        """
        self.at(step).mkdir(parents=True, exist_ok=True)
        nbytes = crc32 = 0
        with _written(self.file(step, rank)) as file:
            for part in parts:
                file.write(part)
                nbytes, crc32 = nbytes + part.nbytes, zlib.crc32(part, crc32)
        _sync_folder(self._path)
        _sync_folder(self._folder.path)
        return FileFacts(nbytes=nbytes, crc32=crc32)

    def prune(self, before: int) -> None:
        """Remove the checkpoints before the one after so many steps; other ranks may be writing the next meanwhile."""
        self._remove(path for path in self._path.glob("step-*") if path.name < self.at(before).name)

    def prune_others(self, step: int) -> None:
        """Remove all checkpoints but one, whole or not; nobody may be writing."""
        self._remove(path for path in self._path.glob("step-*") if path != self.at(step))

    def _remove(self, paths: Iterable[Path]) -> None:
        """What cannot be removed stays."""
        for path in list(paths):
            with contextlib.suppress(OSError):
                (path / _MANIFEST).unlink(missing_ok=True)  # first, or half of one would pass for whole
            shutil.rmtree(path, ignore_errors=True)

    def discard(self, step: int) -> None:
        """Remove what was written of a checkpoint that was not completed everywhere."""
        self._remove([self.at(step)])


def cut_rows(folder: RunFolder, rows: dict[str, int]) -> None:
    """Take away the rows that were written after a checkpoint; without one, all of them, and what `auto` chose.

    Args:
        folder: the run's.
        rows: bytes of each CSV file that stay.
    """
    for path in (folder.metrics, folder.layers, folder.links):
        if path.exists():
            os.truncate(path, rows.get(path.name, 0))
    if not rows:
        folder.choices.unlink(missing_ok=True)


def row_bytes(folder: RunFolder) -> dict[str, int]:
    """Bytes of each CSV file that there is."""
    files = (folder.metrics, folder.layers, folder.links)
    return {path.name: path.stat().st_size for path in files if path.exists()}


def _sync_folder(path: Path) -> None:
    """Wait until the disk knows the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends, all at once; nothing of it where that fails."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
