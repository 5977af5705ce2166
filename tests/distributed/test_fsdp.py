"""Behaviour that only `attach_fsdp` and `attach_reduce_scatter` have, on four gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.core import registry
from collectives.allreduce import Allgather
from collectives.options import incompatibility
from compressors.base import Compressor, PerLayer
from gradwire import attach_fsdp, attach_reduce_scatter
from tests.testing.ddp_scenes import loss_of, message_of
from tests.testing.engines import (
    ENGINES,
    Fsdp,
    Network,
    ReduceScatter,
    alone,
    engines,
    mesh,
    mesh_of_all,
    network,
    sharded,
)

pytestmark = pytest.mark.ranks(4)

BOTH = ("fsdp", "reduce_scatter")


@engines(*BOTH)
def test_bf16_gradients_give_about_the_same_step(rank: int, engine: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with ENGINES[engine](wrapping={"mp_policy": policy}) as made:
        expected = alone([[(each, 0) for each in range(4)]])
        torch.testing.assert_close(made.train(range(1)), expected, rtol=0, atol=2e-3)


def test_layers_lie_where_fsdp_puts_them(rank: int) -> None:
    grouped = network()
    fully_shard([grouped.blocks, grouped.head], mesh=mesh()["shard"])
    fully_shard(grouped, mesh=mesh()["shard"])
    for model in (sharded(network(), mesh()["shard"]), grouped):
        hook = attach_fsdp(model, "none", replicas=mesh()["replica"].get_group())
        loss_of(model, rank, 0).backward()
        parameters: dict[str, Any] = dict(model.named_parameters())
        offset, buffer = 0, None
        assert len(hook.layers) == len(parameters)
        for layer in hook.layers:
            shard = parameters[layer.name].grad.to_local()
            if (address := shard.untyped_storage().data_ptr()) != buffer:  # of the next unit
                offset, buffer = 0, address
            assert int(shard.storage_offset()) == offset
            offset += layer.numel
        assert hook.step_ok()
        hook.close()


def test_a_state_belongs_to_a_shard_and_a_kind_of_hook(rank: int) -> None:
    with Fsdp() as one, ReduceScatter() as other:
        state = one.hook.state_dict()
        assert message_of(lambda: other.hook.load_state_dict(state)).startswith(
            "ValueError: this state is that of a ShardHook, and this hook is a ReduceScatterHook"
        )
        state["shard"] = [state["shard"][0], 4]
        assert f"shard {rank % 2} of 4, and this rank holds shard {rank % 2} of 2" in message_of(
            lambda: one.hook.load_state_dict(state)
        )


class Unused(Network):
    """Leaves out `scale`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(self.blocks(x)))


class Skipping(Network):
    """Leaves out the blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(nn.functional.pad(x, (0, 11))) * self.scale)


def test_parameters_that_take_no_part_are_told_or_count_as_zeros(rank: int) -> None:
    with Fsdp(model=Unused()) as made:
        assert message_of(lambda: made.backward(0)).startswith(
            "RuntimeError: FSDP2 reduced 96 elements of the model instead of 99, because"
        )
    unused: Any = sharded(Unused(), mesh()["shard"])
    unused.set_reduce_scatter_unused_params(True)
    hook = attach_fsdp(unused, "none", replicas=mesh()["replica"].get_group())
    loss_of(unused, rank, 0).backward()
    assert hook.step_ok()
    hook.close()
    with Fsdp(model=Skipping()) as made:
        made.backward(0)
        assert message_of(made.hook.step_ok).startswith(
            "RuntimeError: backward() did not reach blocks.0, and every module"
        )


def test_a_sharded_block_that_is_appended_later_is_refused(rank: int) -> None:
    with Fsdp() as made:
        made.train(range(2))
        made.network.blocks.append(fully_shard(nn.Linear(31, 31), mesh=mesh()["shard"]))
        assert message_of(lambda: made.train(range(2, 4))).startswith(
            "RuntimeError: blocks.2.bias was added, removed, replaced, frozen or unfrozen after the hook was"
        )


def test_fsdp_may_ask_for_sums_and_divide_them_itself(rank: int) -> None:
    with ReduceScatter() as made:
        for module in made.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        after = made.train(range(3))
    expected = alone([(each, step) for each in range(4)] for step in range(3))
    torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-7)


def test_every_compressor_that_fits_a_reduce_scatter_lowers_the_loss(rank: int) -> None:
    tried = []
    for name in registry.entries("compressors"):
        compressor: Compressor = registry.load("compressors", name)()
        if (
            not isinstance(compressor, PerLayer)
            or compressor.traits.needs_all_ranks
            or incompatibility(compressor.check_compatible, Allgather()) is not None
        ):
            continue
        with ReduceScatter(name, momentum=0.5 if compressor.traits.owns_momentum else None) as made:
            made.hook.set_epoch(100)
            losses = []
            for _ in range(5):
                loss = loss_of(made.model, 0, 0)
                losses.append(float(loss.detach()))
                loss.backward()
                made.update()
        assert losses[-1] < losses[0], name
        tried.append(name)
    assert {"none", "topk", "group_topk", "qsgd", "terngrad", "sign", "algc", "hylo"} <= set(tried)


def test_what_cannot_work_between_replicas_is_refused(rank: int) -> None:
    def replicated(model: Any, *pair: str, **options: Any) -> Callable[[], object]:
        return lambda: attach_fsdp(model, *pair, **{"replicas": mesh()["replica"].get_group()} | options)

    def in_fsdp(*pair: str, model: Any = None, **options: Any) -> Callable[[], object]:
        return replicated(sharded(model or network(), mesh()["shard"]), *pair, **options)

    others, first = dist.new_group([2, 3]), rank // 2 * 2
    root_only = network()
    fully_shard(root_only.blocks, mesh=mesh()["shard"])
    table = network()
    table.blocks.append(nn.EmbeddingBag(8, 3, sparse=True))
    with torch.device("meta"):
        empty = network()
    hsdp = fully_shard(network(), mesh=mesh())
    in_fsdp1 = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    needs = "ValueError: compression in FSDP2 needs a model in fully_shard and got "
    cases = {
        f"{needs}a bare Network; call fully_shard on its blocks": replicated(network(), "none"),
        f"{needs}one in DDP; use attach": replicated(DistributedDataParallel(network()), "none"),
        f"{needs}one in FSDP1; call fully_shard": replicated(in_fsdp1, "none"),
        "ValueError: scale is sharded over a mesh of 2 dimensions, as in native HSDP": replicated(hsdp, "none"),
        "ValueError: scale is not sharded, so FSDP2 does not reduce its gradient; call fully_shard on": replicated(
            root_only, "none"
        ),
        "Incompatible: topk sends Sparse payloads: native adds": in_fsdp("topk", "native"),
        "ValueError: auto works through DDP's communication hook": in_fsdp("auto"),
        "ValueError: torch_fp16 works through DDP's communication hook": in_fsdp("torch_fp16", "native"),
        "ValueError: group_topk wants the whole model as one bucket with these options, and fully_shard": in_fsdp(
            "group_topk:scope=model"
        ),
        "ValueError: none applies no momentum": in_fsdp("none", momentum=0.9),
        f"ValueError: rank {first} holds shard 0 of 2 and rank {first + 1} shard 1 of 2, and": in_fsdp(
            "none", replicas=mesh()["shard"].get_group()
        ),
        "ValueError: scale is on the meta device; call model.to_empty": in_fsdp("none", model=empty),
        "ValueError: Embedding blocks.2 makes sparse gradients, which do not fit in buckets; give it": in_fsdp(
            "row_sparse", model=table
        ),
        "ValueError: scale is fp64 and group_topk works in fp32": in_fsdp("group_topk", model=network().double()),
    }
    if rank < 2:
        cases[f"ValueError: rank {rank} is not in its group of replicas; with a mesh of (replica, shard) pass"] = (
            in_fsdp("none", replicas=others)
        )
    for sentence, call in cases.items():
        assert message_of(call).startswith(sentence)


def test_what_cannot_work_in_a_reduce_scatter_is_refused(rank: int) -> None:
    def scattered(compressor: str, model: Any = None) -> Callable[[], object]:
        return lambda: attach_reduce_scatter(model or sharded(network(), mesh_of_all()), compressor)

    by_themselves = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replica", "shard"))
    with ReduceScatter() as made:
        for sentence, call in {
            "ValueError: powersgd needs all ranks while it encodes": scattered("powersgd"),
            "ValueError: terngrad needs all ranks while it encodes": scattered("terngrad:shared_scale=true"),
            "ValueError: torch_fp16 works through DDP's communication hook": scattered("torch_fp16"),
            "ValueError: compression in FSDP2 needs a model in fully_shard and got a bare": scattered(
                "none", network()
            ),
            "ValueError: the model is not divided among several ranks": scattered(
                "none", fully_shard(network(), mesh=by_themselves["shard"])
            ),
            "ValueError: this model has a hook already; close it": scattered("none", made.model),
        }.items():
            assert message_of(call).startswith(sentence)
