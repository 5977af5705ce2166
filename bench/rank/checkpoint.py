"""Write and read one rank's part of checkpoints; a thread writes a copy of the state while training continues."""

from __future__ import annotations

import dataclasses
import datetime
import operator
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import torch
import torch.distributed as dist

from bench.core.checkpoints import Checkpoints, FileFacts, Manifest, cut_rows, row_bytes
from bench.core.config.run import RunConfig
from bench.core.errors import RunFailed
from bench.core.run_folder import RunFolder, read_json
from bench.datasets.base import Dataset, Samples
from bench.rank import data, partition
from bench.rank.data import Batches
from collectives.recoding import on_every_rank
from collectives.transport.process_group import gather_json
from gradwire.exchange.packed_state import PackedState, StateError, load_state


class CheckpointFailed(RunFailed):
    """A checkpoint could not be written or read; the message is one sentence for the user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """The part of a checkpoint that one rank reads when it resumes.

    Attributes:
        step: optimizer steps done when the checkpoint was made.
        states: this rank's saved state, as a list of one; if the number of ranks has changed, the saved states of all
            old ranks.
        waiting: if the number of ranks has changed, what happens to the gradient residuals that the old ranks have not
            sent: "sum" gives every new rank their mean, so that the mean over ranks stays the same; "drop" discards
            them. None if the number of ranks has not changed.
    """

    step: int
    states: list[dict[str, Any]]
    waiting: Waiting | None


class Checkpointer:
    """Writes and reads one rank's part of checkpoints; every rank must create one and call the same methods.

    Args:
        config: the run's configuration.
        folder: the run's folder on this machine.
    """

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        self._checkpoints = Checkpoints(folder)
        self._rank = dist.get_rank()
        # One rank per folder completes checkpoints. Virtual hosts share one folder; each machine has its own folder.
        self._completes = (int(os.environ["LOCAL_RANK"]) if config.nnodes > 1 else self._rank) == 0
        self._group: Any = None  # used by the thread only
        if config.checkpoint_every:
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=config.timeout_s))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None
        self._last_step: int | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Wait until the previous checkpoint is written; then copy this rank's state and write it in the background.

        Args:
            step: number of optimizer steps done.
            state: this rank's state.

        Raises:
            CheckpointFailed: the previous checkpoint could not be written.
        """
        self.wait()
        self._written = self._thread.submit(self._write, step, PackedState(state), row_bytes(self._folder))

    def wait(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            CheckpointFailed: the checkpoint could not be written.
        """
        if self._written is not None:
            self._written.result()

    def _write(self, step: int, packed: PackedState, rows: dict[str, int]) -> None:
        """Write this rank's file; when all ranks have written theirs, complete the checkpoint and remove older ones.

        Args:
            step: number of optimizer steps done.
            packed: this rank's state.
            rows: length in bytes of each of the run's CSV files at this step, by file name.
        """
        own: dict[str, int] | str
        try:
            own = vars(self._checkpoints.write(step, self._rank, packed.save))
        except OSError as error:
            own = str(error.strerror or error)
        own_node = self._config.node_rank
        everyone = gather_json([own_node, own], self._group)
        self._give_up(step, [facts if isinstance(facts, str) else None for _, facts in everyone])
        here = {rank: FileFacts(**facts) for rank, (node, facts) in enumerate(everyone) if node == own_node}
        why = None
        if self._completes:
            manifest = Manifest(
                digest=self._config.digest,
                run_id=self._folder.run_id,
                step=step,
                world_size=len(everyone),
                files=here,
                rows=rows,
            )
            try:
                self._checkpoints.complete(manifest)
            except OSError as error:
                why = str(error.strerror or error)
        self._give_up(step, gather_json(why, self._group))
        if self._completes:
            self._checkpoints.remove(operator.lt, step)  # other ranks may be writing newer ones
        self._last_step = step

    def _give_up(self, step: int, problems: list[str | None]) -> None:
        """Remove the checkpoint of a step if any rank could not write its part.

        Args:
            step: the optimizer step.
            problems: why each rank could not write its part, in rank order; None for a rank that wrote its part.

        Raises:
            CheckpointFailed: a rank could not write its part.
        """
        for rank, why in enumerate(problems):
            if why is not None:
                self._checkpoints.remove(operator.eq, step)
                raise CheckpointFailed(
                    f"the checkpoint of step {step} could not be written on rank {rank} ({why}); "
                    + (
                        "there is no earlier checkpoint: make room and start the run again"
                        if self._last_step is None
                        else f"the checkpoint of step {self._last_step} is kept: make room and resume with bench run "
                        f"--resume {self._folder.path}"
                    )
                )

    def restore(self, device: torch.device) -> Restored | None:
        """Read the newest checkpoint that all ranks have; return None if the run starts from the beginning.

        Once every rank has read its part, rows that were written after the checkpoint are removed. Every rank must call
        this method.

        Args:
            device: device on which the tensors of the state are placed.

        Raises:
            CheckpointFailed: a file is damaged, or only some of the machines resume.
        """
        resume = read_json(self._folder.resume)
        steps_of_ranks = gather_json(None if resume is None else self._checkpoints.steps())
        if all(steps is None for steps in steps_of_ranks):
            return None
        if None in steps_of_ranks and any(steps_of_ranks):
            raise CheckpointFailed(
                f"rank {steps_of_ranks.index(None)} starts the run, and other ranks resume from a checkpoint; give "
                "--resume on every machine, or start the run again on every machine"
            )
        step = max(set.intersection(*(set(steps or ()) for steps in steps_of_ranks)), default=None)
        manifest = None if step is None else self._checkpoints.manifest(step)
        restored = None
        if manifest is not None:
            is_resized = manifest.world_size != self._config.world_size
            states, problem = [], None
            try:
                for rank in range(manifest.world_size) if is_resized else [self._rank]:
                    states.append(self._read(manifest, rank, device))
            except CheckpointFailed as failure:
                problem = str(failure)
            if problems := [each for each in gather_json(problem) if each is not None]:
                raise CheckpointFailed(problems[0])
            restored = Restored(
                step=manifest.step, states=states, waiting=resume["waiting"] if resume and is_resized else None
            )
        if self._completes:
            cut_rows(self._folder, manifest.rows if manifest else {})
            if manifest is not None:
                self._checkpoints.remove(operator.ne, manifest.step)
        dist.barrier()
        self._last_step = step
        return restored

    def _read(self, manifest: Manifest, rank: int, device: torch.device) -> Any:
        file = self._checkpoints.file(manifest.step, rank)
        advice = "put it back from a copy, or start the run again"
        try:
            if FileFacts.of(file) != manifest.files[rank]:
                raise CheckpointFailed(f"{file} is damaged: its checksum is not the manifest's; {advice}")
            return load_state(file, device)
        except (OSError, StateError, KeyError) as error:
            raise CheckpointFailed(f"{file} cannot be read ({error}); {advice}") from None


Waiting = Literal["sum", "drop"]
RankState = dict[str, Any]


def resized(
    states: Sequence[RankState], config: RunConfig, rank: int, waiting: Waiting, dataset: Dataset, train: Samples
) -> RankState:
    """Return the state with which a rank resumes after the number of ranks has changed.

    Args:
        states: the old ranks' states, as the training loop saved them.
        config: the configuration with the new number of ranks.
        rank: the rank that resumes, among the new ranks.
        waiting: "sum" gives every new rank the mean of the old ranks' residuals and momentum buffers, so that the mean
            over ranks, which the optimizer applies, stays the same; "drop" discards them.
        dataset: the run's data set.
        train: all training samples.
    """
    state = states[rank % len(states)]
    batches = _redistributed([each["batches"][0] for each in states], config, rank, dataset, train)
    counts = {name: value for name, value in state["counts"].items() if not name.endswith("_at")}
    strategy = state["strategy"] | {
        "exchanges": [
            _exchange(parts, rank, waiting)
            for parts in zip(*(each["strategy"]["exchanges"] for each in states), strict=True)
        ]
    }
    if config.steps is None:
        counts |= {"step": batches["used"], "own_steps": batches["used"]}
    changed = {"strategy": strategy, "counts": counts, "batches": [batches]}
    if rank >= len(states):  # a new rank must not draw the same numbers as another rank
        changed["users_generators"] = None
    return state | changed


def _exchange(parts: Sequence[RankState], rank: int, waiting: Waiting) -> RankState:
    own = parts[rank % len(parts)]
    if "reducer" not in own:  # an exchange by DDP itself, which keeps no state
        return own

    def means(of: str, name: str) -> dict[Any, torch.Tensor]:
        return _means([part[of][name] for part in parts]) if waiting == "sum" else {}

    reducer = own["reducer"] | {name: means("reducer", name) for name in ("residuals", "velocities")}
    collective = own["collective"] and on_every_rank(means("collective", "residuals"))
    return own | {"reducer": reducer, "collective": collective}


def _means(by_rank: Sequence[dict[Any, torch.Tensor]]) -> dict[Any, torch.Tensor]:
    keys = {key: None for tensors in by_rank for key in tensors}  # a rank without the tensor counts as zeros
    return {
        key: torch.stack([tensors[key] for tensors in by_rank if key in tensors]).sum(dim=0) / len(by_rank)
        for key in keys
    }


def _redistributed(
    saved: Sequence[RankState], config: RunConfig, rank: int, dataset: Dataset, train: Samples
) -> RankState:
    """Return the state of a new rank's `Batches`, with the rank's share of the samples that the epoch has not used.

    Args:
        saved: the old ranks' states of `Batches`.
        config: the configuration with the new number of ranks.
        rank: the new rank.
        dataset: the run's data set.
        train: all training samples.
    """
    rest = []
    shards = partition.iid(len(train), len(saved), config.seed)  # only iid runs can change ranks
    for old_rank, state in enumerate(saved):
        batches = Batches(
            dataclasses.replace(config, replicas=len(saved)), dataset, train, shards, old_rank, torch.device("cpu")
        )
        batches.load_state_dict(state)
        rest.append(batches.unused())
    unused = data.order(torch.cat(rest), seed=config.seed, rank=len(saved), epoch=batches.epoch)
    num_left = len(unused) // config.replicas // config.samples_per_step
    per_epoch = data.steps_per_epoch(len(train), config.replicas, config.samples_per_step)
    used = (batches.epoch + 1) * per_epoch - num_left
    return {
        "used": used,
        "generator": data.augmentation_generator(config.seed, rank, batches.epoch).get_state(),
        "rest": [batches.epoch, used % per_epoch, unused[rank :: config.replicas]] if num_left else None,
    }
