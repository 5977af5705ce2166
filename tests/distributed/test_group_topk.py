"""Group-TopK over the whole model: the hook's updates against the document's algorithm in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp.attach import attach
from tests.testing.ddp_scenes import gradients, loss_of, network
from tests.testing.ranks import run_ranks

GROUP_SIZE, RATIO, STEPS = 64, 0.1, 3
NUMEL = 785  # 600 + 30 + 150 + 5: groups cross every border, and the last one has 17 elements
Steps = list[tuple[torch.Tensor, torch.Tensor]]
"""Steps of a rank: its own flat gradient and the update."""


def exchanged(rank: int, options: str, collective: str, bucket_mb: float | None = None) -> Steps:
    """Return three steps, because DDP forms new buckets after the first."""
    model = network()
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    hook = attach(ddp, f"group_topk:preset=patent,group_size={GROUP_SIZE},ratio={RATIO}{options}", collective)
    steps = []
    for step in range(STEPS):
        alone = network()
        alone.load_state_dict(model.state_dict())
        loss_of(alone, rank, step).backward()
        loss_of(ddp, rank, step).backward()
        assert hook.step_ok()
        steps.append((gradients(alone), gradients(ddp)))
        ddp.zero_grad()
    hook.close()
    dist.barrier()
    return steps


def document(of_ranks: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean over ranks of the k largest magnitudes of every group of their flat gradients."""
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for gradient in of_ranks:
        for start in range(0, NUMEL, GROUP_SIZE):
            group = gradient[start : start + GROUP_SIZE].double()
            k = max(1, int(RATIO * len(group) + 0.5))
            kept = sorted(range(len(group)), key=lambda i: (-abs(float(group[i])), i))[:k]
            for index in kept:
                total[start + index] += group[index]
    return total / len(of_ranks)


@pytest.mark.parametrize("collective", ["ring", "allgather"])
def test_updates_are_those_of_the_document(collective: str, tmp_path: Path) -> None:
    results: list[Steps] = run_ranks(exchanged, 3, tmp_path, args=("", collective))
    for step in zip(*results, strict=True):
        own, updates = zip(*step, strict=True)
        assert all(torch.equal(update, updates[0]) for update in updates)
        expected = document(list(own))
        assert torch.equal(updates[0] != 0, expected != 0)
        torch.testing.assert_close(updates[0].double(), expected, rtol=1e-6, atol=1e-9)


def test_groups_start_anew_in_each_bucket_where_that_is_the_scope(tmp_path: Path) -> None:
    results: list[Steps] = run_ranks(exchanged, 2, tmp_path, args=(",scope=bucket", "ring", 0.0005))
    own, updates = zip(*(steps[-1] for steps in results), strict=True)
    assert torch.equal(updates[0], updates[1])
    assert not torch.equal(updates[0] != 0, document(list(own)) != 0)
