"""`attach` in the loops, models and options of DDP that users have, on two gloo ranks."""

from __future__ import annotations

import warnings
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from gradwire import attach
from tests.testing.ddp_scenes import LR, batch, gradients, loss_of, message_of, network, weights, wrapped
from tests.testing.engines import alone, assert_same_on_all_ranks

SPARSE = ("topk:ratio=0.1,warmup_epochs=0", "allgather")
STEPS = 5
SCALE = 1024.0
CLIP = 0.05

pytestmark = pytest.mark.ranks(2)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def halves(ddp: nn.Module) -> list[torch.optim.Optimizer]:
    """Return an optimizer for each half of the model."""
    parameters = list(ddp.parameters())
    return [torch.optim.SGD(half, lr=LR, momentum=0.9) for half in (parameters[:2], parameters[2:])]


def poison(ddp: Any, rank: int, step: int) -> None:
    """Make this rank's gradient infinite at step 2 on rank 1."""
    if (rank, step) == (1, 2):
        handle = next(ddp.module.parameters()).register_hook(
            lambda gradient: (handle.remove(), gradient * torch.inf)[1]
        )


def trained(rank: int, ddp: Any, pair: tuple[str, str] = SPARSE, optimizer: Any = None) -> torch.Tensor:
    """Return the weights after a loop that asks `step_ok`, and in which a gradient is infinite."""
    hook, optimizer = attach(ddp, *pair), optimizer or sgd(ddp)
    for step in range(STEPS):
        poison(ddp, rank, step)
        loss_of(ddp, rank, step).backward()
        if hook.step_ok():
            optimizer.step()
        optimizer.zero_grad()
    hook.close()
    return weights(ddp)


@pytest.mark.parametrize("way", ["optimizer", "two optimizers", "closure", "disabled scaler"])
def test_with_the_optimizer_given_a_loop_need_not_ask(rank: int, way: str) -> None:
    ddp, scaler = wrapped(), torch.amp.GradScaler("cpu", enabled=False)
    optimizers = halves(ddp) if way == "two optimizers" else [sgd(ddp)]
    hook = attach(ddp, *SPARSE, optimizer=optimizers, scaler=scaler if way == "disabled scaler" else None)
    for step in range(STEPS):
        poison(ddp, rank, step)
        loss = loss_of(ddp, rank, step)
        if way == "closure":
            optimizers[0].step(lambda loss=loss: (loss.backward(), float(loss))[1])  # type: ignore[misc]
        else:
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        ddp.zero_grad()
    if way == "closure":
        said = message_of(lambda: optimizers[0].step(lambda: 0.0))
        assert "no gradient came through DDP since the last optimizer.step()" in said
    hook.close()
    assert torch.isfinite(weights(ddp)).all()
    assert torch.equal(weights(ddp), trained(rank, wrapped()))


def scaled(rank: int, way: str) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Return weights and residuals with or without a scaler whose scale grows, and which overflows at step 2."""
    ddp = wrapped(gradient_as_bucket_view=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1, enabled=way != "plain")
    optimizer = sgd(ddp)
    hook = attach(ddp, *SPARSE, scaler=scaler, optimizer=optimizer if way == "scaler and optimizer" else ())
    scales, infinite = [], []
    for step in range(STEPS):
        poison(ddp, rank, step)
        scaler.scale(loss_of(ddp, rank, step)).backward()
        ok = way == "scaler and optimizer" or hook.step_ok()
        infinite.append(not bool(torch.isfinite(gradients(ddp)).all()))
        if ok:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    residuals = hook.state_dict()["reducer"]["residuals"]
    hook.close()
    if way != "plain":
        assert scales == [2 * SCALE, 4 * SCALE, 2 * SCALE, 4 * SCALE, 8 * SCALE]
        assert infinite == [False, False, True, False, False]
    return weights(ddp), residuals


def test_a_scaler_grows_and_overflows_and_residuals_do_not_notice(rank: int) -> None:
    expected = scaled(rank, "plain")
    for way in ("scaler", "scaler and optimizer"):
        found = scaled(rank, way)
        torch.testing.assert_close(found, expected)
        assert_same_on_all_ranks(found[0])


def test_an_overflow_is_seen_in_every_bucket_and_by_every_optimizer(rank: int) -> None:
    ddp, scaler = wrapped(bucket_cap_mb=3e-4), torch.amp.GradScaler("cpu", init_scale=SCALE)
    optimizers = halves(ddp)
    hook = attach(ddp, *SPARSE, scaler=scaler)
    for step in range(1, 3):
        before = weights(ddp)
        poison(ddp, rank, step)
        scaler.scale(loss_of(ddp, rank, step)).backward()
        assert hook.step_ok()
        infinite = [bool(torch.isinf(p.grad).all()) for p in ddp.parameters()]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        ddp.zero_grad()
    hook.close()
    assert infinite == [True] * 4
    assert torch.equal(weights(ddp), before)
    assert scaler.get_scale() == SCALE / 2


class Gated(nn.Module):
    """A layer that is large enough to be taken from backward, behind a gate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.large, self.small = nn.Linear(20, 2000), nn.Linear(20, 2000)

    def forward(self, x: torch.Tensor, gate: float) -> torch.Tensor:
        return cast(torch.Tensor, gate * self.large(x) + self.small(x))


def test_a_gradient_of_zeros_is_not_the_last_update(rank: int) -> None:
    ddp = DistributedDataParallel(Gated(), find_unused_parameters=True, gradient_as_bucket_view=True)
    hook = attach(ddp, "none", "ring")
    for gate in (1.0, 1.0, 0.0):
        ddp(batch(rank, int(gate))[0], gate).sum().backward()
        assert hook.step_ok()
        assert bool(ddp.module.large.weight.grad.any()) == bool(gate)
        ddp.zero_grad()
    hook.close()


def test_each_rank_clips_its_gradient_before_it_is_sent(rank: int) -> None:
    ddp = wrapped(bucket_cap_mb=3e-4, gradient_as_bucket_view=True)
    hook = attach(ddp, "none", "ring", clip_norm=CLIP)
    for step in range(3):
        loss_of(ddp, rank, step).backward()
        assert hook.step_ok()
        expected = torch.zeros_like(gradients(ddp))
        for each in range(2):
            model = network()
            loss_of(model, each, step).backward()
            assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
            expected += gradients(model) / 2
        torch.testing.assert_close(gradients(ddp), expected)
        ddp.zero_grad()
    hook.close()


class Optional(nn.Module):
    """Two branches, of which a step may use either or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.left, self.right = nn.Linear(20, 30), nn.Linear(30, 5), nn.Linear(30, 5)

    def forward(self, x: torch.Tensor, *, left: bool, right: bool) -> torch.Tensor:
        y = self.body(x).relu()
        used = [branch(y) for branch, wanted in ((self.left, left), (self.right, right)) if wanted]
        return cast(torch.Tensor, sum(used))


@pytest.mark.parametrize(
    "pair",
    [
        "topk:ratio=0.1,warmup_epochs=0 allgather",
        "group_topk:ratio=0.1,group_size=64,warmup_epochs=0 ring",
        "powersgd native",
        "qsgd allgather",
    ],
)
def test_a_layer_that_no_rank_used_sends_nothing_and_keeps_its_residual(rank: int, pair: str) -> None:
    ddp = DistributedDataParallel(Optional(), find_unused_parameters=True)
    hook = attach(ddp, *pair.split())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    waiting, sent = [], [0]
    for step in range(4):  # no rank uses the left branch at steps 1 and 3, and only rank 0 at steps 0 and 2
        x, y = batch(rank, step)
        nn.functional.cross_entropy(ddp(x, left=step % 2 == 0 and rank == 0, right=True), y).backward()
        assert hook.step_ok()
        assert (ddp.module.left.weight.grad is not None) == (step % 2 == 0)
        optimizer.step()
        optimizer.zero_grad()
        (left,) = (layer for layer in hook.layers if layer.name == "left.weight")
        waiting.append(hook.state_dict()["reducer"]["residuals"].get(left.id, torch.zeros(0)))
        sent.append(hook.traffic["gradient"].nbytes)
    hook.close()
    if not pair.startswith("qsgd"):  # which keeps no residual
        assert torch.equal(waiting[1], waiting[0])
        assert torch.equal(waiting[3], waiting[2])
    assert sent[2] - sent[1] < sent[1]
    if "topk" in pair and rank == 0:
        assert waiting[0].norm() > 0
    assert_same_on_all_ranks(weights(ddp))


class Tied(nn.Module):
    """One matrix that is used twice, a scalar, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encode = nn.Linear(20, 20)
        self.decode = nn.Linear(20, 20, bias=False)
        self.decode.weight = self.encode.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.empty(0))
        self.head = nn.Linear(20, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.decode(self.encode(x).relu()) * self.scale + self.nothing.sum()
        return cast(torch.Tensor, self.head(hidden))


@pytest.mark.parametrize("kind", ["tied, scalar and empty", "static graph", "torch.compile"])
def test_models_and_loops_of_many_kinds_train_as_in_one_process(rank: int, kind: str) -> None:
    makes: dict[str, tuple[Any, dict[str, Any]]] = {
        "tied, scalar and empty": (Tied, {"gradient_as_bucket_view": True}),
        "static graph": (network, {"static_graph": True}),
        "torch.compile": (network, {}),
    }
    make, options = makes[kind]
    model: Any = DistributedDataParallel(make(), **options)
    if kind == "torch.compile":
        model = torch.compile(model, backend="aot_eager")
    hook = attach(model, "none", "ring")
    optimizer = sgd(model)
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        assert hook.step_ok()
        optimizer.step()
        optimizer.zero_grad()
    hook.close()
    expected = alone(([(0, step), (1, step)] for step in range(STEPS)), make(), momentum=0.9)
    torch.testing.assert_close(weights(model), expected, rtol=1e-4, atol=1e-5)


def test_gradients_in_bf16_are_about_those_of_one_process(rank: int) -> None:
    half, model = DistributedDataParallel(network().bfloat16()), network().bfloat16()
    hook = attach(half, "none", "ring")

    def loss(of: nn.Module, rank: int) -> torch.Tensor:
        x, y = batch(rank, 0)
        return nn.functional.cross_entropy(of(x.bfloat16()).float(), y)

    loss(half, rank).backward()
    assert hook.step_ok()
    hook.close()
    ((loss(model, 0) + loss(model, 1)) / 2).backward()
    torch.testing.assert_close(gradients(half), gradients(model), rtol=0.02, atol=0.01)


def test_two_models_in_one_process_do_not_disturb_each_other(rank: int) -> None:
    pairs = (SPARSE, ("group_topk:ratio=0.1,warmup_epochs=0", "ring"))
    both = [wrapped(), wrapped()]
    hooks = [attach(ddp, *pair) for ddp, pair in zip(both, pairs, strict=True)]
    optimizers = [sgd(ddp) for ddp in both]
    for step in range(STEPS):
        for ddp, hook, optimizer in zip(both, hooks, optimizers, strict=True):
            poison(ddp, rank, step)
            loss_of(ddp, rank, step).backward()
            if hook.step_ok():
                optimizer.step()
            optimizer.zero_grad()
    for hook in hooks:
        hook.close()
    for ddp, pair in zip(both, pairs, strict=True):
        assert torch.equal(weights(ddp), trained(rank, wrapped(), pair))


def test_an_optimizer_that_shards_its_state_gets_the_same_gradients(rank: int) -> None:
    after = []
    for is_sharded in (True, False):
        ddp = wrapped()
        optimizer = (
            ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
            if is_sharded
            else torch.optim.Adam(ddp.parameters(), lr=0.01)
        )
        after.append(trained(rank, ddp, optimizer=optimizer))
    assert torch.equal(*after)


def test_pytorch_refuses_batch_norm_over_ranks_on_cpus(rank: int) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(network(), nn.BatchNorm1d(5)))
    assert "SyncBatchNorm" in message_of(lambda: DistributedDataParallel(model)(batch(rank, 0)[0]))


@pytest.mark.parametrize("when", [0, 2, None, "outside"])
def test_parameters_that_differ_after_the_first_update_are_named_once(rank: int, when: int | str | None) -> None:
    """One rank changes a layer after that step; "outside": ranks train different parameters of no model."""
    ddp = wrapped()
    hook = attach(ddp, *SPARSE)
    optimizer = sgd(ddp)
    if when == "outside":
        optimizer.add_param_group({"params": [nn.Parameter(torch.tensor(float(rank)))]})
        hook.watch(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            loss_of(ddp, rank, step).backward()
            assert hook.step_ok()
            optimizer.step()
            optimizer.zero_grad()
            if step == when and rank == 1:
                ddp.module[2].weight.data[0, 0] += 1e-6
    hook.close()
    named = {
        0: "2.weight differs between ranks",
        "outside": "a parameter of an optimizer that is not in the model differs",
    }
    assert len(caught) == (rank == 0 and when in named)
    for warning in caught:
        assert str(warning.message).startswith(f"after the first update {named[when]}")
