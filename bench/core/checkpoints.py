"""Write, check and remove the checkpoints of a run folder.

A checkpoint is a folder with one safetensors file per rank of this machine and a manifest, `manifest.json`. The
manifest is written last; a checkpoint without a manifest is incomplete and ignored. Every file is first written under a
temporary name, then synced to disk, then renamed.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pydantic

from bench.core.config.run import RunConfig
from bench.core.environment import version_of
from bench.core.errors import UsageError
from bench.core.files import replacing, sync_folder
from bench.core.run_folder import RunFolder, read_json, write_json

FORMAT = 6
_MANIFEST = "manifest.json"
_MARK = "bench checkpoint"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileFacts:
    """Length and checksum of a file.

    Attributes:
        nbytes: length in bytes.
        crc32: CRC-32 of the content.
    """

    nbytes: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read a file and return its length and checksum."""
        crc32 = 0
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                crc32 = zlib.crc32(block, crc32)
            return cls(nbytes=file.tell(), crc32=crc32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint's `manifest.json`.

    Attributes:
        digest: digest of the run's configuration.
        run_id: name of the run's folder.
        step: optimizer steps done when the checkpoint was made.
        world_size: number of ranks of the whole job.
        files: length and checksum of each rank's file on this machine, by rank.
        rows: length in bytes of each of the run's CSV files when the checkpoint was made, by file name.
    """

    digest: str
    run_id: str
    step: int
    world_size: int
    files: dict[int, FileFacts]
    rows: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Reads, writes and removes the checkpoints of one run.

    Attributes:
        folder: the run's folder.
    """

    folder: RunFolder

    def at(self, step: int) -> Path:
        """Return the folder of the checkpoint that was made after optimizer step `step`."""
        return self.folder.checkpoints / f"step-{step:09d}"

    def file(self, step: int, rank: int) -> Path:
        """Return the path of a rank's file in the checkpoint that was made after optimizer step `step`."""
        return self.at(step) / f"rank-{rank}.safetensors"

    def steps(self) -> list[int]:
        """Return the step number of each complete checkpoint (optimizer steps done when it was made), newest first."""
        folders = (manifest.parent for manifest in self.folder.checkpoints.glob(f"step-*/{_MANIFEST}"))
        steps = (folder.name.removeprefix("step-") for folder in folders)
        return sorted((int(step) for step in steps if step.isdecimal()), reverse=True)

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of the checkpoint that was made after optimizer step `step`.

        Raises:
            UsageError: the file cannot be read, is not a manifest, or was written by a version with another format.
        """
        path = self.at(step) / _MANIFEST
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("kind") != _MARK:
                raise ValueError("another program wrote it")
            form, version = values.pop("format"), values.pop("version")
            if form == FORMAT:
                return pydantic.TypeAdapter(Manifest).validate_python(values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, pydantic.ValidationError):
                first = error.errors()[0]
                why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise UsageError(
                f"{path} is not a checkpoint's manifest ({why}); remove {path.parent}, and training resumes from an "
                "older checkpoint or starts again"
            ) from None
        raise UsageError(
            f"{path.parent} was written by gradwire {version} in format {form}, and this version reads format "
            f"{FORMAT}; resume the run with gradwire {version}, or start it again"
        )

    def check(self, step: int, config: RunConfig) -> Manifest:
        """Check that the run can resume from the checkpoint of step `step`; return the checkpoint's manifest.

        The manifest's digest must equal `config.digest`, or the digest that the run had before its number of ranks
        changed. Each rank's file must have the length that the manifest states; the file's content is not read.

        Raises:
            UsageError: the checkpoint belongs to another run or configuration, or files or rows are missing.
        """
        manifest, path = self.manifest(step), self.at(step)
        digests = (config.digest, (read_json(self.folder.resume) or {}).get("digest_before"))
        if manifest.digest not in digests or manifest.run_id != self.folder.run_id:
            raise UsageError(
                f"{path} belongs to run {manifest.run_id} ({manifest.digest}), but config.json here has digest "
                f"{config.digest}; put the run's own config.json and checkpoints back, or start the run again"
            )
        for rank, facts in manifest.files.items():
            file = self.file(step, rank)
            if not file.is_file() or file.stat().st_size != facts.nbytes:
                raise UsageError(
                    f"{file} is cut or missing (it had {facts.nbytes} bytes); put it back, or start the run again"
                )
        for name, nbytes in manifest.rows.items():
            rows = self.folder.path / name
            if not rows.is_file() or rows.stat().st_size < nbytes:
                raise UsageError(
                    f"{rows} lacks rows that were there at the checkpoint; put the file back, or start the run again"
                )
        return manifest

    def complete(self, manifest: Manifest) -> None:
        """Complete a checkpoint by writing its manifest, which also names the format and this package's version."""
        head = {"kind": _MARK, "format": FORMAT, "version": version_of("gradwire")}
        write_json(self.at(manifest.step) / _MANIFEST, head | dataclasses.asdict(manifest))

    def write(self, step: int, rank: int, save: Callable[[Path], object]) -> FileFacts:
        """Write one rank's file of a checkpoint and sync it to disk; return the file's length and checksum.

        Args:
            step: number of optimizer steps done.
            rank: the rank.
            save: writes the file to the path that it is called with.

        Raises:
            OSError: the disk is full or the file cannot be written; then no part of the file is left.
        """
        self.at(step).mkdir(parents=True, exist_ok=True)
        with replacing(self.file(step, rank)) as temporary:
            save(temporary)
            temporary.chmod(self.at(step).stat().st_mode & 0o666)  # as umask asks; safetensors lets only the owner read
            facts = FileFacts.of(temporary)
        sync_folder(self.folder.checkpoints)
        sync_folder(self.folder.path)
        return facts

    def remove(self, compare: Callable[[str, str], bool], step: int) -> None:
        """Remove the checkpoints, complete or incomplete, that `compare` selects; skip files that cannot be removed.

        No rank may be writing a selected checkpoint.

        Args:
            compare: called with two folder names: a checkpoint's, and the one of `step`. If it returns True, the
                first checkpoint is removed. For example, `operator.lt` removes checkpoints older than `step`.
            step: optimizer step of the checkpoint to compare with.
        """
        for path in list(self.folder.checkpoints.glob("step-*")):
            if compare(path.name, self.at(step).name):
                with contextlib.suppress(OSError):
                    (path / _MANIFEST).unlink(missing_ok=True)  # first: without it, a half-removed folder is incomplete
                shutil.rmtree(path, ignore_errors=True)


def cut_rows(folder: RunFolder, rows: dict[str, int]) -> None:
    """Truncate the run's CSV files to the rows written before a checkpoint.

    Args:
        folder: the run's folder.
        rows: number of bytes to keep of each CSV file, by file name. An empty dict means that there is no checkpoint;
            then all rows and `choices.jsonl` are removed.
    """
    for path in folder.tables:
        if path.exists():
            os.truncate(path, rows.get(path.name, 0))
    if not rows:
        folder.choices.unlink(missing_ok=True)


def row_bytes(folder: RunFolder) -> dict[str, int]:
    """Return the length in bytes of each of the run's CSV files that exists, by file name."""
    return {path.name: path.stat().st_size for path in folder.tables if path.exists()}
