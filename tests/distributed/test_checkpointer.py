"""Checkpoints of several ranks: complete once all have written their files; a full disk keeps the previous one."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.core.checkpoints import Checkpoints, FileFacts
from bench.core.run_folder import RunFolder, write_json
from bench.rank.checkpoint import Checkpointer, CheckpointFailed
from tests.testing.configs import make_config
from tests.testing.ranks import run_ranks


def folder_at(path: str) -> RunFolder:
    folder = RunFolder(Path(path))
    folder.path.mkdir(exist_ok=True)
    return folder


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {"residual": torch.full((3,), 10.0 * rank + step), "rank": rank}


def told(folder: RunFolder, rank: int) -> None:
    """Mark the run as resumed on rank 0; the other ranks wait."""
    if rank == 0:
        write_json(folder.resume, {"resumes": 1})
    dist.barrier()


def saving(rank: int, path: str) -> dict[str, Any]:
    """Save two checkpoints; rank 1 has no space for the third."""
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
    state["residual"].zero_()  # training continues before the file is written
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


def refusal_of(action: Callable[[], object]) -> str:
    try:
        action()
    except CheckpointFailed as refusal:
        return str(refusal)
    return ""


def damaged(rank: int, path: str) -> dict[str, Any]:
    """Change rank 1's file of step 2 after it was written, while that of step 1 still exists; add later rows."""
    folder = folder_at(path)
    checkpointer = Checkpointer(make_config(checkpoint_every=1), folder)
    checkpointer.save(1, state_of(rank, 1))
    checkpointer.wait()
    Checkpoints.remove = lambda *_: None  # type: ignore[method-assign] # in this process alone
    checkpointer.save(2, state_of(rank, 2))
    checkpointer.wait()
    if rank == 1:
        file = Checkpoints(folder).file(2, 1)
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
        folder.metrics.write_text("step\n2\n")
    told(folder, rank)
    refusal = refusal_of(lambda: checkpointer.restore(torch.device("cpu")))
    return {"refusal": refusal, "steps": Checkpoints(folder).steps(), "rows": folder.metrics.read_text()}


def without_room_for_the_manifest(rank: int, path: str) -> list[str]:
    """Let the disk be full for the manifest only: without an earlier checkpoint, and with one."""
    folder = folder_at(path)
    checkpointer = Checkpointer(make_config(checkpoint_every=1), folder)
    complete = Checkpoints.complete

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save(step: int) -> str:
        checkpointer.save(step, state_of(rank, step))
        return refusal_of(checkpointer.wait)

    Checkpoints.complete = full  # type: ignore[method-assign] # in this process alone
    first = save(1)
    Checkpoints.complete = complete  # type: ignore[method-assign]
    checkpointer = Checkpointer(make_config(checkpoint_every=1), folder)
    save(2)
    Checkpoints.complete = full  # type: ignore[method-assign]
    return [first, save(3)]


def machines(rank: int, path: str) -> dict[str, Any]:
    """Each rank is a machine with its own folder; the second machine starts a new run first, and resumes later."""
    os.environ["LOCAL_RANK"] = "0"
    folder = folder_at(f"{path}-{rank}")
    checkpointer = Checkpointer(make_config(checkpoint_every=1, nnodes=2, node_rank=rank), folder)
    if rank == 0:
        write_json(folder.resume, {"resumes": 1})
        folder.metrics.write_text("step\n1\n")
    without_checkpoint = checkpointer.restore(torch.device("cpu"))
    rows = folder.metrics.read_text() if rank == 0 else ""
    checkpointer.save(1, state_of(rank, 1))
    checkpointer.wait()
    refusal = refusal_of(lambda: checkpointer.restore(torch.device("cpu")))
    write_json(folder.resume, {"resumes": 1})
    folder.metrics.write_text("this machine's launcher wrote how the run ended\n")
    restored = checkpointer.restore(torch.device("cpu"))
    assert restored is not None
    return {"first": without_checkpoint, "rows": rows, "refusal": refusal, "after": folder.metrics.read_text()}


def test_a_checkpoint_is_there_once_all_have_written_and_a_full_disk_keeps_the_one_before(tmp_path: Path) -> None:
    answers = run_ranks(saving, 2, tmp_path, args=(str(tmp_path / "run"),))
    for rank, answer in enumerate(answers):
        assert (answer["before"], answer["after"]) == ([], [2])
        assert answer["failure"].startswith(
            "the checkpoint of step 3 could not be written on rank 1 (No space left on device); the checkpoint of "
            "step 2 is kept: "
        )
        assert answer["residual"] == [10.0 * rank + 2] * 3


def test_a_file_that_has_changed_is_refused_and_nothing_that_was_written_is_lost(tmp_path: Path) -> None:
    for answer in run_ranks(damaged, 2, tmp_path, args=(str(tmp_path / "run"),)):
        assert answer["refusal"].endswith(
            "rank-1.safetensors is damaged: its checksum is not the manifest's; put it back from a copy, or start the "
            "run again"
        )
        assert (answer["steps"], answer["rows"]) == ([2, 1], "step\n2\n")


def test_a_manifest_that_finds_no_room_is_told_to_all_with_what_there_is_to_go_on_from(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for first, later in run_ranks(without_room_for_the_manifest, 2, tmp_path, args=(str(path),)):
        told = "the checkpoint of step {} could not be written on rank 0 (No space left on device); "
        assert first == f"{told.format(1)}there is no earlier checkpoint: make room and start the run again"
        assert later == (
            f"{told.format(3)}the checkpoint of step 2 is kept: make room and resume with bench run --resume {path}"
        )
    assert [step.name for step in RunFolder(path).checkpoints.iterdir()] == ["step-000000002"]


def test_a_machine_that_begins_anew_beside_one_that_goes_on_is_no_riddle(tmp_path: Path) -> None:
    for rank, answer in enumerate(run_ranks(machines, 2, tmp_path, args=(str(tmp_path / "run"),))):
        assert (answer["first"], answer["rows"]) == (None, "")  # no rank had a checkpoint
        assert answer["refusal"] == (
            "rank 1 starts the run, and other ranks resume from a checkpoint; give --resume on every machine, or start "
            "the run again on every machine"
        )
        assert answer["after"] == "", rank
