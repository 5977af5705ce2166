"""AdaBelief and Max-AdaBelief: by formulas written out, alone and among ranks that exchange moments."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn

from bench.core import spec
from bench.optimizers._belief import Belief
from bench.optimizers.adabelief import AdaBelief
from bench.optimizers.adam import Adam
from bench.optimizers.base import Optimizer
from bench.optimizers.max_adabelief import MaxAdaBelief
from collectives.base import Collective
from compressors.base import Compressor
from compressors.ddp.channel import Channel
from compressors.ddp.reducer import Reducer
from compressors.layer import layers_of
from compressors.none import NONE
from compressors.topk import TopK
from tests.testing.compressor_cases import step_at
from tests.testing.memory_transport import MemoryTransport, run_threads

LR = 1e-3
SHAPES = ((7, 10), (33,), ())
Tensors = list[torch.Tensor]
GradientOf = Callable[[int, int], Tensors]
"""(rank, step) -> one gradient per parameter"""


class Network(nn.Module):
    """Parameters of several shapes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList(
            torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES
        )


def noisy(rank: int, step: int) -> Tensors:
    """A mean that all ranks share, and noise of their own; fp64."""
    shared, own = (torch.Generator().manual_seed(seed) for seed in (7, 1000 * step + rank))
    return [
        torch.randn(shape, generator=shared, dtype=torch.float64) * 0.3
        + torch.randn(shape, generator=own, dtype=torch.float64)
        for shape in SHAPES
    ]


class Rank:
    """One rank's network and optimizer.

    Attributes:
        maxima: what the exchange of the maxima gave, per step.
        means: likewise.
    """

    def __init__(
        self,
        transport: MemoryTransport,
        optimizer: Optimizer,
        dtype: torch.dtype = torch.float32,
        compressor: Compressor | None = None,
        collective: str = "ring",
    ) -> None:
        self.transport = transport
        self.model = Network(dtype)
        bound = cast(Collective, spec.build("collectives", collective))
        self.channel = Channel(layers_of(self.model), Reducer(compressor or NONE()), bound, transport)
        self.optimizer = optimizer.bind(self.model, LR, self.channel)
        self.means: list[Tensors] = []
        self.maxima: list[Tensors] = []
        if isinstance(self.optimizer, Belief) and self.optimizer._exchange is not None:
            self._watch(self.optimizer)

    def _watch(self, optimizer: Belief) -> None:
        exchange = optimizer._exchange
        assert exchange is not None

        def watched(means: Any, maxima: Any) -> None:
            exchange(means, maxima)
            self.means.append([tensor.clone() for tensor in means])
            self.maxima.append([tensor.clone() for tensor in maxima])

        optimizer._exchange = watched

    def in_float64(self) -> None:
        """Exchange the means as they are too: the reducer works in fp32."""

        def exchange(means: Any, maxima: Any) -> None:
            self.channel.combine_(means, "mean")
            self.channel.combine_(maxima, "mean")

        optimizer = cast(Belief, self.optimizer)
        optimizer._exchange = exchange
        self._watch(optimizer)

    def train(self, gradient_of: GradientOf, steps: int) -> Iterator[Tensors]:
        """Copies of the parameters after each step."""
        for index in range(steps):
            self.channel.start_step(step_at(index, self.transport.rank, self.transport.world_size))
            set_gradients(self.model, gradient_of(self.transport.rank, index))
            self.optimizer.step()
            self.channel.finish_step()
            yield [parameter.detach().clone() for parameter in self.model.parameters()]

    def state(self, name: str) -> Tensors:
        """One tensor of the optimizer's state per parameter, copied."""
        return [self.optimizer.state[parameter][name].clone() for parameter in self.model.parameters()]


def set_gradients(model: nn.Module, gradients: Sequence[torch.Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype)


def trained(
    make: Callable[[MemoryTransport], Rank], gradient_of: GradientOf, steps: int, n: int
) -> list[list[Tensors]]:
    """Per rank, the parameters after each step."""
    return run_threads(lambda transport: list(make(transport).train(gradient_of, steps)), n)


def published(theta: Tensors, dtype: torch.dtype, steps: int, *, amsgrad: bool) -> list[Tensors]:
    """adabelief-pytorch 0.2.1 with rectify=False, weight_decouple=False, weight_decay=0: its lines, in its order."""
    beta1, beta2, eps = 0.9, 0.999, 1e-16
    theta = [tensor.clone() for tensor in theta]
    exp_avg, exp_avg_var, max_exp_avg_var = ([torch.zeros_like(p) for p in theta] for _ in range(3))
    history = []
    for step in range(1, steps + 1):
        for i, grad in enumerate(g.to(dtype) for g in noisy(0, step - 1)):
            bias_correction1 = 1 - beta1**step
            bias_correction2 = 1 - beta2**step
            exp_avg[i].mul_(beta1).add_(grad, alpha=1 - beta1)
            grad_residual = grad - exp_avg[i]
            exp_avg_var[i].mul_(beta2).addcmul_(grad_residual, grad_residual, value=1 - beta2)
            if amsgrad:
                torch.max(max_exp_avg_var[i], exp_avg_var[i].add_(eps), out=max_exp_avg_var[i])
                denom = (max_exp_avg_var[i].sqrt() / math.sqrt(bias_correction2)).add_(eps)
            else:
                denom = (exp_avg_var[i].add_(eps).sqrt() / math.sqrt(bias_correction2)).add_(eps)
            step_size = LR / bias_correction1
            theta[i].addcdiv_(exp_avg[i], denom, value=-step_size)
        history.append([tensor.clone() for tensor in theta])
    return history


def adam(theta: Tensors, dtype: torch.dtype, steps: int) -> list[Tensors]:
    """torch.optim.Adam itself."""
    parameters = [nn.Parameter(tensor.clone()) for tensor in theta]
    optimizer = torch.optim.Adam(parameters, lr=LR)
    history = []
    for step in range(steps):
        for parameter, gradient in zip(parameters, noisy(0, step), strict=True):
            parameter.grad = gradient.to(dtype)
        optimizer.step()
        history.append([parameter.detach().clone() for parameter in parameters])
    return history


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    ("optimizer", "amsgrad"),
    [
        (AdaBelief(), False),
        (MaxAdaBelief(mode="gradient"), True),
        (MaxAdaBelief(), True),
        (Adam(), None),
    ],
    ids=["adabelief", "gradient", "moments", "adam"],
)
def test_one_rank_follows_the_published_package(
    optimizer: Optimizer, amsgrad: bool | None, dtype: torch.dtype, tolerance: float
) -> None:
    model = Network(dtype)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    expected = adam(start, dtype, 100) if amsgrad is None else published(start, dtype, 100, amsgrad=amsgrad)
    bound = optimizer.bind(model, LR)
    for step in range(100):
        set_gradients(model, noisy(0, step))
        bound.step()
        for parameter, reference in zip(model.parameters(), expected[step], strict=True):
            torch.testing.assert_close(parameter.detach(), reference, rtol=tolerance, atol=tolerance)


def test_one_rank_that_exchanges_with_nobody_is_one_that_does_not_exchange() -> None:
    (history,) = trained(lambda transport: Rank(transport, MaxAdaBelief()), noisy, 100, 1)
    expected = published(list(Network().weights), torch.float32, 100, amsgrad=True)
    for theta, reference in zip(history, expected, strict=True):
        for ours, theirs in zip(theta, reference, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reduce", ["mean", "s_max", "sum"])
def test_maxima_never_fall(reduce: str) -> None:
    def train(transport: MemoryTransport) -> None:
        rank = Rank(transport, MaxAdaBelief(reduce=reduce))  # type: ignore[arg-type]
        own = []
        for _ in rank.train(noisy, 50):
            own.append(rank.state("maximum"))
        for history in (own, rank.maxima):
            for before, after in itertools.pairwise(history):
                assert all(bool((a >= b).all()) for a, b in zip(after, before, strict=True))
        assert any(bool((a > b).any()) for a, b in zip(own[-1], own[1], strict=True))

    run_threads(train, 3)


def test_the_larger_of_two_variances_falls_again() -> None:
    def train(transport: MemoryTransport) -> None:
        rank = Rank(transport, MaxAdaBelief(max_of="previous", beta2=0.9))
        for _ in rank.train(noisy, 50):
            pass
        assert any(bool((after[0] < before[0]).any()) for before, after in itertools.pairwise(rank.maxima))

    run_threads(train, 2)


@pytest.mark.parametrize(("max_over", "falls"), [("raw", True), ("corrected", False)])
def test_only_the_corrected_maximum_makes_a_divisor_that_never_falls(max_over: str, falls: bool) -> None:
    def train(transport: MemoryTransport) -> None:
        rank = Rank(transport, MaxAdaBelief(max_over=max_over))  # type: ignore[arg-type]
        for _ in rank.train(noisy, 100):
            pass
        corrections = [1.0 if max_over == "corrected" else 1 - 0.999**t for t in range(1, 101)]
        divisors = [maxima[0] / correction for maxima, correction in zip(rank.maxima, corrections, strict=True)]
        assert any(bool((after < before).any()) for before, after in itertools.pairwise(divisors)) is falls

    run_threads(train, 2)


def test_what_is_exchanged_beside_the_averaged_gradient() -> None:
    """Its mean is that of the averaged gradient; its maximum is at least that one's: it holds the ranks' spread too."""

    def averaged(rank: int, step: int) -> Tensors:
        return [torch.stack(parts).mean(0) for parts in zip(*(noisy(other, step) for other in range(3)), strict=True)]

    def train(transport: MemoryTransport) -> None:
        ranks = [Rank(transport, MaxAdaBelief(eps_mode="outside"), torch.float64) for _ in range(2)]
        for rank, gradient_of in zip(ranks, (noisy, averaged), strict=True):
            rank.in_float64()
            for _ in rank.train(gradient_of, 30):
                pass
        apart, together = ranks
        for step in range(30):
            for ours, theirs in zip(apart.means[step], together.means[step], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
            for ours, theirs in zip(apart.maxima[step], together.maxima[step], strict=True):
                assert bool((ours >= theirs).all())
                assert bool((ours > theirs * 1.1).any())

    run_threads(train, 3)


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_with_equal_data_are_one_rank(n: int) -> None:
    def same(rank: int, step: int) -> Tensors:
        return noisy(0, step)

    (alone,) = trained(lambda transport: Rank(transport, MaxAdaBelief()), same, 20, 1)
    for history in trained(lambda transport: Rank(transport, MaxAdaBelief()), same, 20, n):
        for ours, theirs in zip(history, alone, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("reduce", "factor"), [("mean", 1.0), ("sum", 2.0)])
def test_the_first_step_in_closed_form(reduce: str, factor: float) -> None:
    def make(transport: MemoryTransport) -> Rank:
        return Rank(transport, MaxAdaBelief(reduce=reduce, eps_mode="outside"))  # type: ignore[arg-type]

    start = [parameter.detach().double() for parameter in Network().parameters()]
    for (theta,) in trained(make, noisy, 1, 4):
        for number, (before, after) in enumerate(zip(start, theta, strict=True)):
            gradients = torch.stack([noisy(rank, 0)[number] for rank in range(4)])
            expected = -LR * factor * gradients.mean(0) / (0.9 * gradients.square().mean(0).sqrt())
            torch.testing.assert_close(after.double() - before, expected, rtol=1e-3, atol=1e-7)


def test_with_constant_gradients_the_belief_grows_and_the_maximum_stays() -> None:
    def constant(rank: int, step: int) -> Tensors:
        return [torch.full(shape, 0.5, dtype=torch.float64) for shape in SHAPES]

    def train(transport: MemoryTransport) -> tuple[list[Tensors], list[Tensors]]:
        variants: tuple[Optimizer, ...] = (
            AdaBelief(beta2=0.9),
            MaxAdaBelief(beta2=0.9, max_over="corrected", eps_mode="outside"),
        )
        plain, largest = (list(Rank(transport, o, torch.float64).train(constant, 80)) for o in variants)
        return plain, largest

    ((plain, largest),) = run_threads(train, 1)

    def step_at_time(history: list[Tensors], t: int) -> float:
        return float((history[t][0] - history[t - 1][0]).abs().mean())

    assert step_at_time(plain, 79) > 10 * step_at_time(plain, 20)
    assert step_at_time(largest, 79) <= step_at_time(largest, 20) * (1 + 1e-9)


VARIANTS = [
    {"reduce": reduce, "recursion": recursion, "max_over": max_over, "max_of": max_of}
    for reduce in ("mean", "sum", "s_max")
    for recursion in ("local", "merged")
    for max_over in ("raw", "corrected")
    for max_of in ("running", "previous")
    if recursion == "local" or (reduce != "sum" and max_of != "previous")
]


def by_hand(theta: float, gradients: list[list[float]], *, eps_mode: str = "paper", **options: str) -> float:
    """One parameter after these steps (per step, one gradient per rank), in plain numbers."""
    n, eps = len(gradients[0]), 1e-2
    m, s, kept = [0.0] * n, [0.0] * n, [0.0] * n
    for t, of_ranks in enumerate(gradients, 1):
        bias1, bias2 = 1 - 0.9**t, 1 - 0.999**t
        largest = []
        for i, g in enumerate(of_ranks):
            m[i] = 0.9 * m[i] + 0.1 * g
            s[i] = 0.999 * s[i] + 0.001 * (g - m[i]) ** 2 + (eps if eps_mode == "paper" else 0)
            compared = s[i] / bias2 if options["max_over"] == "corrected" else s[i]
            largest.append(max(compared, kept[i]))
            kept[i] = largest[i] if options["max_of"] == "running" else compared
        mean = sum(m) / bias1 / (1 if options["reduce"] == "sum" else n)
        merged = {"mean": sum(largest) / n, "sum": sum(largest), "s_max": max(largest)}[options["reduce"]]
        if options["recursion"] == "merged":
            kept = [merged] * n
        corrected = merged if options["max_over"] == "corrected" else merged / bias2
        theta -= LR * mean / (math.sqrt(corrected) + eps)
    return theta


@pytest.mark.parametrize("eps_mode", ["paper", "outside"])
@pytest.mark.parametrize("options", VARIANTS, ids=["-".join(options.values()) for options in VARIANTS])
def test_every_choice_is_what_it_says(options: dict[str, str], eps_mode: str) -> None:
    def make(transport: MemoryTransport) -> Rank:
        return Rank(transport, MaxAdaBelief(eps=1e-2, eps_mode=eps_mode, **options))  # type: ignore[arg-type]

    start = Network().weights[0].detach().flatten()
    last = trained(make, noisy, 8, 3)[0][-1][0].flatten()
    for index in (0, 33, 69):
        gradients = [[float(noisy(rank, step)[0].flatten()[index]) for rank in range(3)] for step in range(8)]
        expected = by_hand(float(start[index]), gradients, eps_mode=eps_mode, **options)
        moved = expected - float(start[index])
        assert float(last[index]) - float(start[index]) == pytest.approx(moved, rel=1e-3, abs=1e-6)
        assert abs(moved) > 1e-5


@pytest.mark.parametrize("options", VARIANTS, ids=["-".join(options.values()) for options in VARIANTS])
def test_parameters_are_equal_on_all_ranks_bit_for_bit(options: dict[str, Any]) -> None:
    first, *others = trained(lambda transport: Rank(transport, MaxAdaBelief(**options)), noisy, 8, 3)
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(first[0][0], first[-1][0])


def test_a_merged_maximum_is_equal_on_all_ranks_and_a_local_one_is_not() -> None:
    for recursion, count in (("local", 3), ("merged", 1)):

        def train(transport: MemoryTransport, recursion: str = recursion) -> bytes:
            rank = Rank(transport, MaxAdaBelief(recursion=recursion))  # type: ignore[arg-type]
            for _ in rank.train(noisy, 5):
                pass
            return rank.state("maximum")[0].numpy().tobytes()

        assert len(set(run_threads(train, 3))) == count


def test_without_a_past_the_maximum_is_adabelief() -> None:
    plain, largest = Network(), Network()
    plain_optimizer, optimizer = AdaBelief().bind(plain, LR), MaxAdaBelief().bind(largest, LR)
    for step in range(20):
        for state in optimizer.state.values():
            state["maximum"].zero_()
        for model in (plain, largest):
            set_gradients(model, noisy(0, step))
        plain_optimizer.step()
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), largest.parameters(), strict=True))


def test_means_are_compressed_with_error_feedback_and_maxima_are_not() -> None:
    def train(transport: MemoryTransport) -> list[Tensors]:
        compressor = TopK(ratio=0.1, value_dtype="fp32")
        rank = Rank(transport, MaxAdaBelief(), compressor=compressor, collective="allgather")
        history = list(rank.train(noisy, 12))
        whole = Rank(transport, MaxAdaBelief(), collective="allgather")
        for _ in whole.train(noisy, 12):
            pass
        for ours, theirs in zip(rank.maxima, whole.maxima, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(int((means[0] != 0).sum()) <= 14 for means in rank.means)  # 7 entries of each of two ranks
        sent, meant = (sum(means[0] for means in each.means) for each in (rank, whole))
        waiting = rank.channel.residual_norms()
        assert waiting[0] > 0
        assert float((torch.as_tensor(sent) - torch.as_tensor(meant)).norm()) <= waiting[0] * 2
        return history

    first, second = run_threads(train, 2)
    for ours, theirs in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_parameter_without_gradient_takes_part_with_zeros() -> None:
    def train(transport: MemoryTransport) -> tuple[Tensors, Tensors]:
        results = []
        for absent in (None, torch.zeros(())):
            rank = Rank(transport, MaxAdaBelief())
            for _ in rank.train(noisy, 3):
                pass
            set_gradients(rank.model, noisy(transport.rank, 3))
            if transport.rank == 1:
                rank.model.weights[1].grad = None if absent is None else torch.zeros(SHAPES[1])
            rank.optimizer.step()
            results.append([parameter.detach() for parameter in rank.model.parameters()])
        return results[0], results[1]

    for without, zeros in run_threads(train, 2):
        assert all(torch.equal(a, b) for a, b in zip(without, zeros, strict=True))


def test_alone_a_parameter_without_gradient_is_left_alone() -> None:
    model = Network()
    optimizer = MaxAdaBelief().bind(model, LR)
    set_gradients(model, noisy(0, 0))
    before, model.weights[1].grad = model.weights[1].detach().clone(), None
    optimizer.step()
    assert torch.equal(model.weights[1], before)
    assert model.weights[1] not in optimizer.state


@pytest.mark.parametrize("eps_mode", ["paper", "outside"])
@pytest.mark.parametrize("eps", [0.0, 1e-16])
@pytest.mark.parametrize("size", [0.0, 1e-30])
def test_no_gradient_is_no_step(eps_mode: str, eps: float, size: float) -> None:
    """Also where squares vanish: 1e-30 is a number in fp32, its square is none."""
    model = Network()
    optimizer = MaxAdaBelief(eps_mode=eps_mode, eps=eps).bind(model, LR)  # type: ignore[arg-type]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(3):
        set_gradients(model, [torch.full(shape, size) for shape in SHAPES])
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_of_16_bits_have_a_state_of_32_that_survives_saving(dtype: torch.dtype) -> None:
    model = Network(dtype)
    optimizer = MaxAdaBelief().bind(model, 0.1)
    for step in range(3):
        set_gradients(model, noisy(0, step))
        optimizer.step()
    twin = copy.deepcopy(model)
    restored = MaxAdaBelief().bind(twin, 0.1)
    restored.load_state_dict(optimizer.state_dict())
    for each, bound in ((model, optimizer), (twin, restored)):
        set_gradients(each, noisy(0, 3))
        bound.step()
        assert {
            tensor.dtype for state in bound.state.values() for tensor in state.values() if tensor is not state["step"]
        } == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    assert not torch.equal(model.weights[0], Network(dtype).weights[0])


def test_parameters_in_another_order_of_memory_step_alike() -> None:
    plain, other = (nn.Parameter(torch.arange(120.0).view(2, 3, 4, 5) / 100) for _ in range(2))
    other.data = other.data.to(memory_format=torch.channels_last)
    for step in range(3):
        gradient = torch.randn(plain.shape, generator=torch.Generator().manual_seed(step))
        for parameter in (plain, other):
            parameter.grad = gradient.clone()
        if step == 0:
            optimizers = [MaxAdaBelief().build([parameter], LR) for parameter in (plain, other)]
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(plain, other)
    assert not torch.equal(plain, torch.arange(120.0).view(2, 3, 4, 5) / 100)


def test_long_tensors_step_as_short_ones_do() -> None:
    """They are cut into stretches on a CPU."""
    long = nn.Parameter(torch.linspace(-1, 1, 300_001))
    short = [nn.Parameter(part.clone()) for part in long.detach().split(1000)]
    gradient = torch.randn(300_001, generator=torch.Generator().manual_seed(1))
    long.grad = gradient
    for parameter, part in zip(short, gradient.split(1000), strict=True):
        parameter.grad = part
    for parameters in ([long], short):
        MaxAdaBelief().build(parameters, LR).step()
    assert torch.equal(long, torch.cat([parameter.detach() for parameter in short]))
