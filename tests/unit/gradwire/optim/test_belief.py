"""AdaBelief and Max-AdaBelief on one rank: against explicit formulas, without gradients, with various tensors."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from bench.optimizers.base import Optimizer
from bench.optimizers.gradwire_optimizers import UseAdaBelief, UseMaxAdaBelief
from bench.optimizers.torch_optimizers import Adam
from tests.testing.belief_ranks import LR, SHAPES, Network, Rank, Tensors, noisy, set_gradients, trained
from tests.testing.memory_transport import MemoryTransport, run_threads


def published(theta: Tensors, dtype: torch.dtype, steps: int, *, amsgrad: bool) -> list[Tensors]:
    """The code of adabelief-pytorch 0.2.1 with rectify=False, weight_decouple=False, weight_decay=0, in its order."""
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
    """Run torch.optim.Adam itself."""
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
        (UseAdaBelief(), False),
        (UseMaxAdaBelief(mode="gradient"), True),
        (UseMaxAdaBelief(), True),
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
    (history,) = trained(lambda transport: Rank(transport, UseMaxAdaBelief()), noisy, 100, 1)
    expected = published(list(Network().weights), torch.float32, 100, amsgrad=True)
    for theta, reference in zip(history, expected, strict=True):
        for ours, theirs in zip(theta, reference, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)


def test_without_a_past_the_maximum_is_adabelief() -> None:
    plain, largest = Network(), Network()
    plain_optimizer, optimizer = UseAdaBelief().bind(plain, LR), UseMaxAdaBelief().bind(largest, LR)
    for step in range(20):
        for state in optimizer.state.values():
            state["maximum"].zero_()
        for model in (plain, largest):
            set_gradients(model, noisy(0, step))
        plain_optimizer.step()
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), largest.parameters(), strict=True))


def test_with_constant_gradients_the_belief_grows_and_the_maximum_stays() -> None:
    def constant(rank: int, step: int) -> Tensors:
        return [torch.full(shape, 0.5, dtype=torch.float64) for shape in SHAPES]

    def train(transport: MemoryTransport) -> tuple[list[Tensors], list[Tensors]]:
        variants: tuple[Optimizer, ...] = (
            UseAdaBelief(beta2=0.9),
            UseMaxAdaBelief(beta2=0.9, max_over="corrected", eps_mode="outside"),
        )
        plain, largest = (list(Rank(transport, o, torch.float64).train(constant, 80)) for o in variants)
        return plain, largest

    ((plain, largest),) = run_threads(train, 1)

    def step_at_time(history: list[Tensors], t: int) -> float:
        return float((history[t][0] - history[t - 1][0]).abs().mean())

    assert step_at_time(plain, 79) > 10 * step_at_time(plain, 20)
    assert step_at_time(largest, 79) <= step_at_time(largest, 20) * (1 + 1e-9)


def test_alone_a_parameter_without_gradient_is_left_alone() -> None:
    model = Network()
    optimizer = UseMaxAdaBelief().bind(model, LR)
    set_gradients(model, noisy(0, 0))
    before, model.weights[1].grad = model.weights[1].detach().clone(), None
    optimizer.step()
    assert torch.equal(model.weights[1], before)
    assert model.weights[1] not in optimizer.state


@pytest.mark.parametrize("eps_mode", ["paper", "outside"])
@pytest.mark.parametrize("eps", [0.0, 1e-16])
@pytest.mark.parametrize("size", [0.0, 1e-30])
def test_no_gradient_is_no_step(eps_mode: str, eps: float, size: float) -> None:
    """Also if squares vanish: 1e-30 is representable in fp32, its square is not."""
    model = Network()
    optimizer = UseMaxAdaBelief(eps_mode=eps_mode, eps=eps).bind(model, LR)  # type: ignore[arg-type]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(3):
        set_gradients(model, [torch.full(shape, size) for shape in SHAPES])
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_of_16_bits_have_a_state_of_32_that_survives_saving(dtype: torch.dtype) -> None:
    model = Network(dtype)
    optimizer = UseMaxAdaBelief().bind(model, 0.1)
    for step in range(3):
        set_gradients(model, noisy(0, step))
        optimizer.step()
    twin = copy.deepcopy(model)
    restored = UseMaxAdaBelief().bind(twin, 0.1)
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
            optimizers = [UseMaxAdaBelief().bind(nn.ParameterList([parameter]), LR) for parameter in (plain, other)]
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(plain, other)
    assert not torch.equal(plain, torch.arange(120.0).view(2, 3, 4, 5) / 100)


def test_long_tensors_step_as_short_ones_do() -> None:
    """Long tensors are processed in parts on a CPU."""
    long = nn.Parameter(torch.linspace(-1, 1, 300_001))
    short = [nn.Parameter(part.clone()) for part in long.detach().split(1000)]
    gradient = torch.randn(300_001, generator=torch.Generator().manual_seed(1))
    long.grad = gradient
    for parameter, part in zip(short, gradient.split(1000), strict=True):
        parameter.grad = part
    for parameters in ([long], short):
        UseMaxAdaBelief().bind(nn.ParameterList(parameters), LR).step()
    assert torch.equal(long, torch.cat([parameter.detach() for parameter in short]))
