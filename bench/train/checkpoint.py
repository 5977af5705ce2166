"""Checkpoints of one rank: its state is copied in memory, and written by a thread while training goes on."""

from __future__ import annotations

import dataclasses
import datetime
import os
import threading
import zlib
from typing import Any, cast

import torch
import torch.distributed as dist

from bench.core.checkpoints import Checkpoints, FileFacts, Manifest, cut_rows, row_bytes
from bench.core.config.run import RunConfig
from bench.core.errors import RunFailed
from bench.core.run_folder import RunFolder, read_json
from bench.train.gather import gather_json
from bench.train.resizing import Waiting
from compressors.ddp.packed_state import PackedState, StateError, unpack_state


class CheckpointFailed(RunFailed):
    """A checkpoint could not be written or read; one sentence for the user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint gives a rank that goes on.

    Attributes:
        step: after which it was made.
        states: its own; where there are other ranks now than there were then, those of all ranks of then.
        waiting: in that case, what becomes of what waits to be sent; else None.
    """

    step: int
    states: list[dict[str, Any]]
    waiting: Waiting | None


class Checkpointer:
    """Writes a rank's part of the run's checkpoints; every rank must make one, and call the same methods.

    Args:
        config: of the run.
        folder: of the run on this machine.
    """

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        self._checkpoints = Checkpoints(folder)
        self._rank = dist.get_rank()
        # On virtual hosts all ranks share a folder; machines have one each.
        self._completes = (int(os.environ["LOCAL_RANK"]) if config.nnodes > 1 else self._rank) == 0
        self._group: dist.ProcessGroup | None = None  # the thread's own
        if config.checkpoint_every:
            timeout = datetime.timedelta(seconds=config.timeout_s)
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._last_step: int | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin a checkpoint; returns when the state is copied, and the checkpoint before it written.

        Args:
            step: optimizer steps done.
            state: of this rank.

        Raises:
            CheckpointFailed: the one before could not be written.
        """
        self.wait()
        packed = PackedState(state, copy=True)
        rows = row_bytes(self._folder)
        self._thread = threading.Thread(target=self._write, args=(step, packed, rows), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            CheckpointFailed: the last one could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def _write(self, step: int, packed: PackedState, rows: dict[str, int]) -> None:
        try:
            self._complete(step, self._write_own(step, packed), rows)
        except Exception as error:  # noqa: BLE001 - raised by the next call
            self._failure = error

    def _write_own(self, step: int, packed: PackedState) -> FileFacts | OSError:
        try:
            return self._checkpoints.write(step, self._rank, packed.parts())
        except OSError as error:
            return error

    def _complete(self, step: int, own: FileFacts | OSError, rows: dict[str, int]) -> None:
        """Make a checkpoint of what all ranks have written, and remove the one before."""
        told = str(own.strerror or own) if isinstance(own, OSError) else vars(own)
        everyone = gather_json([self._config.node_rank, told], self._group)
        self._give_up(step, [what if isinstance(what, str) else None for _, what in everyone])
        own_node = self._config.node_rank
        here = {rank: FileFacts(**facts) for rank, (node, facts) in enumerate(everyone) if node == own_node}
        manifest = Manifest(
            digest=self._config.digest,
            run_id=self._folder.run_id,
            step=step,
            world_size=len(everyone),
            files=here,
            rows=rows,
        )
        self._give_up(step, gather_json(self._write_manifest(manifest), self._group))  # else all machines have it
        if self._completes:
            self._checkpoints.prune(before=step)
        self._last_step = step

    def _write_manifest(self, manifest: Manifest) -> str | None:
        """Why it could not be written, on the rank that writes it."""
        try:
            if self._completes:
                self._checkpoints.complete(manifest)
        except OSError as error:
            return str(error.strerror or error)
        return None

    def _give_up(self, step: int, problems: list[str | None]) -> None:
        """Remove the checkpoint if a rank, in the order of which they come, had a problem with it.

        Raises:
            CheckpointFailed: one had.
        """
        for rank, why in enumerate(problems):
            if why is not None:
                self._checkpoints.discard(step)
                raise CheckpointFailed(self._sentence(step, rank, why))

    def _sentence(self, step: int, rank: int, why: str) -> str:
        if self._last_step is None:
            advice = "there is none before: make room and begin the run anew"
        else:
            path = self._folder.path
            advice = f"the one of step {self._last_step} is kept: make room and go on with bench run --resume {path}"
        return f"the checkpoint of step {step} could not be written on rank {rank} ({why}); {advice}"

    def restore(self, device: torch.device) -> Restored | None:
        """What the newest checkpoint that all ranks have gives to this one, if the run goes on; None: it begins.

        Once every rank has read its part, rows that were written after the checkpoint are removed.

        Raises:
            CheckpointFailed: a file is damaged, or only some of the machines go on.
        """
        told = read_json(self._folder.resume)
        having = gather_json(None if told is None else self._checkpoints.steps())
        if all(steps is None for steps in having):
            return None
        if None in having and any(having):
            raise CheckpointFailed(
                f"rank {having.index(None)} begins the run, and others go on from a checkpoint; give --resume on every "
                "machine, or begin anew on every one"
            )
        step = max(set.intersection(*(set(steps or ()) for steps in having)), default=None)
        manifest = None if step is None else self._checkpoints.manifest(step)
        restored = None if manifest is None else self._read_together(manifest, told or {}, device)
        if self._completes:
            cut_rows(self._folder, manifest.rows if manifest else {})
            if manifest is not None:
                self._checkpoints.prune_others(manifest.step)
        dist.barrier()
        self._last_step = step
        return restored

    def _read_together(self, manifest: Manifest, told: dict[str, Any], device: torch.device) -> Restored:
        """What this rank needs of a checkpoint, if every rank can read what it needs."""
        restored, problem = None, None
        try:
            restored = self._read_needed(manifest, told, device)
        except CheckpointFailed as failure:
            problem = str(failure)
        if problems := [each for each in gather_json(problem) if each is not None]:
            raise CheckpointFailed(problems[0])
        assert restored is not None
        return restored

    def _read_needed(self, manifest: Manifest, told: dict[str, Any], device: torch.device) -> Restored:
        if manifest.world_size == self._config.world_size:
            return Restored(step=manifest.step, states=[self._read(manifest, self._rank, device)], waiting=None)
        states = [self._read(manifest, rank, device) for rank in range(manifest.world_size)]
        return Restored(step=manifest.step, states=states, waiting=told["waiting"])

    def _read(self, manifest: Manifest, rank: int, device: torch.device) -> dict[str, Any]:
        file = self._checkpoints.file(manifest.step, rank)
        advice = "put it back from a copy, or begin the run anew"
        try:
            packed = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
            if zlib.crc32(packed.numpy().data) != manifest.files[rank].crc32:
                raise CheckpointFailed(f"{file} is damaged: its checksum is not the manifest's; {advice}")
            state: dict[str, Any] = unpack_state(packed, device)
        except (OSError, RuntimeError, StateError, KeyError) as error:
            raise CheckpointFailed(f"{file} cannot be read ({error}); {advice}") from None
        return state


def resumes_of(folder: RunFolder) -> int:
    """How often the run went on from a checkpoint."""
    told = read_json(folder.resume)
    return int(told["resumes"]) if told else 0
