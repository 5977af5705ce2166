"""`gradwire.optim` in scripts without `bench`, on gloo ranks: equal ranks, resumed and skipped steps."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.optim import Dion, MaxAdaBelief
from tests.testing.ddp_scenes import weights
from tests.testing.engines import assert_same_on_all_ranks
from tests.testing.optimizers import ALL, OWN_GRADIENTS, network, train


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ALL)
def test_ranks_agree_resume_and_skip_together(rank: int, name: str) -> None:
    make = ALL[name]
    own = network(1 + rank) if name in OWN_GRADIENTS else DistributedDataParallel(network())
    optimizer = make(own)
    train(own, optimizer, rank, range(4))
    saved = copy.deepcopy([own.state_dict(), optimizer.state_dict()])
    whole = train(own, optimizer, rank, range(4, 7))
    if name == "max_adabelief":  # what topk has not sent waits
        assert sum(cast(CompressedCommunicator, optimizer.communicator).residual_norms().values()) > 0
    optimizer.close()
    assert_same_on_all_ranks(whole)
    assert not torch.equal(whole, weights(network()))
    again = network(5) if name in OWN_GRADIENTS else DistributedDataParallel(network(5))
    optimizer = make(again)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert torch.equal(train(again, optimizer, rank, range(4, 7)), whole)
    optimizer.close()
    if name in OWN_GRADIENTS:
        last = network()
        optimizer = make(last)
        before = train(last, optimizer, rank, range(4))
        skipped = train(last, optimizer, rank, range(4, 5), bad=4)
        after = train(last, optimizer, rank, range(5, 7))
        optimizer.close()
        for each in (before, skipped, after):
            assert_same_on_all_ranks(each)
        assert torch.equal(before, skipped)
        assert after.isfinite().all()
        assert not torch.equal(skipped, after)


@pytest.mark.ranks(4)
def test_a_group_of_ranks_trains_apart(rank: int) -> None:
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    model = network(1 + rank)
    optimizer = Dion(model, group=pairs[rank // 2])
    found = train(model, optimizer, rank, range(3))
    optimizer.close()
    of_rank = [torch.empty_like(found) for _ in range(4)]
    dist.all_gather(of_rank, found)
    assert torch.equal(of_rank[0], of_rank[1])
    assert torch.equal(of_rank[2], of_rank[3])
    assert not torch.equal(of_rank[0], of_rank[2])


@pytest.mark.ranks(2)
def test_ddp_and_components_that_need_it_are_refused(rank: int) -> None:
    ddp = DistributedDataParallel(network())
    with pytest.raises(ValueError, match="Dion takes each rank's own gradients, and DDP averages them; give it the"):
        Dion(ddp)
    for compressor in ("dgc", "torch_fp16"):
        with pytest.raises(ValueError, match=rf"^{compressor} .* which only gradwire\.attach offers"):
            MaxAdaBelief(ddp.module, compressor=compressor, collective="allgather")
