"""Checkpoints of several ranks: one is there when all have written theirs, and a full disk keeps the one before."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.core.checkpoints import Checkpoints, FileFacts
from bench.core.run_folder import RunFolder, write_json
from bench.train.checkpoint import Checkpointer, CheckpointFailed
from tests.testing.configs import make_config
from tests.testing.ranks import run_ranks


def folder_at(path: str) -> RunFolder:
    folder = RunFolder(Path(path))
    folder.path.mkdir(exist_ok=True)
    return folder


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {"residual": torch.full((3,), 10.0 * rank + step), "rank": rank}


def told(folder: RunFolder, rank: int) -> None:
    """The run is to go on, and rank 0 has done what it does after a checkpoint."""
    if rank == 0:
        write_json(folder.resume, {"resumes": 1})
    dist.barrier()


def saving(rank: int, path: str) -> dict[str, Any]:
    """Two checkpoints; rank 1 finds no room for the third."""
    folder = folder_at(path)
    checkpointer = Checkpointer(make_config(checkpoint_every=1), folder)
    may_write = threading.Event()
    write = Checkpoints.write

    def slow(self: Checkpoints, step: int, of: int, parts: Any) -> FileFacts:
        may_write.wait()
        if (step, rank) == (3, 1):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, step, of, parts)

    Checkpoints.write = slow  # type: ignore[method-assign] # in this process alone
    state = state_of(rank, 1)
    checkpointer.save(1, state)
    state["residual"].zero_()  # training goes on while the file is still to be written
    before = Checkpoints(folder).steps()
    may_write.set()
    checkpointer.save(2, state_of(rank, 2))
    checkpointer.wait()
    told(folder, rank)
    after = Checkpoints(folder).steps()
    checkpointer.save(3, state_of(rank, 3))
    with pytest.raises(CheckpointFailed) as failure:
        checkpointer.wait()
    restored = checkpointer.restore(torch.device("cpu"))
    assert restored is not None
    (state,) = restored.states
    return {"before": before, "after": after, "failure": str(failure.value), "residual": state["residual"].tolist()}


def damaged(rank: int, path: str) -> str:
    """Rank 1's file changes after it was written."""
    folder = folder_at(path)
    checkpointer = Checkpointer(make_config(checkpoint_every=1), folder)
    checkpointer.save(1, state_of(rank, 1))
    checkpointer.wait()
    if rank == 1:
        file = Checkpoints(folder).file(1, 1)
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    told(folder, rank)
    try:
        checkpointer.restore(torch.device("cpu"))
    except CheckpointFailed as refusal:
        return str(refusal)
    return ""


def test_a_checkpoint_is_there_once_all_have_written_and_a_full_disk_keeps_the_one_before(tmp_path: Path) -> None:
    answers = run_ranks(saving, 2, tmp_path, args=(str(tmp_path / "run"),))
    for rank, answer in enumerate(answers):
        assert (answer["before"], answer["after"]) == ([], [2])
        assert answer["failure"].startswith(
            "rank 1 could not write the checkpoint of step 3 (No space left on device); the one of step 2 is kept: "
        )
        assert answer["residual"] == [10.0 * rank + 2] * 3


def test_a_file_that_has_changed_is_refused_by_its_rank(tmp_path: Path) -> None:
    first, second = run_ranks(damaged, 2, tmp_path, args=(str(tmp_path / "run"),))
    assert first == ""
    assert second.endswith("rank-1.state is damaged: its checksum is not the manifest's; put it back from a copy, or "
                           "begin the run anew")  # fmt: skip
