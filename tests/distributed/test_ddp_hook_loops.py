"""`attach` in the loops, models and options of DDP that users have, on real gloo ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp.attach import attach
from gradwire.ddp.hook import CompressionHook
from tests.testing.ddp_scenes import LR, batch, gradients, loss_of, message_of, network, played_by_two, weights, wrapped

SPARSE = ("topk:ratio=0.1,warmup_epochs=0", "allgather")
STEPS = 5
SCALE = 1024.0
CLIP = 0.05

pytestmark = pytest.mark.xdist_group("ddp hook loops")


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def plain(ddp: nn.Module, hook: CompressionHook, steps: range) -> torch.Tensor:
    """Train with a loop that calls `step_ok`."""
    optimizer = sgd(ddp)
    for step in steps:
        loss_of(ddp, dist.get_rank(), step).backward()
        if hook.step_ok():
            optimizer.step()
        optimizer.zero_grad()
    return weights(ddp)


def poison(ddp: DistributedDataParallel, rank: int, step: int) -> None:
    """Make this rank's gradient infinite at step 2 on rank 1."""
    if (rank, step) == (1, 2):
        handle = next(ddp.module.parameters()).register_hook(
            lambda gradient: (handle.remove(), gradient * torch.inf)[1]
        )


def skipped_by_the_hook(rank: int) -> dict[str, torch.Tensor]:
    """Return the weights after training with one infinite gradient, by the way in which the step is skipped."""
    after = {}
    for way in ("step_ok", "optimizer", "two optimizers", "closure"):
        ddp = wrapped()
        halves = [list(ddp.parameters())[:2], list(ddp.parameters())[2:]]
        optimizers = [torch.optim.SGD(half, lr=LR, momentum=0.9) for half in halves]
        if way in ("optimizer", "closure"):
            optimizers = [sgd(ddp)]
        hook = attach(ddp, *SPARSE, optimizer=() if way == "step_ok" else optimizers)
        for step in range(STEPS):
            poison(ddp, rank, step)
            loss = loss_of(ddp, rank, step)
            if way == "closure":
                optimizers[0].step(lambda loss=loss: (loss.backward(), float(loss))[1])  # type: ignore[misc]
                optimizers[0].zero_grad()
                continue
            loss.backward()
            if way != "step_ok" or hook.step_ok():
                for optimizer in optimizers:
                    optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        hook.close()
        after[way] = weights(ddp)
    return after


def updated_wrongly(rank: int) -> list[str]:
    """Return the errors of updates without a gradient, and of two backwards in a row."""
    ddp = wrapped()
    optimizer = sgd(ddp)
    hook = attach(ddp, *SPARSE, optimizer=optimizer)
    loss_of(ddp, rank, 0).backward()
    optimizer.step()
    state = hook.state_dict()
    said = [message_of(lambda: (loss_of(ddp.module, rank, 1).backward(), optimizer.step()))]
    hook.load_state_dict(state)
    said.append(message_of(lambda: optimizer.step(lambda: 0.0)))
    loss_of(ddp, rank, 1).backward()
    said.append(message_of(lambda: loss_of(ddp, rank, 2).backward()))
    hook.close()
    return said


def scaled(rank: int) -> dict[str, Any]:
    """Return weights and residuals with and without a scaler whose scale grows, and which overflows at step 2."""
    found: dict[str, Any] = {}
    for way in ("plain", "scaler", "scaler and optimizer"):
        ddp, scaler = (
            wrapped(gradient_as_bucket_view=True),
            torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1),
        )
        optimizer = sgd(ddp)
        used = scaler if way != "plain" else None
        hook = attach(ddp, *SPARSE, scaler=used, optimizer=optimizer if way == "scaler and optimizer" else ())
        scales, infinite = [], []
        for step in range(STEPS):
            poison(ddp, rank, step)
            loss = loss_of(ddp, rank, step)
            (loss if used is None else scaler.scale(loss)).backward()
            ok = way == "scaler and optimizer" or hook.step_ok()
            infinite.append(not bool(torch.isfinite(gradients(ddp)).all()))
            if used is None and ok:
                optimizer.step()
            elif used is not None:
                assert ok
                scaler.step(optimizer)
                scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
        residuals = hook.state_dict()["reducer"]["residuals"]
        hook.close()
        found[way] = {"weights": weights(ddp), "residuals": residuals, "scales": scales, "infinite": infinite}
    return found


def scaled_in_buckets(rank: int) -> dict[str, Any]:
    """Return what a step with an overflow leaves, with several buckets and an optimizer for each half of the model."""
    ddp, scaler = wrapped(bucket_cap_mb=3e-4), torch.amp.GradScaler("cpu", init_scale=SCALE)
    optimizers = [torch.optim.SGD(half, lr=LR) for half in (list(ddp.parameters())[:2], list(ddp.parameters())[2:])]
    hook = attach(ddp, *SPARSE, scaler=scaler)
    before, infinite = weights(ddp), []
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
    return {"changed": not torch.equal(weights(ddp), before), "infinite": infinite, "scale": scaler.get_scale()}


def scaler_at_rest(rank: int) -> torch.Tensor:
    """Return the weights with a scaler that is disabled, although a gradient was infinite."""
    ddp, scaler = wrapped(), torch.amp.GradScaler("cpu", enabled=False)
    optimizer = sgd(ddp)
    hook = attach(ddp, *SPARSE, scaler=scaler, optimizer=optimizer)
    for step in range(STEPS):
        poison(ddp, rank, step)
        scaler.scale(loss_of(ddp, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    hook.close()
    return weights(ddp)


def closed_gate(rank: int) -> dict[str, torch.Tensor]:
    """Return the gradients of two steps in whose second one a large layer is used but multiplied by 0."""
    ddp = DistributedDataParallel(Gated(), find_unused_parameters=True, gradient_as_bucket_view=True)
    hook = attach(ddp, "none", "ring")
    found = {}
    for step, gate in enumerate((1.0, 1.0, 0.0)):
        ddp(batch(rank, step)[0], gate).sum().backward()
        assert hook.step_ok()
        found[str(step)] = ddp.module.large.weight.grad.clone()
        ddp.zero_grad()
    hook.close()
    return found


class Gated(nn.Module):
    """A layer that is large enough to be taken from backward, behind a gate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.large, self.small = nn.Linear(20, 2000), nn.Linear(20, 2000)

    def forward(self, x: torch.Tensor, gate: float) -> torch.Tensor:
        return cast(torch.Tensor, gate * self.large(x) + self.small(x))


def clipped(rank: int) -> dict[str, Any]:
    """Return the mean of the ranks' clipped gradients, exchanged in several buckets."""
    ddp = wrapped(bucket_cap_mb=3e-4, gradient_as_bucket_view=True)
    hook = attach(ddp, "none", "ring", clip_norm=CLIP)
    means = []
    for step in range(3):
        loss_of(ddp, rank, step).backward()
        assert hook.step_ok()
        means.append(gradients(ddp))
        ddp.zero_grad()
    hook.close()
    return {"means": means}


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


def unused(rank: int) -> dict[str, Any]:
    """Train with a branch that no rank uses at steps 1 and 3; return what the hook sent and kept, by compressor."""
    found = {}
    for pair in (
        SPARSE,
        ("group_topk:ratio=0.1,group_size=64,warmup_epochs=0", "ring"),
        ("powersgd", "native"),
        ("qsgd", "allgather"),
    ):
        ddp = DistributedDataParallel(Optional(), find_unused_parameters=True)
        hook = attach(ddp, *pair)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
        waiting, sent, of_rank = [], [], []
        for step in range(4):
            x, y = batch(rank, step)
            left = step % 2 == 0 and rank == 0  # at steps 0 and 2 only rank 0 uses the left branch
            nn.functional.cross_entropy(ddp(x, left=left, right=True), y).backward()
            assert hook.step_ok()
            of_rank.append(ddp.module.left.weight.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
            residuals = hook.state_dict()["reducer"]["residuals"]
            waiting.append({layer.name: residuals.get(layer.id, torch.zeros(0)) for layer in hook.layers})
            sent.append(hook.traffic["gradient"].nbytes)
        hook.close()
        found[pair[0].partition(":")[0]] = {
            "weights": weights(ddp),
            "left": [each["left.weight"] for each in waiting],
            "sent": sent,
            "has_gradient": of_rank,
        }
    return found


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


def models(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights of this rank, and those of a model trained in one process, by kind of model or loop."""
    found: dict[str, dict[str, torch.Tensor]] = {}

    def compare(name: str, model: nn.Module, ddp: nn.Module, **options: Any) -> None:
        hook = attach(cast(DistributedDataParallel, ddp), "none", "ring", **options)
        optimizer = sgd(model)
        for step in range(STEPS):
            (sum(loss_of(model, each, step) for each in range(2)) / 2).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        found[name] = {"ddp": plain(ddp, hook, range(STEPS)), "alone": weights(model)}
        hook.close()

    compare("tied, scalar and empty", Tied(), DistributedDataParallel(Tied(), gradient_as_bucket_view=True))
    compare("static graph", network(), DistributedDataParallel(network(), static_graph=True))
    compiled = torch.compile(DistributedDataParallel(network()), backend="aot_eager")
    compare("torch.compile", network(), compiled)
    half = DistributedDataParallel(network().bfloat16())
    hook = attach(half, "none", "ring")
    x, y = batch(rank, 0)
    nn.functional.cross_entropy(half(x.bfloat16()).float(), y).backward()
    assert hook.step_ok()
    hook.close()
    alone = network().bfloat16()
    losses = [
        nn.functional.cross_entropy(alone(x.bfloat16()).float(), y) for x, y in (batch(each, 0) for each in range(2))
    ]
    (sum(losses) / 2).backward()  # type: ignore[union-attr]
    found["bf16"] = {"ddp": gradients(half).float(), "alone": gradients(alone).float()}
    return found


def side_by_side(rank: int) -> dict[str, torch.Tensor]:
    """Return the weights of two DDP models trained in turn in one process, and of each trained by itself."""
    both = [wrapped(), wrapped()]
    hooks = [attach(both[0], *SPARSE), attach(both[1], "group_topk:ratio=0.1,warmup_epochs=0", "ring")]
    optimizers = [sgd(ddp) for ddp in both]
    for step in range(STEPS):
        for ddp, hook, optimizer in zip(both, hooks, optimizers, strict=True):
            loss_of(ddp, rank, step).backward()
            assert hook.step_ok()
            optimizer.step()
            optimizer.zero_grad()
    for hook in hooks:
        hook.close()
    alone = []
    for pair in (SPARSE, ("group_topk:ratio=0.1,warmup_epochs=0", "ring")):
        ddp = wrapped()
        hook = attach(ddp, *pair)
        alone.append(plain(ddp, hook, range(STEPS)))
        hook.close()
    return {"both": torch.cat([weights(ddp) for ddp in both]), "alone": torch.cat(alone)}


def sharded_optimizer(rank: int) -> dict[str, torch.Tensor]:
    """Return the weights with `ZeroRedundancyOptimizer`, and with the optimizer that it shards."""
    after = {}
    for name in ("sharded", "whole"):
        ddp = wrapped()
        hook = attach(ddp, *SPARSE)
        optimizer: torch.optim.Optimizer = (
            ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
            if name == "sharded"
            else torch.optim.Adam(ddp.parameters(), lr=0.01)
        )
        for step in range(STEPS):
            loss_of(ddp, rank, step).backward()
            assert hook.step_ok()
            optimizer.step()
            optimizer.zero_grad()
        hook.close()
        after[name] = weights(ddp)
    return after


def differing(rank: int) -> dict[str, list[str]]:
    """Return the warnings if one rank changes a layer by itself, before or after the second step, or never.

    With "outside", ranks train different parameters that are not in the model.
    """
    said = {}
    for when in (0, 2, None, "outside"):
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
        said[str(when)] = [str(each.message) for each in caught]
    return said


def normalised_over_ranks(rank: int) -> str:
    """Return PyTorch's error for `SyncBatchNorm` on CPUs."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(network(), nn.BatchNorm1d(5)))
    try:
        DistributedDataParallel(model)(batch(rank, 0)[0])
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def overlapping(rank: int) -> str:
    """Return the error for `ZeroRedundancyOptimizer` with `overlap_with_ddp`."""
    ddp = wrapped()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=LR, overlap_with_ddp=True)
    try:
        attach(ddp, *SPARSE, optimizer=optimizer)
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of every scene, per rank."""
    scenes = (
        skipped_by_the_hook, updated_wrongly, scaled, scaled_in_buckets, scaler_at_rest, closed_gate, clipped, unused,
        models, side_by_side, sharded_optimizer, differing, overlapping, normalised_over_ranks,
    )  # fmt: skip
    return played_by_two(scenes, tmp_path_factory.mktemp("loops"))


def test_with_the_optimizer_given_a_loop_need_not_ask(played: list[dict[str, Any]]) -> None:
    for found in (each["skipped_by_the_hook"] for each in played):
        assert torch.isfinite(found["step_ok"]).all()
        assert torch.equal(found["optimizer"], found["step_ok"])
        assert torch.equal(found["two optimizers"], found["step_ok"])
        assert torch.equal(found["closure"], found["step_ok"])
    for each in played:
        without, closure, twice = each["updated_wrongly"]
        assert "no gradient came through DDP since the last optimizer.step()" in without
        assert "no gradient came through DDP since the last optimizer.step()" in closure
        assert "the last backward() was not followed by optimizer.step()" in twice


def test_a_scaler_grows_and_overflows_and_residuals_do_not_notice(played: list[dict[str, Any]]) -> None:
    for found in (each["scaled"] for each in played):
        for way in ("scaler", "scaler and optimizer"):
            torch.testing.assert_close(found[way]["weights"], found["plain"]["weights"])
            for layer, residual in found["plain"]["residuals"].items():
                torch.testing.assert_close(found[way]["residuals"][layer], residual)
            assert found[way]["scales"] == [2 * SCALE, 4 * SCALE, 2 * SCALE, 4 * SCALE, 8 * SCALE]
            assert found[way]["infinite"] == [False, False, True, False, False]
    assert torch.equal(*(each["scaled"]["scaler"]["weights"] for each in played))


def test_an_overflow_is_seen_in_every_bucket_and_by_every_optimizer(played: list[dict[str, Any]]) -> None:
    for found in (each["scaled_in_buckets"] for each in played):
        assert found == {"changed": False, "infinite": [True] * 4, "scale": SCALE / 2}


def test_a_disabled_scaler_is_no_scaler(played: list[dict[str, Any]]) -> None:
    for each in played:
        assert torch.equal(each["scaler_at_rest"], each["skipped_by_the_hook"]["step_ok"])


def test_a_gradient_of_zeros_is_not_the_last_update(played: list[dict[str, Any]]) -> None:
    for found in (each["closed_gate"] for each in played):
        assert found["1"].norm() > 0
        assert not found["2"].any()


def test_each_rank_clips_its_gradient_before_it_is_sent(played: list[dict[str, Any]]) -> None:
    for step in range(3):
        expected = torch.zeros(0)
        for rank in range(2):
            alone = network()
            loss_of(alone, rank, step).backward()
            norm = nn.utils.clip_grad_norm_(alone.parameters(), CLIP)
            assert norm > CLIP
            expected = gradients(alone) / 2 if rank == 0 else expected + gradients(alone) / 2
        for each in played:
            torch.testing.assert_close(each["clipped"]["means"][step], expected)


@pytest.mark.parametrize("compressor", ["topk", "group_topk", "powersgd", "qsgd"])
def test_a_layer_that_no_rank_used_sends_nothing_and_keeps_its_residual(
    played: list[dict[str, Any]], compressor: str
) -> None:
    for found in (each["unused"][compressor] for each in played):
        assert found["has_gradient"] == [True, False, True, False]
        if compressor != "qsgd":  # which keeps no residual
            for step in (1, 3):
                assert torch.equal(found["left"][step], found["left"][step - 1])
        sent = [after - before for before, after in zip([0, *found["sent"]], found["sent"], strict=False)]
        assert sent[1] < sent[0]
    if compressor in ("topk", "group_topk"):
        assert played[0]["unused"][compressor]["left"][0].norm() > 0  # only rank 0 used the layer
    assert torch.equal(*(each["unused"][compressor]["weights"] for each in played))


@pytest.mark.parametrize("name", ["tied, scalar and empty", "static graph", "torch.compile", "bf16"])
def test_models_and_loops_of_many_kinds_train_as_in_one_process(played: list[dict[str, Any]], name: str) -> None:
    for found in (each["models"][name] for each in played):
        tolerance = {"rtol": 0.02, "atol": 0.01} if name == "bf16" else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found["ddp"], found["alone"], **tolerance)


def test_two_models_in_one_process_do_not_disturb_each_other(played: list[dict[str, Any]]) -> None:
    for found in (each["side_by_side"] for each in played):
        assert torch.equal(found["both"], found["alone"])


def test_an_optimizer_that_shards_its_state_gets_the_same_gradients(played: list[dict[str, Any]]) -> None:
    for found in (each["sharded_optimizer"] for each in played):
        assert torch.equal(found["sharded"], found["whole"])
    assert all("overlap_with_ddp takes the place" in each["overlapping"] for each in played)


def test_pytorch_refuses_batch_norm_over_ranks_on_cpus(played: list[dict[str, Any]]) -> None:
    assert all("SyncBatchNorm" in each["normalised_over_ranks"] for each in played)


def test_parameters_that_differ_after_the_first_update_are_named_once(played: list[dict[str, Any]]) -> None:
    first, second = (each["differing"] for each in played)
    (said,) = first["0"]
    assert said.startswith("after the first update 2.weight differs between ranks")
    assert first["2"] == first["None"] == []
    (said,) = first["outside"]
    assert said.startswith("after the first update a parameter of an optimizer that is not in the model differs")
    assert second == {"0": [], "2": [], "None": [], "outside": []}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm=0.0 is not possible"),
        ({"clip_norm": 1.0, "nonfinite": "zero"}, "an infinite gradient has no norm to clip"),
        ({"scaler": torch.amp.GradScaler("cpu"), "nonfinite": "raise"}, "a scaler skips steps that overflow"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=message):
            attach(wrapped(), *SPARSE, **options)
    finally:
        dist.destroy_process_group()
