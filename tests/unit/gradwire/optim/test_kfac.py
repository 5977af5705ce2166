"""K-FAC as an optimizer: whole steps against a plain reference, over ranks, and refusals."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import cast

import pytest
import torch
from torch import nn

from bench.core import spec
from bench.core.errors import UsageError
from bench.optimizers.gradwire_optimizers import UseKfac
from collectives.base import Collective
from collectives.options import incompatibility
from collectives.refusals import refuse
from collectives.transport.base import SingleRank, Transport
from compressors.floats import NoCompression
from compressors.layer import layers_of
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.exchange.reducer import reducer_for
from gradwire.optim.kfac import KFAC
from gradwire.optim.kronecker import KroneckerLayer
from tests.testing.memory_transport import run_threads

LR = 0.05
WAYS = [
    "kfac:update_every=2",
    "kfac:update_every=2,transfer=dense",
    "kfac:update_every=2,transfer=cholesky,collective=allgather",
    "kfac:update_every=2,transfer=cholesky,collective=server",
    "kfac:update_every=2,transfer=cholesky,collective=ring",
]
MOMENTS = [
    "kfac:update_every=2,inner=max_adabelief",
    "kfac:update_every=2,inner=max_adabelief,transfer=cholesky,collective=ring",
]


def build(text: str) -> UseKfac:
    return cast(UseKfac, spec.build("optimizers", text))


def make_model() -> nn.Sequential:
    return copy.deepcopy(MODEL)


def _drawn() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.BatchNorm2d(4), nn.Flatten(),
        nn.Linear(4 * 9, 8), nn.ReLU(inplace=True), nn.Linear(8, 5, bias=False),
    )  # fmt: skip


MODEL = _drawn()  # created once: ranks are threads here, and share one generator


def batches(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randn(6, 2, 6, 6, generator=generator), torch.randint(5, (6,), generator=generator)


def bound(text: str, model: nn.Module, transport: Transport, lr: float = LR) -> torch.optim.Optimizer:
    native = cast(Collective, spec.build("collectives", "native"))
    channel = CompressedCommunicator(layers_of(model), reducer_for(NoCompression()), native, transport)
    return build(text).bind(model, lr, channel)


def backward(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    model.zero_grad()
    x, y = batch
    nn.functional.cross_entropy(model(x), y).backward()


def trained(text: str, transport: Transport, steps: int = 5) -> list[torch.Tensor]:
    """Return a rank's parameters after some steps on the mean gradient, or on its own if moments are exchanged."""
    torch.set_num_threads(1)
    model = make_model()
    optimizer = bound(text, model, transport)
    for batch in itertools.islice(batches(transport.rank), steps):
        backward(model, batch)
        if not build(text).keeps_gradients:
            for parameter in model.parameters():
                assert parameter.grad is not None
                transport.start_all_reduce_(parameter.grad).wait()
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

    def rows(self, module: nn.Conv2d | nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows whose second moments are A and G of the last forward and backward pass."""
        a, g = self.seen[module]
        if isinstance(module, nn.Conv2d):
            size = g.shape[2] * g.shape[3]
            a = nn.functional.pad(a, (1, 1, 1, 1)).unfold(2, 3, 2).unfold(3, 3, 2)
            a = a.permute(0, 2, 3, 1, 4, 5).reshape(6 * size, -1)
            g = g.permute(0, 2, 3, 1).reshape(6 * size, -1) / size
        if module.bias is not None:
            a = torch.cat([a, a.new_ones(len(a), 1)], dim=1)
        return (a / size if isinstance(module, nn.Conv2d) else a), g

    def update_factors(self, others: Sequence[PublishedKfac] = ()) -> None:
        """Update the averages with the mean of the moments of this rank and the others."""
        for index, module in enumerate(self.layers):
            rows = [each.rows(each.layers[index]) for each in (self, *others)]
            for which, of_ranks in zip("AG", zip(*rows, strict=True), strict=True):
                self.average(module, which, torch.cat(of_ranks))  # equally many rows of each rank

    def preconditioned(self, own: PublishedKfac) -> tuple[list[torch.Tensor], float]:
        """Return a rank's gradients times the inverses, per parameter, and sum(gradient * preconditioned gradient)."""
        changed, product = {id(p): cast(torch.Tensor, p.grad) for p in own.model.parameters()}, 0.0
        for mine, module in zip(self.layers, own.layers, strict=True):
            g = module.weight.grad.flatten(1)
            if module.bias is not None:
                g = torch.cat([g, module.bias.grad.view(-1, 1)], 1)
            v = self.inverses[mine, "G"] @ g @ self.inverses[mine, "A"]
            product += float((v * g).sum())
            changed[id(module.weight)] = v[:, : module.weight[0].numel()].reshape(module.weight.shape)
            if module.bias is not None:
                changed[id(module.bias)] = v[:, -1]
        return [changed[id(parameter)] for parameter in own.model.parameters()], product

    def step(self, index: int, lr: float) -> None:
        """Update the parameters with one preconditioned step."""
        if index % self.every == 0:
            self.update_factors()
        changed, product = self.preconditioned(self)
        scale = min(1.0, (self.kl_clip / (lr**2 * product)) ** 0.5)
        layered = {id(parameter) for module in self.layers for parameter in module.parameters()}
        with torch.no_grad():
            for parameter, v in zip(self.model.parameters(), changed, strict=True):
                parameter -= lr * (scale if id(parameter) in layered else 1.0) * v


@pytest.mark.parametrize("transfer", ["triangle", "cholesky,collective=allgather", "dense"])
@pytest.mark.parametrize("kl_clip", [1e-4, 1e6])
def test_steps_are_those_of_the_published_package(transfer: str, kl_clip: float) -> None:
    model = make_model()
    published = PublishedKfac(copy.deepcopy(model).double(), every=2, damping=0.01, kl_clip=kl_clip)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    text = f"kfac:inner=sgd:momentum=0,update_every=2,damping=0.01,kl_clip={kl_clip},transfer={transfer}"
    optimizer = bound(text, model, SingleRank())
    for index, (x, y) in enumerate(itertools.islice(batches(0), 6)):
        backward(model, (x, y))
        optimizer.step()
        backward(published.model, (x.double(), y))
        published.step(index, LR)
    for parameter, expected, before in zip(model.parameters(), published.model.parameters(), start, strict=True):
        moved, wanted = parameter.detach() - before, (expected - before).float()
        assert (moved - wanted).norm() <= 1e-3 * wanted.norm()


def serial_moments(world_size: int, steps: int, kl_clip: float) -> list[torch.Tensor]:
    """Return the parameters after K-FAC with exchanged moments, computed serially in fp64 for all ranks."""
    ranks = [PublishedKfac(copy.deepcopy(MODEL).double(), 2, 0.01, kl_clip) for _ in range(world_size)]
    own = [batches(rank) for rank in range(world_size)]
    theta = [parameter.detach().clone() for parameter in ranks[0].model.parameters()]
    zeros = [[torch.zeros_like(tensor) for tensor in theta] for _ in range(3 * world_size)]
    m, s, smax = zeros[:world_size], zeros[world_size : 2 * world_size], zeros[2 * world_size :]
    layered = [not isinstance(module, nn.BatchNorm2d) for module in MODEL for _ in module.parameters()]
    for t in range(1, steps + 1):
        for rank, data in zip(ranks, own, strict=True):
            for parameter, value in zip(rank.model.parameters(), theta, strict=True):
                parameter.data.copy_(value)
            x, y = next(data)
            backward(rank.model, (x.double(), y))
        if (t - 1) % 2 == 0:
            ranks[0].update_factors(ranks[1:])
        each = [ranks[0].preconditioned(rank) for rank in ranks]
        change = LR**2 * sum(product for _, product in each) / world_size
        scale = min(1.0, (kl_clip / change) ** 0.5)
        for i, value in enumerate(theta):
            for rank, (changed, _) in enumerate(each):
                g = changed[i] * (scale if layered[i] else 1.0)
                m[rank][i] = 0.9 * m[rank][i] + 0.1 * g
                s[rank][i] = 0.999 * s[rank][i] + 0.001 * (g - m[rank][i]) ** 2 + 1e-10
                smax[rank][i] = torch.maximum(smax[rank][i], s[rank][i])
            mean = sum(m[rank][i] for rank in range(world_size)) / world_size / (1 - 0.9**t)
            largest = sum(smax[rank][i] for rank in range(world_size)) / world_size / (1 - 0.999**t)
            value -= LR * mean / (largest.sqrt() + 1e-10)
    return theta


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kl_clip", [1e-4, 1e6])
@pytest.mark.parametrize("transfer", ["triangle", "cholesky,collective=ring", "cholesky,collective=allgather"])
def test_exchanged_moments_are_of_preconditioned_own_gradients(transfer: str, kl_clip: float, world_size: int) -> None:
    text = f"kfac:inner=max_adabelief:eps=1e-10,update_every=2,damping=0.01,kl_clip={kl_clip},transfer={transfer}"
    found = run_threads(lambda transport: trained(text, transport, steps=6), world_size)[0]
    for ours, theirs, before in zip(found, serial_moments(world_size, 6, kl_clip), MODEL.parameters(), strict=True):
        moved, wanted = ours - before.detach(), theirs.float() - before.detach()
        assert (moved - wanted).norm() <= 1e-3 * wanted.norm()


def test_both_states_go_on_from_a_checkpoint_bit_for_bit() -> None:
    """Moments differ between ranks; factors, averages and the number of steps do not."""

    def run(transport: Transport, saved_after: int | None) -> list[torch.Tensor]:
        torch.set_num_threads(1)
        model = make_model()
        optimizer = bound(MOMENTS[1], model, transport)
        for index, batch in enumerate(itertools.islice(batches(transport.rank), 7)):
            if index == saved_after:
                saved = copy.deepcopy(optimizer.state_dict())
                model = copy.deepcopy(model)
                optimizer = bound(MOMENTS[1], model, transport)
                optimizer.load_state_dict(saved)
            backward(model, batch)
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    for saved_after in (3, 4):
        whole, resumed = (run_threads(lambda t, at=at: run(t, at), 2) for at in (None, saved_after))
        for rank, again in zip(whole, resumed, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(rank, again, strict=True))


@pytest.mark.parametrize("text", [*WAYS, *MOMENTS])
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


@pytest.mark.parametrize("inner", ["sgd", "max_adabelief"])
def test_a_step_that_is_left_out_changes_nothing(inner: str) -> None:
    """A skipped step before an update or between two leaves no trace."""

    def run(left_out: tuple[int, ...]) -> list[torch.Tensor]:
        model = make_model()
        model[2].momentum = 0.0  # otherwise every forward pass changes the running statistics of the normalisation
        optimizer = bound(f"kfac:update_every=3,inner={inner}", model, SingleRank())
        own = batches(0)
        for index in range(7):
            if index in left_out:
                backward(model, next(batches(9)))
            backward(model, next(own))
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(()), run((0, 3, 5)), strict=True))


def test_a_step_without_gradients_changes_nothing() -> None:
    """`gradwire.attach` removes all gradients in a skipped step."""
    model = make_model()
    optimizer = bound("kfac:update_every=1", model, SingleRank())
    backward(model, next(batches(0)))
    model.zero_grad()
    before, state = [p.detach().clone() for p in model.parameters()], copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert str(optimizer.state_dict()) == str(state)


def test_other_parameters_pass_through_and_so_does_all_until_there_are_factors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model()
    optimizer = bound("kfac", model, SingleRank())
    backward(model, next(batches(0)))
    before = [cast(torch.Tensor, parameter.grad).clone() for parameter in model.parameters()]
    optimizer.step()
    same = [torch.equal(cast(torch.Tensor, p.grad), g) for p, g in zip(model.parameters(), before, strict=True)]
    assert same == [False, False, True, True, False, False, False]

    monkeypatch.setattr(KroneckerLayer, "input_moment", lambda self, x: torch.full([self.sizes[0]] * 2, torch.nan))
    model = make_model()
    optimizer = bound("kfac", model, SingleRank())
    backward(model, next(batches(0)))
    optimizer.step()
    assert all(torch.equal(cast(torch.Tensor, p.grad), g) for p, g in zip(model.parameters(), before, strict=True))


def test_the_step_is_shortened_by_the_rate_of_the_schedule() -> None:
    """With a tight bound, the step's length does not depend on the rate that the schedule has set."""
    moved = []
    for lr in (0.01, 0.1):
        model = make_model()
        optimizer = bound("kfac:inner=sgd:momentum=0,kl_clip=1e-6", model, SingleRank(), lr=1.0)
        optimizer.param_groups[0]["lr"] = lr
        backward(model, next(batches(0)))
        before = model[4].weight.detach().clone()
        optimizer.step()
        moved.append(model[4].weight.detach() - before)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-3, atol=1e-7)


def test_any_optimizer_may_stand_behind_it() -> None:
    optimizer = bound("kfac:inner=adam", make_model(), SingleRank())
    assert isinstance(cast(KFAC, optimizer).inner, torch.optim.Adam)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kfac:inner=kfac", "kfac: inner=kfac is not possible: it would contain itself; name another optimizer"),
        ("kfac:inner=adan", "did you mean 'adam'"),
        ("kfac:inner=demo", "kfac: inner=demo is not possible"),
        ("kfac:inner=zero_one_adam:var_freeze_step=9", "it encodes its own messages, and K-FAC can change only"),
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


@pytest.mark.parametrize(
    ("text", "collective", "sentence"),
    [
        ("kfac", "native", None),
        ("kfac:transfer=cholesky", "allgather", None),
        ("kfac:transfer=cholesky,collective=server", "native", None),
        ("kfac:transfer=cholesky", "native", "kfac: transfer=cholesky is not possible: native adds tensors element by"),
        ("kfac:collective=ring:requantise=true", "native", "factors are not quantised; use collective=ring"),
        ("kfac:transfer=cholesky", "native", "allgather takes every kind; use collective=ring"),
        ("kfac:transfer=cholesky", "server:downlink=recode", "use collective=ring"),
        ("kfac:inner=max_adabelief", "native", None),
        ("kfac:inner=max_adabelief:reduce=s_max", "allgather", "max_adabelief with reduce=s_max takes a maximum"),
        ("kfac:transfer=cholesky", "server:downlink=union,error_feedback=true", "use collective=ring"),
        ("kfac", "server:downlink=recode", None),
        ("kfac:transfer=cholesky", "ring:requantise=true", "ring:requantise=true encodes sums of Codes again"),
    ],
)
def test_collectives_that_cannot_carry_the_factors_are_refused(
    text: str, collective: str, sentence: str | None
) -> None:
    reason = incompatibility(refuse, build(text).refusals, NoCompression(), spec.build("collectives", collective))
    assert (reason is None) if sentence is None else (sentence in (reason or ""))
