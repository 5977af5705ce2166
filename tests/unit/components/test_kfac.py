"""K-FAC as an optimizer: whole steps against a plain reference, over ranks, and what is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import cast

import pytest
import torch
from torch import nn

from bench.core import spec
from bench.core.errors import UsageError
from bench.optimizers.adam import Adam
from bench.optimizers.kfac import Kfac
from bench.optimizers.kronecker.layer import KroneckerLayer
from collectives.base import Collective
from collectives.transport.alone import Alone
from collectives.transport.base import Transport
from compressors.ddp.channel import Channel
from compressors.ddp.reducer import Reducer
from compressors.layer import layers_of
from compressors.none import NONE
from tests.testing.memory_transport import run_threads

LR = 0.05
WAYS = [
    "kfac:update_every=2",
    "kfac:update_every=2,transfer=dense",
    "kfac:update_every=2,transfer=cholesky,collective=allgather",
    "kfac:update_every=2,transfer=cholesky,collective=server",
]


def build(text: str) -> Kfac:
    return cast(Kfac, spec.build("optimizers", text))


def make_model() -> nn.Sequential:
    return copy.deepcopy(MODEL)


def _drawn() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.BatchNorm2d(4), nn.Flatten(),
        nn.Linear(4 * 9, 8), nn.ReLU(inplace=True), nn.Linear(8, 5, bias=False),
    )  # fmt: skip


MODEL = _drawn()  # once: ranks are threads here, and draw from one generator


def batches(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randn(6, 2, 6, 6, generator=generator), torch.randint(5, (6,), generator=generator)


def bound(text: str, model: nn.Module, transport: Transport, lr: float = LR) -> torch.optim.Optimizer:
    native = cast(Collective, spec.build("collectives", "native"))
    return build(text).bind(model, lr, Channel(layers_of(model), Reducer(NONE()), native, transport))


def backward(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    model.zero_grad()
    x, y = batch
    nn.functional.cross_entropy(model(x), y).backward()


def trained(text: str, transport: Transport, steps: int = 5) -> list[torch.Tensor]:
    """A rank's parameters after some steps on the mean gradient."""
    torch.set_num_threads(1)
    model = make_model()
    optimizer = bound(text, model, transport)
    for batch in itertools.islice(batches(transport.rank), steps):
        backward(model, batch)
        for parameter in model.parameters():
            assert parameter.grad is not None
            transport.all_reduce_(parameter.grad)
            parameter.grad /= transport.world_size
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


class PublishedKfac:
    """The formulas of the published package in fp64, with inverses, for one rank and plain gradient descent."""

    def __init__(self, model: nn.Sequential, every: int, damping: float, kl_clip: float) -> None:
        self.model, self.every, self.damping, self.kl_clip = model, every, damping, kl_clip
        self.layers = [module for module in model if isinstance(module, nn.Conv2d | nn.Linear)]
        self.factors: dict[tuple[nn.Module, str], torch.Tensor] = {}
        self.inverses: dict[tuple[nn.Module, str], torch.Tensor] = {}
        for module in self.layers:
            module.register_forward_hook(self.save)
        self.seen: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def save(self, module: nn.Module, x: tuple[torch.Tensor], y: torch.Tensor) -> None:
        def keep(g: torch.Tensor) -> None:
            self.seen[module] = x[0].detach().clone(), g

        y.register_hook(keep)

    def average(self, module: nn.Module, which: str, rows: torch.Tensor) -> None:
        new = rows.T @ (rows / len(rows))
        old = self.factors.get((module, which), torch.eye(len(new), dtype=torch.float64))
        self.factors[module, which] = 0.95 * old + 0.05 * new
        damped = self.factors[module, which] + self.damping * torch.eye(len(new), dtype=torch.float64)
        self.inverses[module, which] = torch.linalg.inv(damped)

    def update_factors(self, module: nn.Conv2d | nn.Linear) -> None:
        a, g = self.seen[module]
        if isinstance(module, nn.Conv2d):
            size = g.shape[2] * g.shape[3]
            a = nn.functional.pad(a, (1, 1, 1, 1)).unfold(2, 3, 2).unfold(3, 3, 2)
            a = a.permute(0, 2, 3, 1, 4, 5).reshape(6 * size, -1)
            g = g.permute(0, 2, 3, 1).reshape(6 * size, -1) / size
        if module.bias is not None:
            a = torch.cat([a, a.new_ones(len(a), 1)], dim=1)
        self.average(module, "A", a / size if isinstance(module, nn.Conv2d) else a)
        self.average(module, "G", g)

    def step(self, index: int, lr: float) -> None:
        """Change the parameters by one preconditioned step."""
        products, moves = 0.0, []
        for module in self.layers:
            if index % self.every == 0:
                self.update_factors(module)
            assert module.weight.grad is not None
            g = module.weight.grad.flatten(1)
            if module.bias is not None:
                assert module.bias.grad is not None
                g = torch.cat([g, module.bias.grad.view(-1, 1)], 1)
            v = self.inverses[module, "G"] @ g @ self.inverses[module, "A"]
            products += float((v * g).sum()) * lr**2
            moves.append((module, v))
        scale = min(1.0, (self.kl_clip / abs(products)) ** 0.5)
        with torch.no_grad():
            for module, v in moves:
                columns = module.weight[0].numel()
                module.weight -= lr * scale * v[:, :columns].reshape(module.weight.shape)
                if module.bias is not None:
                    module.bias -= lr * scale * v[:, -1]
            for other in (m for m in self.model if isinstance(m, nn.BatchNorm2d)):
                for parameter in other.parameters():
                    parameter -= lr * parameter.grad


@pytest.mark.parametrize("transfer", ["triangle", "cholesky,collective=allgather", "dense"])
@pytest.mark.parametrize("kl_clip", [1e-4, 1e6])
def test_steps_are_those_of_the_published_package(transfer: str, kl_clip: float) -> None:
    model = make_model()
    published = PublishedKfac(copy.deepcopy(model).double(), every=2, damping=0.01, kl_clip=kl_clip)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    text = f"kfac:inner=sgd:momentum=0,update_every=2,damping=0.01,kl_clip={kl_clip},transfer={transfer}"
    optimizer = bound(text, model, Alone())
    for index, (x, y) in enumerate(itertools.islice(batches(0), 6)):
        backward(model, (x, y))
        optimizer.step()
        backward(published.model, (x.double(), y))
        published.step(index, LR)
    for parameter, expected, before in zip(model.parameters(), published.model.parameters(), start, strict=True):
        moved, wanted = parameter.detach() - before, (expected - before).float()
        assert (moved - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.parametrize("text", WAYS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_parameters_stay_equal_bit_for_bit(text: str, precision: str) -> None:
    first, *others = run_threads(lambda transport: trained(f"{text},precision={precision}", transport), 3)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_all_transfers_train_alike_to_rounding() -> None:
    reference, *others = (run_threads(lambda transport, text=text: trained(text, transport), 2)[0] for text in WAYS)
    for other in others:
        for a, b in zip(reference, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_step_that_is_left_out_changes_nothing() -> None:
    """Before an update, and between two: as if the batch had never been."""

    def run(left_out: tuple[int, ...]) -> list[torch.Tensor]:
        model = make_model()
        model[2].momentum = 0.0  # running statistics of the normalisation follow every forward
        optimizer = bound("kfac:update_every=3", model, Alone())
        own = batches(0)
        for index in range(7):
            if index in left_out:
                backward(model, next(batches(9)))
            backward(model, next(own))
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(()), run((0, 3, 5)), strict=True))


def test_other_parameters_pass_through_and_so_does_all_until_there_are_factors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model()
    optimizer = bound("kfac", model, Alone())
    backward(model, next(batches(0)))
    before = [cast(torch.Tensor, parameter.grad).clone() for parameter in model.parameters()]
    optimizer.step()
    same = [torch.equal(cast(torch.Tensor, p.grad), g) for p, g in zip(model.parameters(), before, strict=True)]
    assert same == [False, False, True, True, False, False, False]

    monkeypatch.setattr(KroneckerLayer, "input_moment", lambda self, x: torch.full([self.sizes[0]] * 2, torch.nan))
    model = make_model()
    optimizer = bound("kfac", model, Alone())
    backward(model, next(batches(0)))
    optimizer.step()
    assert all(torch.equal(cast(torch.Tensor, p.grad), g) for p, g in zip(model.parameters(), before, strict=True))


def test_the_step_is_shortened_by_the_rate_of_the_schedule() -> None:
    """With a tight bound the step's length does not depend on the rate that the schedule has set."""
    moved = []
    for lr in (0.01, 0.1):
        model = make_model()
        optimizer = bound("kfac:inner=sgd:momentum=0,kl_clip=1e-6", model, Alone(), lr=1.0)
        optimizer.param_groups[0]["lr"] = lr
        backward(model, next(batches(0)))
        before = model[4].weight.detach().clone()
        optimizer.step()
        moved.append(model[4].weight.detach() - before)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-3, atol=1e-7)


def test_any_optimizer_may_stand_behind_it() -> None:
    optimizer = bound("kfac:inner=adam", make_model(), Alone())
    assert isinstance(optimizer, torch.optim.Adam)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kfac:inner=kfac", "kfac: inner=kfac is not possible: it stands before another"),
        ("kfac:inner=adan", "did you mean 'adam'"),
        ("kfac:collective=rink", "did you mean 'ring'"),
        ("kfac:damping=0", "kfac: damping=0 is not possible"),
        ("kfac:decay=1", "kfac: decay=1 is not possible"),
        ("kfac:kl_clip=0", "kfac: kl_clip=0 is not possible"),
        ("kfac:update_every=0", "kfac: update_every=0 is not possible"),
        ("kfac:transfer=half", "kfac: transfer=half is not possible"),
        ("kfac:precision=fp8", "kfac: precision=fp8 is not possible"),
    ],
)
def test_bad_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(text)


def test_an_optimizer_that_exchanges_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adam, "exchanges", True)
    with pytest.raises(UsageError, match="inner=adam is not possible: it exchanges something by itself; use sgd"):
        build("kfac:inner=adam")


@pytest.mark.parametrize(
    ("text", "collective", "sentence"),
    [
        ("kfac", "native", None),
        ("kfac:transfer=cholesky", "allgather", None),
        ("kfac:transfer=cholesky,collective=server", "native", None),
        ("kfac:transfer=cholesky", "native", "kfac: transfer=cholesky is not possible: native adds tensors element by"),
        ("kfac:transfer=cholesky", "native", "allgather takes every kind; add collective=allgather to it"),
        ("kfac:transfer=cholesky", "server:downlink=recode", "add collective=allgather to it"),
        ("kfac:transfer=cholesky", "server:downlink=union,error_feedback=true", "add collective=allgather to it"),
        ("kfac", "server:downlink=recode", None),
    ],
)
def test_collectives_that_cannot_carry_the_factors_are_refused(
    text: str, collective: str, sentence: str | None
) -> None:
    refusal = build(text).refusal(NONE(), cast(Collective, spec.build("collectives", collective)))
    assert (refusal is None) if sentence is None else (sentence in (refusal or ""))
