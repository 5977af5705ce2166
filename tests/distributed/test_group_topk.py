"""Group-TopK over the whole model: the hook's updates against the document's algorithm in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire import attach
from tests.testing.ddp_scenes import gradients, loss_of, network
from tests.testing.engines import assert_same_on_all_ranks

GROUP_SIZE, RATIO = 64, 0.1
NUMEL = 785  # 600 + 30 + 150 + 5: groups cross every border, and the last one has 17 elements


def exchanged(
    rank: int, options: str, collective: str, bucket_mb: float | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the update and what the document says of three steps, because DDP forms new buckets after the first."""
    model = network()
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    hook = attach(ddp, f"group_topk:preset=patent,group_size={GROUP_SIZE},ratio={RATIO}{options}", collective)
    for step in range(3):
        of_ranks = []
        for each in range(dist.get_world_size()):
            alone = network()
            loss_of(alone, each, step).backward()
            of_ranks.append(gradients(alone))
        loss_of(ddp, rank, step).backward()
        assert hook.step_ok()
        assert_same_on_all_ranks(gradients(ddp))
        yield gradients(ddp), document(of_ranks)
        ddp.zero_grad()
    hook.close()


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


@pytest.mark.ranks(3)
@pytest.mark.parametrize("collective", ["ring", "allgather"])
def test_updates_are_those_of_the_document(rank: int, collective: str) -> None:
    for update, expected in exchanged(rank, "", collective):
        assert torch.equal(update != 0, expected != 0)
        torch.testing.assert_close(update.double(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.ranks(3)
def test_groups_start_anew_in_each_bucket_where_that_is_the_scope(rank: int) -> None:
    *_, (update, expected) = exchanged(rank, ",scope=bucket", "ring", 0.0005)
    assert not torch.equal(update != 0, expected != 0)
