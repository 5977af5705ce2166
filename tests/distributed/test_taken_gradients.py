"""Gradients that the exchange reads where the backward pass wrote them, on real gloo ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradwire.ddp import gradients as ddp_gradients
from gradwire.ddp.attach import attach
from gradwire.ddp.gradients import ZeroCopyGradients
from tests.testing.ddp_scenes import gradients, loss_of, network, played_by_two, train, weights, wrapped

NUM_PARAMETERS = 4
PAIRS = (
    ("group_topk:ratio=0.05,group_size=100", "ring"),
    ("topk:ratio=0.05,momentum_correction=true", "allgather"),
    ("sign:error_feedback=false", "allgather"),
    ("qsgd", "allgather"),
    ("bf16", "ring"),
    ("powersgd:error_feedback=false", "ring"),
    ("none", "ring"),
)

pytestmark = pytest.mark.xdist_group("ddp hook")  # its ranks run once for all tests


@contextmanager
def worth_taking(numel: int) -> Iterator[None]:
    """Take gradients without a copy from this number of elements on."""
    usual, ddp_gradients.WORTH_TAKING = ddp_gradients.WORTH_TAKING, numel
    try:
        yield
    finally:
        ddp_gradients.WORTH_TAKING = usual


def trained_by_all_pairs(rank: int) -> dict[str, torch.Tensor]:
    """Return the weights after six steps; DDP forms new buckets after the first."""
    after = {}
    for compressor, collective in PAIRS:
        ddp = wrapped(gradient_as_bucket_view=True, bucket_cap_mb=0.001)
        momentum = 0.9 if "momentum_correction" in compressor else None
        hook = attach(ddp, compressor, collective, momentum=momentum)
        after[compressor] = train(ddp, hook, range(6))
        hook.close()
    return after


def taken_by_all_pairs(rank: int) -> dict[str, torch.Tensor]:
    with worth_taking(1):
        return trained_by_all_pairs(rank)


def unlike_others(rank: int) -> dict[str, Any]:
    """Return gradients of unusual steps and the expected ones, with `none` on two ranks; all are worth taking."""
    with worth_taking(1):
        ddp = wrapped(gradient_as_bucket_view=True)
        bare = network()
        hook = attach(ddp, "none", "ring")
        for step in range(3):
            loss_of(ddp, rank, step).backward()
            assert hook.step_ok()
            ddp.zero_grad()
            loss_of(bare, rank, step).backward()
            bare.zero_grad()
        seen: dict[str, Any] = {}

        def both(name: str, *steps: int) -> None:
            for step in steps:
                loss_of(bare, rank, step).backward()
            seen[name] = gradients(ddp).clone(), gradients(bare).clone()
            ddp.zero_grad()
            bare.zero_grad()

        loss_of(ddp.module, rank, 6).backward()
        both("the bare model right after an exchange", 6)
        with hook.no_sync():
            loss_of(ddp, rank, 3).backward()
        both("inside no_sync", 3)
        with hook.no_sync():
            loss_of(ddp, rank, 10).backward()
        loss_of(ddp, rank, 11).backward()
        assert hook.step_ok()
        for step, of in itertools.product((10, 11), (0, 1)):
            (loss_of(bare, of, step) / 2).backward()
        both("what is added up")
        with hook.no_sync():
            loss_of(ddp, rank, 4).backward()
            loss = loss_of(ddp, rank, 5)
        loss.backward()
        both("forward inside no_sync and backward outside", 4, 5)
        loss = loss_of(ddp, rank, 7)
        asked = torch.autograd.grad(loss, list(ddp.parameters()), retain_graph=True)
        loss.backward()
        assert hook.step_ok()
        ddp.zero_grad()
        loss_of(bare, rank, 7).backward()
        seen["torch.autograd.grad"] = torch.cat([each.flatten() for each in asked]), gradients(bare)
        bare.zero_grad()
        late: list[torch.Tensor] = []
        first = next(ddp.parameters())
        handle = first.register_post_accumulate_grad_hook(lambda p: late.append(p.grad.clone()))
        loss_of(ddp, rank, 8).backward()
        assert hook.step_ok()
        handle.remove()
        loss_of(bare, rank, 8).backward()
        seen["a hook behind the accumulation"] = late[0], next(bare.parameters()).grad
        bare.zero_grad()
        hook.close()
        assert not ddp._forward_pre_hooks
        ddp.zero_grad()
        loss_of(ddp.module, rank, 9).backward()
        both("after close", 9)
    return seen


def nonfinite(rank: int) -> dict[str, Any]:
    """Return (step_ok, gradient unchanged, residuals finite) for a NaN gradient on rank 1, skipped and zeroed."""
    found = {}
    with worth_taking(1):
        for treatment in ("skip", "zero"):
            ddp = wrapped(gradient_as_bucket_view=True)
            hook = attach(ddp, "sign", "allgather", nonfinite=treatment)  # type: ignore[arg-type]
            train(ddp, hook, range(3))
            seen: list[torch.Tensor] = []
            weight = next(ddp.parameters())
            weight.register_hook(lambda g, seen=seen: (seen.append(g * (torch.nan if rank else 1)), seen[-1])[1])
            loss_of(ddp, rank, 3).backward()
            ok = hook.step_ok()
            residuals = hook.residual_norms()
            kept = bool(seen[0].isnan().all()) if rank else bool(seen[0].isfinite().all())
            found[treatment] = ok, kept, all(map(torch.isfinite, map(torch.tensor, residuals.values())))
            hook.close()
    return found


def copies(rank: int) -> dict[str, Any]:
    """Return, with and without gradients as bucket views, which steps take gradients, are right, and their copies.

    Taken gradients are outside the bucket. Copies are those of the backward pass; four of them are the test's own if
    the gradients are taken.
    """
    found = {}
    for as_view in (True, False):
        with worth_taking(1):
            ddp = wrapped(gradient_as_bucket_view=as_view)
            held = ZeroCopyGradients(ddp)
            outside: list[list[bool]] = []

            def take(
                state: Any, bucket: Any, held: ZeroCopyGradients = held, outside: list[list[bool]] = outside
            ) -> Any:
                given, updates = held.of(bucket)
                outside.append([a.data_ptr() != b.data_ptr() for a, b in zip(given, updates, strict=True)])
                for gradient, update in zip(given, updates, strict=True):
                    update.copy_(gradient)
                future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
                future.set_result(bucket.buffer())
                return future

            take.__annotations__ = {}
            ddp.register_comm_hook(None, take)
            equal, copied = [], []
            for step in range(4):
                loss = loss_of(ddp, rank, step)
                with torch.autograd.profiler.profile() as profile:
                    loss.backward()
                copied.append(sum(event.name == "aten::copy_" for event in profile.function_events))
                bare = network()
                loss_of(bare, rank, step).backward()
                equal.append(torch.equal(gradients(ddp), gradients(bare)))
                ddp.zero_grad()
            found[as_view] = [all(each) for each in outside], equal, copied
    return found


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


def unusual(rank: int) -> dict[str, Any]:
    """Return gradients of the modules above exchanged by `none`, next to the expected means; four steps."""
    seen: dict[str, Any] = {}
    for kind, options in ((Transposed, {}), (Twice, {"static_graph": True})):
        with worth_taking(1):
            ddp = DistributedDataParallel(kind(), gradient_as_bucket_view=True, **options)
            hook = attach(ddp, "none", "ring")
            seen[kind.__name__] = []
            for step in range(4):
                ranks = [torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(10 * step + of)) for of in (0, 1)]
                ddp(ranks[rank].requires_grad_()).backward()
                assert hook.step_ok()
                bare = kind()
                for x in ranks:
                    (bare(x.requires_grad_()) / 2).backward()
                pairs = zip(ddp.parameters(), bare.parameters(), strict=True)
                seen[kind.__name__] += [(a.grad.clone(), b.grad) for a, b in pairs]  # type: ignore[union-attr]
                ddp.zero_grad()
            hook.close()
    return seen


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


WAYS = ("the buffer", "a view", "a detached view", "memory of NumPy", "its storage")


def one_buffer(rank: int) -> dict[str, list[torch.Tensor]]:
    """Return, for each way, the weights after six steps with DDP alone and with a hook."""
    after: dict[str, list[torch.Tensor]] = {}
    for way in WAYS:
        with worth_taking(1):
            for hooked in (False, True):
                ddp = DistributedDataParallel(OneBuffer(way), gradient_as_bucket_view=True)
                hook = attach(ddp, "none", "ring") if hooked else None
                optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
                for step in range(6):
                    x = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
                    ddp(x).backward()
                    assert hook is None or hook.step_ok()
                    optimizer.step()
                    optimizer.zero_grad()
                if hook is not None:
                    hook.close()
                after.setdefault(way, []).append(weights(ddp))
    return after


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


def copied_of_usual_layers(rank: int) -> list[str]:
    """Return the names of the parameters whose gradients DDP copied in the third step."""
    with worth_taking(1):
        ddp = DistributedDataParallel(UsualLayers(), gradient_as_bucket_view=True)
        name_of = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        held = ZeroCopyGradients(ddp)
        copied: list[str] = []

        def note(state: Any, bucket: Any) -> Any:
            given, updates = held.of(bucket)
            for parameter, gradient, update in zip(bucket.parameters(), given, updates, strict=True):
                if gradient.data_ptr() == update.data_ptr():
                    copied.append(name_of[id(parameter)])
                update.copy_(gradient)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        note.__annotations__ = {}
        ddp.register_comm_hook(None, note)
        for _ in range(3):
            copied.clear()
            ddp(torch.arange(8).view(2, 4)).backward()
            ddp.zero_grad()
    return copied


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    scenes = [trained_by_all_pairs, taken_by_all_pairs, unlike_others, nonfinite, copies, unusual]
    return played_by_two([*scenes, one_buffer, copied_of_usual_layers], folder)


@pytest.mark.parametrize("compressor", [compressor for compressor, _ in PAIRS])
def test_training_is_the_same_to_the_last_bit(played: list[dict[str, Any]], compressor: str) -> None:
    for rank in played:
        assert torch.equal(rank["taken_by_all_pairs"][compressor], rank["trained_by_all_pairs"][compressor])


def test_gradients_are_taken_from_the_second_step_on_where_ddp_keeps_them_in_its_buckets(
    played: list[dict[str, Any]],
) -> None:
    for rank in played:
        outside, equal, copied = rank["copies"][True]
        assert outside == [False, True, True, True]
        assert all(equal)
        assert copied[2:] == [NUM_PARAMETERS] * 2
        outside, equal, copied = rank["copies"][False]
        assert not any(outside)
        assert all(equal)
        assert min(copied) >= 2 * NUM_PARAMETERS


@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_an_autograd_function_writes_to_one_buffer_are_those_of_ddp(
    played: list[dict[str, Any]], way: str
) -> None:
    for rank in played:
        assert torch.allclose(*rank["one_buffer"][way], rtol=1e-6)


def test_gradients_of_usual_layers_are_not_copied(played: list[dict[str, Any]]) -> None:
    assert [rank["copied_of_usual_layers"] for rank in played] == [[], []]


@pytest.mark.parametrize(
    "what",
    [
        "the bare model right after an exchange",
        "inside no_sync",
        "what is added up",
        "forward inside no_sync and backward outside",
        "torch.autograd.grad",
        "a hook behind the accumulation",
        "after close",
    ],
)
def test_what_ddp_does_not_exchange_and_what_others_see_is_the_gradient(
    played: list[dict[str, Any]], what: str
) -> None:
    for rank in played:
        got, expected = rank["unlike_others"][what]
        assert torch.allclose(got, expected, atol=1e-7)
        assert expected.any()


@pytest.mark.parametrize("module", ["Transposed", "Twice"])
def test_gradients_of_unusual_modules_are_exchanged_whole_and_in_place(
    played: list[dict[str, Any]], module: str
) -> None:
    for rank in played:
        for got, expected in rank["unusual"][module]:
            assert torch.allclose(got, expected, rtol=1e-5)


def test_what_is_not_finite_is_noticed_and_left_as_it_is(played: list[dict[str, Any]]) -> None:
    for rank in played:
        assert rank["nonfinite"]["skip"] == (False, True, True)
        assert rank["nonfinite"]["zero"] == (True, True, True)
