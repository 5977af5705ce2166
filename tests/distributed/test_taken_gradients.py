"""Gradients that the exchange reads where the backward pass wrote them, on two gloo ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradwire.ddp import gradients as ddp_gradients
from gradwire.ddp.attach import attach
from gradwire.ddp.gradients import ZeroCopyGradients
from tests.testing.ddp_scenes import gradients, loss_of, network, train, weights, wrapped

NUM_PARAMETERS = 4
USUAL_LIMIT = ddp_gradients.WORTH_TAKING

pytestmark = pytest.mark.ranks(2)


@contextmanager
def worth_taking(numel: int = 1) -> Iterator[None]:
    """Take gradients without a copy from this number of elements on."""
    ddp_gradients.WORTH_TAKING = numel
    try:
        yield
    finally:
        ddp_gradients.WORTH_TAKING = USUAL_LIMIT


@pytest.mark.parametrize(
    "pair",
    [
        "group_topk:ratio=0.05,group_size=100 ring",
        "topk:ratio=0.05,momentum_correction=true allgather",
        "sign:error_feedback=false allgather",
        "qsgd allgather",
        "bf16 ring",
        "powersgd:error_feedback=false ring",
        "none ring",
    ],
)
def test_training_is_the_same_to_the_last_bit(rank: int, pair: str) -> None:
    after = []
    for numel in (USUAL_LIMIT, 1):
        with worth_taking(numel):
            ddp = wrapped(gradient_as_bucket_view=True, bucket_cap_mb=0.001)
            hook = attach(ddp, *pair.split(), momentum=0.9 if "momentum_correction" in pair else None)
            after.append(train(ddp, hook, range(6)))  # DDP forms new buckets after the first step
            hook.close()
    assert torch.equal(*after)


@worth_taking()
def test_what_ddp_does_not_exchange_and_what_others_see_is_the_gradient(rank: int) -> None:
    ddp, bare = wrapped(gradient_as_bucket_view=True), network()
    hook = attach(ddp, "none", "ring")
    for step in range(3):
        loss_of(ddp, rank, step).backward()
        assert hook.step_ok()
        ddp.zero_grad()

    def same(what: str, *steps: int, of: torch.Tensor | None = None) -> None:
        """Compare gradients, those of the hooked model or these, with those of the bare model after these steps."""
        for step in steps:
            loss_of(bare, rank, step).backward()
        found, expected = gradients(ddp) if of is None else of, gradients(bare)
        assert torch.allclose(found, expected[: found.numel()], atol=1e-7), what
        assert expected.any()
        ddp.zero_grad()
        bare.zero_grad()

    loss_of(ddp.module, rank, 6).backward()
    same("the bare model right after an exchange", 6)
    with hook.no_sync():
        loss_of(ddp, rank, 3).backward()
    same("inside no_sync", 3)
    with hook.no_sync():
        loss_of(ddp, rank, 10).backward()
    loss_of(ddp, rank, 11).backward()
    assert hook.step_ok()
    for step, of in itertools.product((10, 11), (0, 1)):
        (loss_of(bare, of, step) / 2).backward()
    same("what is added up")
    with hook.no_sync():
        loss_of(ddp, rank, 4).backward()
        loss = loss_of(ddp, rank, 5)
    loss.backward()
    same("forward inside no_sync and backward outside", 4, 5)
    loss = loss_of(ddp, rank, 7)
    asked = torch.autograd.grad(loss, list(ddp.parameters()), retain_graph=True)
    loss.backward()
    assert hook.step_ok()
    same("torch.autograd.grad", 7, of=torch.cat([each.flatten() for each in asked]))
    late: list[torch.Tensor] = []
    handle = next(ddp.parameters()).register_post_accumulate_grad_hook(lambda p: late.append(p.grad.clone()))
    loss_of(ddp, rank, 8).backward()
    assert hook.step_ok()
    handle.remove()
    same("a hook behind the accumulation", 8, of=late[0].flatten())
    hook.close()
    assert not ddp._forward_pre_hooks
    loss_of(ddp.module, rank, 9).backward()
    same("after close", 9)


@pytest.mark.parametrize("nonfinite", ["skip", "zero"])
@worth_taking()
def test_what_is_not_finite_is_noticed_and_left_as_it_is(rank: int, nonfinite: Any) -> None:
    ddp = wrapped(gradient_as_bucket_view=True)
    hook = attach(ddp, "sign", "allgather", nonfinite=nonfinite)
    train(ddp, hook, range(3))
    seen: list[torch.Tensor] = []
    next(ddp.parameters()).register_hook(lambda g: (seen.append(g * (torch.nan if rank else 1)), seen[-1])[1])
    loss_of(ddp, rank, 3).backward()
    assert hook.step_ok() == (nonfinite == "zero")
    assert bool(seen[0].isnan().all() if rank else seen[0].isfinite().all())
    assert torch.tensor(list(hook.residual_norms().values())).isfinite().all()
    hook.close()


Taken = list[tuple[nn.Parameter, bool]]
"""Parameters of the last backward, and whether their gradients were outside the bucket."""


def watched(model: nn.Module, **options: Any) -> tuple[DistributedDataParallel, Taken]:
    """Return the model in DDP with a hook that updates each rank alone, and what it has taken since it was cleared."""
    ddp = DistributedDataParallel(model, **options)
    held, taken = ZeroCopyGradients(ddp), list[tuple[nn.Parameter, bool]]()

    def take(_: Any, bucket: Any) -> Any:
        given, updates = held.of(bucket)
        for parameter, gradient, update in zip(bucket.parameters(), given, updates, strict=True):
            taken.append((parameter, gradient.data_ptr() != update.data_ptr()))
            update.copy_(gradient)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    take.__annotations__ = {}
    ddp.register_comm_hook(None, take)
    return ddp, taken


@pytest.mark.parametrize("as_view", [True, False])
@worth_taking()
def test_gradients_are_taken_from_the_second_step_on_where_ddp_keeps_them_in_its_buckets(
    rank: int, as_view: bool
) -> None:
    ddp, taken = watched(network(), gradient_as_bucket_view=as_view)
    for step in range(4):
        taken.clear()
        loss = loss_of(ddp, rank, step)
        with torch.autograd.profiler.profile() as profile:
            loss.backward()
        copies = sum(event.name == "aten::copy_" for event in profile.function_events)
        assert [is_outside for _, is_outside in taken] == [as_view and step > 0] * NUM_PARAMETERS
        if as_view:
            assert step < 2 or copies == NUM_PARAMETERS  # the test's own
        else:
            assert copies >= 2 * NUM_PARAMETERS
        bare = network()
        loss_of(bare, rank, step).backward()
        assert torch.equal(gradients(ddp), gradients(bare))
        ddp.zero_grad()


class Transposed(nn.Module):
    """A parameter stored column by column, whose gradient is stored row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.arange(24.0).view(6, 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x + self.shift) ** 3).sum()


class Twice(nn.Module):
    """Layers that run twice, and again in the backward pass, and accumulate gradients each time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layers, x, use_reentrant=True)
        return (x**3).sum()


@pytest.mark.parametrize("is_static", [False, True], ids=["Transposed", "Twice"])
@worth_taking()
def test_gradients_of_unusual_modules_are_exchanged_whole_and_in_place(rank: int, is_static: bool) -> None:
    kind = Twice if is_static else Transposed
    ddp = DistributedDataParallel(kind(), gradient_as_bucket_view=True, static_graph=is_static)
    hook = attach(ddp, "none", "ring")
    for step in range(4):
        ranks = [torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(10 * step + of)) for of in (0, 1)]
        ddp(ranks[rank].requires_grad_()).backward()
        assert hook.step_ok()
        bare = kind()
        for x in ranks:
            (bare(x.requires_grad_()) / 2).backward()
        assert torch.allclose(gradients(ddp), gradients(bare), rtol=1e-5)
        ddp.zero_grad()
    hook.close()


class _Filled(torch.autograd.Function):
    """Add the sums of two parameters, and write both gradients to one buffer, one after the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shift: torch.Tensor, give: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        ctx.give = give
        ctx.save_for_backward(x)
        return (x + shift) ** 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * 2 * x, ctx.give(2 * gradient * x), None


class OneBuffer(nn.Module):
    """Three parameters whose gradients are written to one buffer, which is handed to autograd in some way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.shifts = nn.ParameterList(torch.full((3, 4, 6), 0.1 * i) for i in range(3))
        flat = torch.zeros(3 * 4 * 6)
        whole = flat.view(3, 4, 6)
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "the buffer": lambda: whole,
            "a view": lambda: flat.view(3, 4, 6),
            "a detached view": lambda: whole.detach(),
            "memory of NumPy": lambda: torch.from_numpy(self.array),
            "its storage": lambda: torch.empty(0).set_(self.storage, 0, (3, 4, 6)),
        }
        self.storage = flat.clone().untyped_storage()
        self.array = whole.clone().numpy()
        self.of = ways[way]

    def give(self, gradient: torch.Tensor) -> torch.Tensor:
        filled = self.of()
        with torch.no_grad():
            filled.copy_(gradient)
        return filled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for shift in self.shifts:
            x = _Filled.apply(x, shift, self.give)
        return x.sum()


@pytest.mark.parametrize("way", ["the buffer", "a view", "a detached view", "memory of NumPy", "its storage"])
@worth_taking()
def test_gradients_that_an_autograd_function_writes_to_one_buffer_are_those_of_ddp(rank: int, way: str) -> None:
    after = []
    for is_hooked in (False, True):
        ddp = DistributedDataParallel(OneBuffer(way), gradient_as_bucket_view=True)
        hook = attach(ddp, "none", "ring") if is_hooked else None
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for step in range(6):
            ddp(torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
            assert hook is None or hook.step_ok()
            optimizer.step()
            optimizer.zero_grad()
        if hook is not None:
            hook.close()
        after.append(weights(ddp))
    assert torch.allclose(*after, rtol=1e-6)


class UsualLayers(nn.Module):
    """The layers of most networks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Conv1d(4, 4, 3), nn.LayerNorm(6))
        self.up = nn.ConvTranspose1d(4, 4, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.scale = nn.Parameter(torch.ones(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.layers(self.embedding(x)))
        x = checkpoint(self.attention, x, x, x, use_reentrant=False)[0]
        return (self.recurrent(x)[0] * self.scale).sum()


@worth_taking()
def test_gradients_of_usual_layers_are_not_copied(rank: int) -> None:
    ddp, taken = watched(UsualLayers(), gradient_as_bucket_view=True)
    name_of = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    for _ in range(3):
        taken.clear()
        ddp(torch.arange(8).view(2, 4)).backward()
        ddp.zero_grad()
    assert [name_of[id(parameter)] for parameter, is_outside in taken if not is_outside] == []
    assert len(taken) == len(name_of)
