"""Hooks that are attached and closed repeatedly in one process: a closed hook leaves no descriptor and no thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp.attach import attach
from tests.testing.ddp_scenes import network, played_by_two, train
from tests.testing.ranks import run_ranks

CYCLES = 50
PAIRS = (
    ("topk", "allgather"),
    ("none", "native"),
    ("powersgd", "ring"),
)

pytestmark = pytest.mark.xdist_group("ddp hook closing")  # its ranks run once for all tests


def held() -> tuple[int, int]:
    """Return the numbers of descriptors and threads of this process."""
    process = psutil.Process()
    return process.num_fds(), process.num_threads()


def held_after_each(*pairs: tuple[str, str]) -> list[tuple[int, int]]:
    """Return the descriptors and threads after each cycle of one of these pairs; all models and hooks are kept."""
    kept: list[Any] = []
    counts = []
    for cycle in range(CYCLES):
        ddp = DistributedDataParallel(network())
        hook = attach(ddp, *pairs[cycle % len(pairs)])
        train(ddp, hook, range(2))
        hook.close()
        kept += ddp, hook
        counts.append(held())
    return counts


def comings_and_goings(_: int) -> list[tuple[int, int]]:
    return held_after_each(*PAIRS)


def over_a_group(_: int) -> list[tuple[int, int]]:
    """Return them over a process group of the user, which still works afterwards."""
    group = dist.new_group([0, 1])
    counts = []
    for _ in range(4):
        ddp = DistributedDataParallel(network(), process_group=group)
        hook = attach(ddp, "topk", "allgather")
        train(ddp, hook, range(1))
        hook.close()
        counts.append(held())
    dist.barrier(group)
    return counts


def one_by_one(rank: int) -> list[tuple[int, int]]:
    """Return them if ranks close at different times, while others may still be in the last step."""
    counts = []
    for cycle in range(8):
        ddp = DistributedDataParallel(network())
        hook = attach(ddp, "none", "hierarchical:group_size=2,intra=native,inter=native")
        train(ddp, hook, range(2))
        time.sleep(0.1 * ((rank + cycle) % 3))
        hook.close()
        counts.append(held())
    return counts


def after_the_job(_: int) -> None:
    """Close a hook after all process groups were destroyed."""
    hook = attach(DistributedDataParallel(network()), "none", "native")
    dist.destroy_process_group()
    hook.close()


def grows(counts: Sequence[tuple[int, int]]) -> bool:
    """Return whether there are more descriptors or threads later than after the first cycle."""
    return any(now > then for later in counts[1:] for now, then in zip(later, counts[0], strict=True))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of every scene, per rank."""
    return played_by_two((comings_and_goings, over_a_group, after_the_job), tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scene", ["comings_and_goings", "over_a_group"])
def test_closed_hooks_hold_nothing(played: list[dict[str, Any]], scene: str) -> None:
    assert not any(grows(rank[scene]) for rank in played)


def test_ranks_need_not_close_at_the_same_time(tmp_path: Path) -> None:
    assert not any(map(grows, run_ranks(one_by_one, 3, tmp_path)))
