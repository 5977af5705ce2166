"""Misuse of `attach`, what cannot work with DDP, and a lost rank; test_engines.py has what all engines refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from collectives.allreduce import Allgather, BoundAllgather
from collectives.base import SumEncoder
from collectives.transport.base import Transport, TransportError
from gradwire import attach
from tests.testing.ddp_scenes import LR, batch, loss_of, message_of, network, train, wrapped
from tests.testing.ranks import run_ranks

TOPK = ("topk", "allgather")
two_ranks = pytest.mark.ranks(2)


@dataclasses.dataclass(kw_only=True)
class Witness(Allgather):
    """An all-gather that counts committed and dropped steps."""

    def bind(self, transport: Transport, encoder: SumEncoder | None = None) -> BoundWitness:
        return BoundWitness(self, transport)


class BoundWitness(BoundAllgather):
    def __init__(self, options: Allgather, transport: Transport) -> None:
        super().__init__(options, transport)
        self.committed = self.dropped = 0

    def commit(self) -> None:
        self.committed += 1

    def drop(self) -> None:
        self.dropped += 1


@two_ranks
def test_the_collective_drops_what_the_ranks_drop(rank: int) -> None:
    ddp = wrapped()
    hook = attach(ddp, "topk:ratio=0.05", Witness())
    train(ddp, hook, range(2))
    (loss_of(ddp, rank, 2) * (float("nan") if rank == 0 else 1)).backward()
    assert not hook.step_ok()
    ddp.zero_grad()
    train(ddp, hook, range(3, 4))
    witness = cast(BoundWitness, hook.collective)
    hook.close()
    assert (witness.committed, witness.dropped) == (3, 1)


@two_ranks
@pytest.mark.parametrize("bucket_view", [False, True])
def test_a_closed_hook_leaves_the_network_to_a_new_ddp(rank: int, bucket_view: bool) -> None:
    first = wrapped(gradient_as_bucket_view=bucket_view)
    hook = attach(first, *TOPK)
    train(first, hook, range(2))
    loss_of(first, rank, 2)  # as an evaluation that keeps a graph
    hook.close()
    second = DistributedDataParallel(first.module, gradient_as_bucket_view=bucket_view)
    hook = attach(second, *TOPK)
    train(second, hook, range(2, 5))
    hook.close()
    assert "is closed; wrap the model in DDP again" in message_of(loss_of(first, rank, 5).backward)


@two_ranks
def test_attach_closes_the_open_hook_of_the_same_network(rank: int) -> None:
    first = wrapped()
    attach(first, *TOPK)
    loss_of(first, rank, 0).backward()  # no step follows, as after an exception
    first.zero_grad()
    after = []
    for ddp in (DistributedDataParallel(first.module), wrapped()):
        hook = attach(ddp, *TOPK)
        after.append(train(ddp, hook, range(3)))
        hook.close()
    assert torch.equal(*after)
    assert "is closed; wrap the model in DDP again" in message_of(loss_of(first, rank, 5).backward)


def inside_no_sync(ddp: Any, rank: int) -> None:
    with ddp.no_sync():
        loss_of(ddp, rank, 2).backward()


def accumulated(ddp: Any, rank: int) -> None:
    inside_no_sync(ddp, rank)
    loss_of(ddp.module, rank, 3).backward()
    loss_of(ddp, rank, 4).backward()


def converted(ddp: Any, rank: int) -> None:
    ddp.bfloat16()
    ddp(batch(rank, 2)[0].bfloat16()).sum().backward()


def frozen(ddp: Any, rank: int) -> None:
    ddp.module[0].requires_grad_(False)
    loss_of(ddp, rank, 2).backward()


def replaced(ddp: Any, rank: int) -> None:
    ddp.module[0] = nn.Linear(20, 30)
    loss_of(ddp, rank, 2).backward()


def last_unused(ddp: Any, rank: int) -> None:
    ddp.module = ddp.module[:1]
    ddp(torch.ones(3, 20)).sum().backward()


def first_unused(ddp: Any, rank: int) -> None:
    ddp.module = ddp.module[2:]
    ddp(torch.ones(3, 30)).sum().backward()


NOTHING_CAME = "no gradient came through DDP since the last step_ok(); call ddp(x), not model(x), leave the last"
BEFORE = "; do that first, then wrap the model in DDP"
UNUSED = "backward() gave {} no gradient, so DDP did not finish; wrap the model with find_unused_parameters=True"
MISSED: list[tuple[Callable[[Any, int], object], str]] = [
    (lambda ddp, rank: loss_of(ddp.module, rank, 2).backward(), NOTHING_CAME),
    (inside_no_sync, NOTHING_CAME),
    (accumulated, ""),
    (
        converted,
        f"0.weight was torch.float32 [30, 20] on cpu when the model was wrapped and is torch.bfloat16 [30, 20] on cpu"
        f"{BEFORE}",
    ),
    (frozen, f"0.weight was frozen after the model was wrapped{BEFORE}"),
    (replaced, f"0.weight was added, replaced or unfrozen after the model was wrapped{BEFORE}"),
    (last_unused, UNUSED.format("2.weight")),
    (first_unused, UNUSED.format("0.weight")),
]


@two_ranks
def test_a_step_without_gradients_from_ddp_is_an_error_that_says_why(rank: int) -> None:
    for step, sentence in MISSED:
        ddp = wrapped(bucket_cap_mb=3e-4)
        hook = attach(ddp, "none", "allgather")
        train(ddp, hook, range(2))
        step(ddp, rank)
        assert message_of(hook.step_ok).startswith(f"RuntimeError: {sentence}" if sentence else "no error")
        hook.close()


@two_ranks
def test_a_conversion_in_the_first_steps_is_named(rank: int) -> None:
    ddp = wrapped(gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    hook = attach(ddp, "none", "allgather", optimizer=optimizer)
    loss_of(ddp, rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    ddp.module.double()  # before DDP makes its buckets again
    ddp(batch(rank, 1)[0].double()).sum().backward()
    assert "0.weight was torch.float32 [30, 20] on cpu when the model was wrapped" in message_of(optimizer.step)
    hook.close()


@two_ranks
def test_a_new_optimizer_must_be_given_to_the_hook(rank: int) -> None:
    for is_watched in (True, False):
        ddp = wrapped()
        hook = attach(ddp, "none", "allgather", optimizer=torch.optim.SGD(ddp.parameters(), lr=LR))
        other = torch.optim.AdamW(ddp.parameters())
        if is_watched:
            hook.watch(other)
        loss_of(ddp, rank, 0).backward()
        other.step()
        said = message_of(loss_of(ddp, rank, 1).backward)
        hook.close()
        assert (said == "no error") == is_watched
    assert "not followed by optimizer.step()" in said
    assert said.endswith("if an optimizer that was made later does the update, give it to hook.watch")


@two_ranks
def test_ranks_that_join_are_told_that_they_cannot(rank: int) -> None:
    ddp = wrapped()
    hook = attach(ddp, "none", "allgather")
    with ddp.join():
        said = message_of(lambda: loss_of(ddp, rank, 0).backward())
    hook.close()
    assert said == "RuntimeError: ddp.join() is not possible with this hook; give every rank equally many batches"


def by_python_reducer() -> DistributedDataParallel:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return wrapped()


def changed(change: Callable[[Any], object], model: nn.Module | None = None) -> DistributedDataParallel:
    """Return the network, or another one, whose first layer was changed after it was wrapped."""
    ddp = DistributedDataParallel(model or network(), find_unused_parameters=True)
    change(ddp.module[0])
    return ddp


def after(change: Callable[[Any], object]) -> DistributedDataParallel:
    """Return the network in DDP after this was done to DDP."""
    ddp = wrapped()
    change(ddp)
    return ddp


def with_a_layer_at_rest() -> nn.Module:
    model = network()
    model[0].requires_grad_(False)
    return model


def delayed() -> DistributedDataParallel:
    model = with_a_layer_at_rest()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return DistributedDataParallel(model, delay_all_reduce_named_params=trained, param_to_hook_all_reduce=trained[0][1])


@two_ranks
def test_what_cannot_work_is_refused_in_one_sentence_before_anything_starts(rank: int) -> None:
    def in_ddp(*layers: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(nn.Sequential(*layers))

    def of_zero() -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(small.parameters(), torch.optim.SGD, lr=LR, overlap_with_ddp=True)

    small, two_types = wrapped(), in_ddp(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.bfloat16))
    in_fsdp: Any = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    in_fsdp2: Any = fully_shard(network(), mesh=init_device_mesh("cpu", (2,)))
    bare: Any = network()
    scaler = torch.amp.GradScaler("cpu")
    built_in = dist.BuiltinCommHookType.ALLREDUCE
    needs_ddp = "attach needs a model in DDP and got "
    cases: list[tuple[str, Callable[[], object]]] = [
        ("topk sends Sparse payloads: ", lambda: attach(small, "topk", "native")),
        ("dgc applies the momentum itself", lambda: attach(small, "dgc", "allgather")),
        ("dgc applies the momentum itself", lambda: attach(small, "dgc", "allgather", momentum=1.0)),
        ("topk applies no momentum", lambda: attach(small, *TOPK, momentum=0.9)),
        (
            "group_topk wants the whole model as one bucket with these options; "
            "wrap it with DistributedDataParallel(..., bucket_cap_mb=4)",
            lambda: attach(in_ddp(nn.Linear(1000, 1000)), "group_topk:preset=patent", "ring"),
        ),
        (
            "group_topk wants the whole model as one bucket with these options, and DDP puts parameters of "
            "torch.bfloat16 and torch.float32 into separate buckets",
            lambda: attach(two_types, "group_topk:scope=model", "ring"),
        ),
        ("torch_fp16 is PyTorch's own hook", lambda: attach(small, "torch_fp16", "native")),
        (
            "Embedding 0 makes sparse gradients, which do not fit in buckets; give it sparse=False, and use "
            "compressor row_sparse to send the rows that are not zero",
            lambda: attach(in_ddp(nn.Embedding(10, 3, sparse=True)), *TOPK),
        ),
        (
            "0.weight is complex, which no compressor supports",
            lambda: attach(in_ddp(nn.Linear(3, 3, dtype=torch.complex64)), *TOPK),
        ),
        (
            "0.weight was frozen after the model was wrapped; do",
            lambda: attach(changed(lambda layer: layer.weight.requires_grad_(False)), *TOPK),
        ),
        (
            "0.weight was added, replaced or unfrozen after the model",
            lambda: attach(changed(lambda layer: layer.requires_grad_(True), with_a_layer_at_rest()), *TOPK),
        ),
        (
            "0.weight was torch.float32 [30, 20] on cpu when the model was wrapped and is torch.b",
            lambda: attach(changed(lambda layer: layer.bfloat16()), *TOPK),
        ),
        (
            "0.weight is fp64 and topk works in fp32, where its gradient may overflow; convert the model to fp32, or "
            "use compressor none",
            lambda: attach(DistributedDataParallel(network().double()), *TOPK),
        ),
        (f"{needs_ddp}a bare Sequential; give it DistributedDataParallel(model)", lambda: attach(bare, *TOPK)),
        (
            f"{needs_ddp}one in FSDP, which reduces gradients itself; give it DistributedDataParallel(model)",
            lambda: attach(in_fsdp, *TOPK),
        ),
        (f"{needs_ddp}one in fully_shard; use gradwire.attach_fsdp", lambda: attach(in_fsdp2, *TOPK)),
        (
            'under torch._dynamo.config.optimize_ddp = "python_reducer" DDP has no',
            lambda: attach(by_python_reducer(), *TOPK),
        ),
        (
            "mixed_precision takes the place of DDP's communication hook",  # DDP itself accepts it on GPUs only
            lambda: attach(after(lambda ddp: setattr(ddp, "mixed_precision", _MixedPrecision())), *TOPK),
        ),
        ("delay_all_reduce_named_params leaves DDP without buckets", lambda: attach(delayed(), *TOPK)),
        (
            "this model already has a communication hook",
            lambda: attach(after(lambda ddp: attach(ddp, *TOPK).close()), *TOPK),
        ),
        (
            "this model already has a communication hook",
            lambda: attach(after(lambda ddp: ddp._register_builtin_comm_hook(built_in)), *TOPK),
        ),
        (
            "with skip_all_reduce_unused_params ranks would not know",
            lambda: attach(wrapped(find_unused_parameters=True, skip_all_reduce_unused_params=True), *TOPK),
        ),
        ("overlap_with_ddp takes the place", lambda: attach(small, *TOPK, optimizer=of_zero())),
        ("clip_norm=0.0 is not possible", lambda: attach(small, *TOPK, clip_norm=0.0)),
        ("an infinite gradient has no norm to clip", lambda: attach(small, *TOPK, clip_norm=1.0, nonfinite="zero")),
        ("a scaler skips steps that overflow", lambda: attach(small, *TOPK, scaler=scaler, nonfinite="raise")),
    ]
    for sentence, call in cases:
        kind = "Incompatible" if sentence.startswith("topk sends") else "ValueError"
        said = message_of(call)
        assert said.startswith(f"{kind}: {sentence}"), said
        assert "\n" not in said


def leave_early(rank: int) -> int | None:
    ddp = wrapped()
    hook = attach(ddp, "none", "ring")
    train(ddp, hook, range(2))  # in its second step DDP itself communicates, to form new buckets
    if rank == 1:
        return None
    loss_of(ddp, rank, 2).backward()
    with pytest.raises(TransportError) as caught:
        hook.step_ok()
    return caught.value.lost_rank


def test_a_lost_rank_is_named_to_the_training_loop(tmp_path: Path) -> None:
    assert run_ranks(leave_early, 2, tmp_path)[0] == 1
