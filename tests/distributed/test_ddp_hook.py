"""`attach`: a user's own DDP model with a compressor and a collective, on real gloo ranks."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import time
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

from collectives.allreduce import Allgather, Ring
from collectives.base import Collective, PendingSum
from collectives.options import build
from compressors.floats import NoCompression
from compressors.topk import TopK
from gradwire.ddp.attach import attach
from gradwire.exchange.reducer import PendingReduction
from gradwire.exchange.report import Bucket
from tests.testing.ddp_scenes import (
    LR,
    batch,
    gradients,
    loaded,
    loss_of,
    network,
    played_by_two,
    saved,
    train,
    trained,
    weights,
    wrapped,
)
from tests.testing.ranks import run_ranks

ALL_SUMS = (
    "allgather",
    "direct",
    "halving_doubling",
    "hierarchical:group_size=2",
    "native",
    "pool",
    "ring",
    "server",
    "tree",
)
FINE_TUNING = (
    ("none", "ring"),
    ("topk", "allgather"),
    ("group_topk", "ring"),
    ("powersgd", "native"),
    ("hylo", "allgather"),
)

pytestmark = pytest.mark.xdist_group("ddp hook")  # its ranks run once for all tests


def trained_by_hand(
    world_size: int, num_steps: int, momentum: float = 0.0, model: nn.Module | None = None
) -> torch.Tensor:
    """Return the weights after training in one process on all ranks' batches."""
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    for step in range(num_steps):
        sum(loss_of(model, rank, step) / world_size for rank in range(world_size)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def dense(rank: int) -> torch.Tensor:
    return trained(NoCompression(), 4)


def compressed(rank: int) -> dict[str, Any]:
    ddp = wrapped()
    hook = attach(ddp, "group_topk:ratio=0.05,group_size=100", "ring", seed=7)
    after = train(ddp, hook, range(4))
    hook.close()
    return {"weights": after, "nbytes": hook.traffic["gradient"].nbytes, "residuals": hook.residual_norms()}


def resumed(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights after five steps, and after two steps and three more with new objects and loaded state."""
    options: dict[str, Any] = {"ratio": 0.05, "momentum_correction": True}
    whole = trained(TopK(**options), 5, momentum=0.9)
    first = wrapped()
    hook = attach(first, TopK(**options), Allgather(), momentum=0.9)
    train(first, hook, range(2))
    state, network_state = hook.state_dict(), first.state_dict()
    hook.close()
    second = wrapped()
    second.load_state_dict(network_state)
    hook = attach(second, TopK(**options), Allgather(), momentum=0.9)
    hook.load_state_dict(state)
    parts = train(second, hook, range(2, 5))
    assert hook.state_dict()["step"] == 5
    hook.close()
    return whole, parts


def momentum_moved(rank: int) -> torch.Tensor:
    """Return the weights when the compressor applies the momentum, to layers that are all sent whole."""
    return trained(TopK(momentum_correction=True, min_numel=10**6), 4, momentum=0.9)


def warm_up(rank: int) -> list[int]:
    """Return the bytes sent after set_epoch(0), after set_epoch(9), and without it: by epochs, and by steps."""
    sent = []
    for epoch, steps in ((0, 0), (9, 0), (None, 0), (None, 8)):
        ddp = wrapped()
        hook = attach(ddp, TopK(ratio=0.01, warmup_steps=steps), Allgather())
        if epoch is not None:
            hook.set_epoch(epoch)
        train(ddp, hook, range(1))
        hook.close()
        sent.append(hook.traffic["gradient"].nbytes)
    return sent


def accumulated(rank: int) -> torch.Tensor:
    """Return the gradients of two batches that are exchanged once."""
    ddp = wrapped()
    hook = attach(ddp, NoCompression(), Ring())
    with hook.no_sync():
        loss_of(ddp, rank, 0).backward()
    loss_of(ddp, rank, 1).backward()
    assert hook.step_ok()
    hook.close()
    return gradients(ddp)


def telescoped(rank: int) -> dict[str, torch.Tensor]:
    """Return the sent gradients, the residuals and the sum of all gradients of three steps; weights are not updated."""
    ddp, alone = wrapped(), network()
    hook = attach(ddp, TopK(ratio=0.1, error_feedback=True), Allgather())
    sent = torch.zeros_like(weights(ddp))
    for step in range(0, 6, 2):
        with hook.no_sync():
            loss_of(ddp, rank, step).backward()
        loss_of(ddp, rank, step + 1).backward()
        assert hook.step_ok()
        sent += gradients(ddp)
        ddp.zero_grad()
    for step in range(6):
        loss_of(alone, rank, step).backward()
    waiting = hook.state_dict()["reducer"]["residuals"]
    hook.close()
    return {
        "sent": sent,
        "waiting": torch.cat([waiting[layer.id] for layer in hook.layers]),
        "all": gradients(alone),
    }


def ahead(rank: int) -> list[str]:
    """Return the starts and finishes of a step with several buckets that are all ready."""
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
    return events[2:]


def beside_a_wait(rank: int) -> bool:
    """Let rank 1 send its first bucket after rank 0 has sent its second, which is handed over while rank 0 waits."""
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
    return len(started) == 2


def fine_tuned(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights after four steps with a frozen first layer, by compressor."""
    after = {}
    for compressor, collective in FINE_TUNING:
        model = network()
        model[0].requires_grad_(False)
        ddp = DistributedDataParallel(model)
        hook = attach(ddp, compressor, collective)
        train(ddp, hook, range(4))
        assert [layer.name for layer in hook.layers] == ["2.weight", "2.bias"]
        hook.close()
        after[compressor] = dict(model.state_dict())
    return after


def left_to_others(rank: int) -> list[str]:
    """Return the layers that the hook knows if DDP ignores one parameter of the model."""
    model = network()
    model._ddp_params_and_buffers_to_ignore = ["0.weight"]  # type: ignore[assignment]
    ddp = DistributedDataParallel(model)
    hook = attach(ddp, TopK(), Allgather())
    train(ddp, hook, range(2))
    hook.close()
    return [layer.name for layer in hook.layers]


def in_fp64(rank: int) -> dict[str, torch.Tensor]:
    """Return gradients beyond the range of fp32, by collective."""
    found = {}
    for collective in ALL_SUMS:
        ddp = DistributedDataParallel(network().double())
        hook = attach(ddp, "none", cast(Collective, build("collectives", Collective, collective)))
        (ddp(double_batch(rank)).sum() * 1e60).backward()
        assert hook.step_ok()
        hook.close()
        found[collective] = gradients(ddp)
    return found


def double_batch(rank: int) -> torch.Tensor:
    return batch(rank, 0)[0].double()


def held(rank: int) -> dict[str, dict[str, int]]:
    """Return what hooks hold after two steps, in bytes, by compressor."""
    found = {}
    for compressor, collective in (("topk:min_numel=100", "allgather"), ("powersgd", "ring"), ("none", "server")):
        ddp = wrapped()
        hook = attach(ddp, compressor, collective)
        train(ddp, hook, range(2))
        found[compressor] = hook.nbytes
        hook.close()
    return found


def forgotten(rank: int) -> bool:
    """Return True if a step's bucket is gone after the next step, without the garbage collector's help."""
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
    return first is None


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of every scene, per rank."""
    scenes = (
        dense,
        compressed,
        resumed,
        momentum_moved,
        warm_up,
        accumulated,
        telescoped,
        fine_tuned,
        left_to_others,
        in_fp64,
        ahead,
        beside_a_wait,
        held,
        forgotten,
    )
    return played_by_two(scenes, tmp_path_factory.mktemp("ranks"))


def test_without_compression_it_trains_as_one_process_with_all_batches(played: list[dict[str, Any]]) -> None:
    torch.testing.assert_close(played[0]["dense"], trained_by_hand(2, 4))
    assert torch.equal(played[0]["dense"], played[1]["dense"])


def test_compressed_ranks_stay_equal_and_every_byte_is_counted(played: list[dict[str, Any]]) -> None:
    first, second = (rank["compressed"] for rank in played)
    assert torch.equal(first["weights"], second["weights"])
    dense_nbytes = 4 * first["weights"].numel() * 4  # fp32, in 4 steps of a ring of two
    assert 0 < first["nbytes"] < dense_nbytes / 4
    assert all(norm > 0 for norm in first["residuals"].values())


def test_the_hook_says_what_it_holds(played: list[dict[str, Any]]) -> None:
    topk, powersgd, none = (played[0]["held"][name] for name in ("topk:min_numel=100", "powersgd", "none"))
    assert topk["residual"] == topk["proposed"] == 4 * (20 * 30 + 30 * 5), "one tensor per compressed layer"
    assert topk["payloads"] > 0
    assert powersgd["residual"] == powersgd["proposed"]
    assert powersgd["memory"] > 0
    assert none["residual"] == none["proposed"] == none["momentum"] == 0
    assert none["buffers"] >= 4 * (20 * 30 + 30 + 30 * 5 + 5)


def test_a_bucket_is_forgotten_at_once(played: list[dict[str, Any]]) -> None:
    assert all(result["forgotten"] for result in played)


def test_the_next_bucket_is_sent_before_the_first_is_decoded(played: list[dict[str, Any]]) -> None:
    for rank in played:
        assert rank["ahead"] == ["start", "start", "finish", "finish"]


def test_a_bucket_is_sent_while_others_are_still_to_come(played: list[dict[str, Any]]) -> None:
    assert all(rank["beside_a_wait"] for rank in played)


def test_a_saved_state_goes_on_bit_for_bit(played: list[dict[str, Any]]) -> None:
    for rank in played:
        whole, parts = rank["resumed"]
        assert torch.equal(whole, parts)


def test_momentum_is_handed_over(played: list[dict[str, Any]]) -> None:
    torch.testing.assert_close(played[0]["momentum_moved"], trained_by_hand(2, 4, momentum=0.9))
    assert not torch.allclose(played[0]["momentum_moved"], trained_by_hand(2, 4))


def test_the_warm_up_follows_the_epoch_where_it_is_told(played: list[dict[str, Any]]) -> None:
    early, late, untold, by_steps = played[0]["warm_up"]
    assert early > 3 * late
    assert untold == late
    assert by_steps == early


def test_gradients_accumulate_under_no_sync(played: list[dict[str, Any]]) -> None:
    model = network()
    sum(loss_of(model, rank, step) / 2 for rank in range(2) for step in range(2)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(played[0]["accumulated"], gradients(model))


def test_what_was_sent_and_what_waits_are_all_gradients_that_accumulated(
    played: list[dict[str, Any]],
) -> None:
    first, second = (answer["telescoped"] for answer in played)
    assert first["waiting"].count_nonzero() > 0
    everything = (first["all"] + second["all"]) / 2
    torch.testing.assert_close(first["sent"] + (first["waiting"] + second["waiting"]) / 2, everything)


def test_layers_at_rest_stay_out_of_the_exchange(played: list[dict[str, Any]]) -> None:
    first, second = (rank["fine_tuned"] for rank in played)
    start = network().state_dict()
    for compressor, _ in FINE_TUNING:
        for name, weight in first[compressor].items():
            assert torch.equal(weight, second[compressor][name])
            assert torch.equal(weight, start[name]) == name.startswith("0.")
    whole = network()
    whole[0].requires_grad_(False)
    trained_by_hand(2, 4, model=whole)
    torch.testing.assert_close(first["none"], dict(whole.state_dict()))


def test_parameters_that_are_kept_from_ddp_are_no_layers_of_the_hook(played: list[dict[str, Any]]) -> None:
    assert [rank["left_to_others"] for rank in played] == [["0.bias", "2.weight", "2.bias"]] * 2


@pytest.mark.parametrize("collective", ALL_SUMS)
def test_gradients_in_fp64_stay_in_fp64(played: list[dict[str, Any]], collective: str) -> None:
    model = network().double()
    sum(model(double_batch(rank)).sum() * 1e60 / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
    for rank in played:
        torch.testing.assert_close(rank["in_fp64"][collective], gradients(model), rtol=1e-14, atol=0)


def two_of_three(rank: int) -> bytes | None:
    """Use DDP over ranks 2 and 0 of three; rank 1 takes no part."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    ddp = DistributedDataParallel(network(), process_group=group)
    hook = attach(ddp, NoCompression(), Ring())
    after = train(ddp, hook, range(2))
    hook.close()
    return saved(after)


def test_ddp_over_some_of_the_ranks(tmp_path: Path) -> None:
    first, _, last = run_ranks(two_of_three, 3, tmp_path)
    assert torch.equal(loaded(first), loaded(last))
    assert not torch.equal(loaded(first), weights(network()))
