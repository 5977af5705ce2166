"""Behaviour that only `attach` has, on gloo ranks: DDP's buckets, models and process groups."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

from collectives.base import PendingSum
from gradwire import attach
from gradwire.exchange.reducer import PendingReduction
from gradwire.exchange.report import Bucket
from tests.testing.ddp_scenes import (
    batch,
    gradients,
    grows,
    held,
    held_after_each,
    network,
    train,
    warnings_of,
    weights,
    wrapped,
)
from tests.testing.engines import alone, assert_same_on_all_ranks
from tests.testing.ranks import run_ranks

BOTH = [[(0, step), (1, step)] for step in range(4)]
two_ranks = pytest.mark.ranks(2)


@two_ranks
def test_momentum_is_handed_over(rank: int) -> None:
    ddp = wrapped()
    hook = attach(ddp, "topk:momentum_correction=true,min_numel=1000000", "allgather", momentum=0.9)
    after = train(ddp, hook, range(4))
    hook.close()
    torch.testing.assert_close(after, alone(BOTH, network(), momentum=0.9))
    assert not torch.allclose(after, alone(BOTH, network()))


@two_ranks
def test_a_warm_up_by_steps_or_none_or_announced_steps_need_no_epoch(rank: int) -> None:
    sent = []
    for options, epoch in (("", 0), (",warmup_steps=8", None)):
        ddp = wrapped()
        hook = attach(ddp, f"topk:ratio=0.01{options}", "allgather")
        if epoch is not None:
            hook.set_epoch(epoch)
        train(ddp, hook, range(1))
        sent.append(hook.traffic["gradient"].nbytes)
        announced = hook.step_of(0, 0, 0)
        hook.close()
    assert sent[0] == sent[1]
    assert warnings_of("topk:ratio=0.01", lambda hook: hook.start_step(announced)) == []
    assert warnings_of("topk:warmup_epochs=0") == []
    assert warnings_of("topk:ratio=0.5") == []


@two_ranks
def test_layers_at_rest_stay_out_of_the_exchange(rank: int) -> None:
    for compressor, collective in (
        ("none", "ring"),
        ("topk", "allgather"),
        ("group_topk", "ring"),
        ("powersgd", "native"),
        ("hylo", "allgather"),
    ):
        model = network()
        model[0].requires_grad_(False)
        ddp = DistributedDataParallel(model)
        hook = attach(ddp, compressor, collective)
        after = train(ddp, hook, range(4))
        assert [layer.name for layer in hook.layers] == ["2.weight", "2.bias"]
        hook.close()
        assert_same_on_all_ranks(after)
        for name, before in network().state_dict().items():
            assert torch.equal(model.state_dict()[name], before) == name.startswith("0.")
        if compressor == "none":
            whole = network()
            whole[0].requires_grad_(False)
            torch.testing.assert_close(after, alone(BOTH, whole))


@two_ranks
def test_parameters_that_are_kept_from_ddp_are_no_layers_of_the_hook(rank: int) -> None:
    model = network()
    model._ddp_params_and_buffers_to_ignore = ["0.weight"]  # type: ignore[assignment]
    ddp = DistributedDataParallel(model)
    hook = attach(ddp, "topk", "allgather")
    train(ddp, hook, range(2))
    hook.close()
    assert [layer.name for layer in hook.layers] == ["0.bias", "2.weight", "2.bias"]


@two_ranks
@pytest.mark.parametrize(
    "collective",
    [
        "allgather",
        "direct",
        "halving_doubling",
        "hierarchical:group_size=2",
        "native",
        "pool",
        "ring",
        "server",
        "tree",
    ],
)
def test_gradients_in_fp64_stay_in_fp64(rank: int, collective: str) -> None:
    ddp, model = DistributedDataParallel(network().double()), network().double()
    hook = attach(ddp, "none", collective)
    (ddp(batch(rank, 0)[0].double()).sum() * 1e60).backward()
    assert hook.step_ok()
    hook.close()
    sum(model(batch(each, 0)[0].double()).sum() * 1e60 / 2 for each in range(2)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(gradients(ddp), gradients(model), rtol=1e-14, atol=0)


@two_ranks
def test_the_next_bucket_is_sent_before_the_first_is_decoded(rank: int) -> None:
    ddp = wrapped(bucket_cap_mb=3e-4)
    hook = attach(ddp, "topk:ratio=0.1", "allgather", trigger="sync")
    start, events = hook.collective.start, []

    def watched(*args: Any) -> PendingSum:
        events.append("start")
        pending = start(*args)
        return dataclasses.replace(pending, finish=lambda: (events.append("finish"), pending.finish())[1])

    hook.collective.start = watched  # type: ignore[method-assign]
    train(ddp, hook, range(2))  # DDP's first step is one bucket
    hook.close()
    assert events[2:] == ["start", "start", "finish", "finish"]


@two_ranks
def test_a_bucket_is_sent_while_others_are_still_to_come(rank: int) -> None:
    """Rank 1 sends its first bucket after rank 0 has sent its second, which is handed over while rank 0 waits."""
    ddp, second_is_sent = wrapped(bucket_cap_mb=3e-4), "test_ddp_hook/second_is_sent"
    hook = attach(ddp, "topk:ratio=0.1", "allgather")
    train(ddp, hook, range(1))  # DDP's first step is one bucket
    start, store, started = hook.collective.start, _get_default_store(), []

    def watched(*args: Any) -> PendingSum:
        if rank == 1 and not started:
            store.wait([second_is_sent], datetime.timedelta(seconds=30))
        pending = start(*args)
        started.append(True)
        if rank == 0 and len(started) == 2:
            store.set(second_is_sent, "")
        return pending

    hook.collective.start = watched  # type: ignore[method-assign]
    next(ddp.parameters()).register_hook(lambda _: time.sleep(0.3))
    train(ddp, hook, range(1, 2))
    hook.close()
    assert len(started) == 2


@two_ranks
def test_the_hook_says_what_it_holds(rank: int) -> None:
    found = {}
    for compressor, collective in (("topk:min_numel=100", "allgather"), ("powersgd", "ring"), ("none", "server")):
        ddp = wrapped()
        hook = attach(ddp, compressor, collective)
        train(ddp, hook, range(2))
        found[compressor] = hook.nbytes
        hook.close()
    topk, powersgd, none = found.values()
    assert topk["residual"] == topk["proposed"] == 4 * (20 * 30 + 30 * 5), "one tensor per compressed layer"
    assert topk["payloads"] > 0
    assert powersgd["residual"] == powersgd["proposed"]
    assert powersgd["memory"] > 0
    assert none["residual"] == none["proposed"] == none["momentum"] == 0
    assert none["buffers"] >= 4 * (20 * 30 + 30 + 30 * 5 + 5)


@two_ranks
def test_a_bucket_is_forgotten_after_the_next_step_without_the_garbage_collector(rank: int) -> None:
    ddp = wrapped()
    hook = attach(ddp, "powersgd", "ring")
    start, buckets = hook.reducer.start, []

    def watched(bucket: Bucket, *args: Any) -> PendingReduction:
        buckets.append(weakref.ref(bucket))
        return start(bucket, *args)

    hook.reducer.start = watched  # type: ignore[method-assign]
    gc.disable()
    train(ddp, hook, range(2))
    first = buckets[0]()
    gc.enable()
    hook.close()
    assert first is None


def two_of_three(rank: int) -> list[float]:
    group = dist.new_group([0, 2])
    if rank == 1:
        return []
    ddp = DistributedDataParallel(network(), process_group=group)
    hook = attach(ddp, "none", "ring")
    after: list[float] = train(ddp, hook, range(2)).tolist()
    hook.close()
    return after


def test_ddp_over_some_of_the_ranks(tmp_path: Path) -> None:
    """Its ranks make different numbers of groups, so that no other test can follow."""
    first, _, last = run_ranks(two_of_three, 3, tmp_path)
    assert first == last != weights(network()).tolist()


@two_ranks
def test_closed_hooks_hold_nothing(rank: int) -> None:
    assert not grows(held_after_each(("topk", "allgather"), ("none", "native"), ("powersgd", "ring")))
    group = dist.new_group([0, 1])
    counts = []
    for _ in range(4):
        ddp = wrapped(process_group=group)
        hook = attach(ddp, "topk", "allgather")
        train(ddp, hook, range(1))
        hook.close()
        counts.append(held())
    dist.barrier(group)
    assert not grows(counts)


@pytest.mark.ranks(3)
def test_ranks_need_not_close_at_the_same_time(rank: int) -> None:
    counts = []
    for cycle in range(8):
        ddp = wrapped()
        hook = attach(ddp, "none", "hierarchical:group_size=2,intra=native,inter=native")
        train(ddp, hook, range(2))
        time.sleep(0.1 * ((rank + cycle) % 3))
        hook.close()
        counts.append(held())
    assert not grows(counts)


@two_ranks
def test_a_closed_hook_lets_go_of_the_model(rank: int) -> None:
    ddp = wrapped(gradient_as_bucket_view=True)
    hook = attach(ddp, "topk:ratio=0.05", "allgather")
    train(ddp, hook, range(2))
    model = weakref.ref(ddp)
    del ddp
    assert model() is not None
    hook.close()
    hook.close()
    gc.collect()
    assert model() is None


def close_after_the_job(rank: int) -> None:
    hook = attach(wrapped(), "none", "native")
    dist.destroy_process_group()
    hook.close()


def test_a_hook_is_closed_after_all_process_groups_were_destroyed(tmp_path: Path) -> None:
    run_ranks(close_after_the_job, 2, tmp_path)
