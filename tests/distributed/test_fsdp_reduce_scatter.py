"""`attach_reduce_scatter` on four gloo ranks that share a model, against one process and against its own promises."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bench.core import registry
from collectives.allreduce import Allgather
from collectives.options import incompatibility
from compressors.base import Compressor, PerLayer
from gradwire.fsdp.reduce_scatter import ReduceScatterHook, attach_reduce_scatter
from tests.distributed.test_fsdp import RANKS, Results, alone, loss_of, network, whole
from tests.testing.ddp_scenes import LR, Scene, loaded, message_of, saved, weights
from tests.testing.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("fsdp")

TOPK = "topk:ratio=0.01,warmup_epochs=0"


def over_all_ranks(width: int = 31) -> nn.Module:
    """Return the network, each block and the rest sharded over all ranks."""
    model, all_ranks = network(width), init_device_mesh("cpu", (RANKS,))
    for block in cast(Any, model.blocks):
        fully_shard(block, mesh=all_ranks)
    return cast(nn.Module, fully_shard(model, mesh=all_ranks))


def train(model: nn.Module, hook: ReduceScatterHook, rank: int, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in steps:
        loss_of(model, rank, step).backward()
        assert hook.step_ok()
        optimizer.step()
        optimizer.zero_grad()


def trained(rank: int, compressor: str, steps: int, width: int = 31) -> tuple[torch.Tensor, int]:
    """Return the weights after training, and the bytes that this rank sent."""
    model = over_all_ranks(width)
    hook = attach_reduce_scatter(model, compressor)
    train(model, hook, rank, range(steps))
    sent = hook.traffic["gradient"].nbytes
    hook.close()
    return whole(model), sent


def uncompressed(rank: int) -> dict[str, torch.Tensor]:
    return {name: trained(rank, name, steps=3)[0] for name in ("none", "topk:ratio=1.0,value_dtype=fp32")}


def sent_bytes(rank: int) -> list[int]:
    return [trained(rank, name, steps=1, width=400)[1] for name in ("none", TOPK)]


def mixed_precision(rank: int) -> torch.Tensor:
    model = network()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)), mp_policy=policy)
    hook = attach_reduce_scatter(model, "none")
    train(model, hook, rank, range(1))
    hook.close()
    return whole(model)


def with_sums(rank: int) -> torch.Tensor:
    """Return the weights if FSDP2 asks for sums and divides them itself."""
    model: Any = over_all_ranks()
    hook = attach_reduce_scatter(model, "none")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    train(model, hook, rank, range(3))
    hook.close()
    return whole(model)


def accumulated(rank: int) -> tuple[torch.Tensor, list[int]]:
    model: Any = over_all_ranks()
    hook = attach_reduce_scatter(model, "none")
    sent = []
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        (loss_of(model, rank, micro) / 3).backward()
        sent.append(hook.traffic["gradient"].messages)
    assert hook.step_ok()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    hook.close()
    return whole(model), sent


def telescoped(rank: int) -> float:
    """Return the relative error of: gradients of all ranks = what arrived + residuals."""
    model, dense = over_all_ranks(), over_all_ranks()
    hook = attach_reduce_scatter(model, "topk:ratio=0.05,value_dtype=fp32,warmup_epochs=0")
    reference = attach_reduce_scatter(dense, "none")
    arrived = expected = torch.zeros(())
    for step in range(3):
        for each, its_hook in ((model, hook), (dense, reference)):
            loss_of(each, rank, step).backward()
            assert its_hook.step_ok()
        arrived, expected = arrived + local_gradients(model), expected + local_gradients(dense)
        model.zero_grad()
        dense.zero_grad()
    residuals = hook.state_dict()["reducer"]["residuals"]
    for layer_id in sorted(residuals):  # the mean over ranks
        dist.all_reduce(residuals[layer_id].div_(RANKS))
    num_ids = len(list(model.parameters()))
    own = [residuals[rank * num_ids + number] for number in range(num_ids)]
    kept = [full[: p.to_local().numel()] for full, p in zip(own, map(as_dtensor, model.parameters()), strict=True)]
    hook.close()
    reference.close()
    assert not torch.allclose(arrived, expected, rtol=0.1)
    return float((arrived + torch.cat(kept) - expected).norm() / expected.norm())


def as_dtensor(tensor: torch.Tensor | None) -> DTensor:
    return cast(DTensor, tensor)


def local_gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([as_dtensor(p.grad).to_local().flatten() for p in model.parameters()])


def resumed(rank: int) -> dict[str, bool]:
    equal = {}
    for compressor in ("group_topk:ratio=0.05,group_size=64,warmup_epochs=0", "qsgd:bits=4"):
        undisturbed, first, second = over_all_ranks(), over_all_ranks(), over_all_ranks()
        hook = attach_reduce_scatter(undisturbed, compressor)
        train(undisturbed, hook, rank, range(3))
        hook.close()
        hook = attach_reduce_scatter(first, compressor)
        train(first, hook, rank, range(2))
        second.load_state_dict(first.state_dict())
        state = hook.state_dict()
        hook.close()
        hook = attach_reduce_scatter(second, compressor)
        hook.load_state_dict(state)
        train(second, hook, rank, range(2, 3))
        hook.close()
        equal[compressor] = torch.equal(whole(undisturbed), whole(second))
    return equal


def every_compressor(rank: int) -> dict[str, float]:
    """Return, by compressor, the loss after four steps on the same batch."""
    losses = {}
    for name in registry.entries("compressors"):
        made: Compressor = registry.load("compressors", name)()
        if (
            not isinstance(made, PerLayer)
            or made.traits.needs_all_ranks
            or incompatibility(made.check_compatible, Allgather()) is not None
        ):
            continue
        model = over_all_ranks()
        hook = attach_reduce_scatter(model, made, momentum=0.5 if made.traits.owns_momentum else None)
        hook.set_epoch(100)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for _ in range(4):
            loss_of(model, 0, 0).backward()
            assert hook.step_ok()
            optimizer.step()
            optimizer.zero_grad()
        hook.close()
        losses[name] = float(loss_of(model, 0, 0).detach())
    return losses


def bad_gradient(rank: int) -> list[bool]:
    model = over_all_ranks()
    hook = attach_reduce_scatter(model, TOPK)
    train(model, hook, rank, range(1))
    before = hook.state_dict()["reducer"]["residuals"]
    (loss_of(model, rank, 1) * (float("nan") if rank == 3 else 1)).backward()
    ok, after = hook.step_ok(), hook.state_dict()["reducer"]["residuals"]
    kept = all(torch.equal(before[key], after[key]) for key in before)
    model.zero_grad()
    loss_of(model, rank, 2).backward()
    ok_again = hook.step_ok()
    hook.close()
    return [ok, kept, ok_again]


def refusals(rank: int) -> dict[str, str]:
    alone_mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replica", "shard"))
    closed = over_all_ranks()
    attach_reduce_scatter(closed, "none").close()
    twice = over_all_ranks()
    hook = attach_reduce_scatter(twice, "none")
    loss_of(twice, rank, 0).backward()
    state = hook.state_dict()
    found = {
        "other hook": message_of(lambda: hook.load_state_dict({**state, "hook": "ShardHook"})),
        "attached": message_of(lambda: attach_reduce_scatter(twice, "none")),
        "torch_fp16": message_of(lambda: attach_reduce_scatter(over_all_ranks(), "torch_fp16")),
        "shared scale": message_of(lambda: attach_reduce_scatter(over_all_ranks(), "terngrad:shared_scale=true")),
        "powersgd": message_of(lambda: attach_reduce_scatter(over_all_ranks(), "powersgd")),
        "bare": message_of(lambda: attach_reduce_scatter(network(), "none")),
        "one shard": message_of(
            lambda: attach_reduce_scatter(fully_shard(network(), mesh=alone_mesh["shard"]), "none")  # type: ignore[arg-type]
        ),
        "closed": message_of(lambda: loss_of(closed, rank, 0).backward()),
        "twice": message_of(lambda: loss_of(twice, rank, 1).backward()),
    }
    hook.close()
    return found


SCENES: list[Scene] = [
    uncompressed,
    sent_bytes,
    mixed_precision,
    with_sums,
    accumulated,
    telescoped,
    resumed,
    every_compressor,
    bad_gradient,
    refusals,
]


def play(rank: int) -> bytes:
    return saved({scene.__name__: scene(rank) for scene in SCENES})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return [loaded(each) for each in run_ranks(play, RANKS, tmp_path_factory.mktemp("scatter"))]


def test_dense_training_equals_one_process(results: Results) -> None:
    expected = alone([(rank, step) for rank in range(RANKS)] for step in range(3))
    for result in results:
        for after in (*result["uncompressed"].values(), result["with_sums"]):
            torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-7)


def test_bf16_gradients_give_about_the_same_step(results: Results) -> None:
    expected = alone([[(rank, 0) for rank in range(RANKS)]])
    for result in results:
        torch.testing.assert_close(result["mixed_precision"], expected, rtol=0, atol=2e-3)


def test_topk_sends_50_times_fewer_bytes(results: Results) -> None:
    for result in results:
        dense, sparse = result["sent_bytes"]
        assert dense >= 50 * sparse > 0


def test_accumulation_sends_once(results: Results) -> None:
    expected = alone([[(rank, micro) for micro in range(3) for rank in range(RANKS)]])
    for result in results:
        after, sent = result["accumulated"]
        torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-7)
        assert sent[:2] == [0, 0]
        assert sent[2] > 0


def test_what_arrived_and_residuals_add_up_to_all_gradients(results: Results) -> None:
    assert all(result["telescoped"] < 1e-6 for result in results)


def test_a_resumed_run_equals_an_undisturbed_one(results: Results) -> None:
    for result in results:
        assert len(result["resumed"]) == 2
        assert all(result["resumed"].values()), result["resumed"]


def test_every_compressor_that_fits_lowers_the_loss(results: Results) -> None:
    losses = results[0]["every_compressor"]
    assert {"none", "topk", "group_topk", "qsgd", "terngrad", "sign", "algc", "hylo"} <= losses.keys()
    torch.manual_seed(3)
    before = float(loss_of(network(), 0, 0).detach())
    slow = {name: loss for name, loss in losses.items() if not loss < before}
    assert not slow


def test_nan_on_one_rank_skips_the_step_on_all(results: Results) -> None:
    assert all(result["bad_gradient"] == [False, True, True] for result in results)


def test_refusals_say_what_to_do(results: Results) -> None:
    for result in results:
        said = result["refusals"]
        assert said["powersgd"].startswith("ValueError: powersgd needs all ranks while it encodes")
        assert said["shared scale"].startswith("ValueError: terngrad needs all ranks while it encodes")
        assert said["torch_fp16"].startswith("ValueError: torch_fp16 works through DDP's communication hook")
        assert said["attached"].startswith("ValueError: this model has a hook already; close it")
        assert said["other hook"].startswith("ValueError: this state is that of a ShardHook, and this hook is a Reduce")
        assert said["bare"].startswith(
            "ValueError: compression in FSDP2 needs a model in fully_shard and got a bare Network"
        )
        assert said["one shard"].startswith("ValueError: the model is not divided among several ranks")
        assert said["closed"] == "RuntimeError: the hook of this model is closed; attach one again"
        assert (
            "was reduced twice since the last step_ok(); call step_ok() once per step, and model.set" in said["twice"]
        )


def test_weights_are_those_of_the_whole_model(results: Results) -> None:
    assert results[0]["uncompressed"]["none"].numel() == weights(network()).numel()
