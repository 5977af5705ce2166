"""Optimizers: options reach torch, defaults are sensible, and bad values are refused."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from bench.core import registry, spec
from bench.optimizers.base import Optimizer
from collectives.options import OptionError


def build(text: str) -> Optimizer:
    return cast(Optimizer, spec.build("optimizers", text))


def stepped(text: str, gradients: list[float], lr: float) -> float:
    """Return a weight that starts at 1 after these gradients."""
    weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = build(text).bind(torch.nn.ParameterList([weight]), lr)
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    return weight.item()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Gradients 1 and 2, lr 0.1. Velocities 1, 2.9 by default.
        ("sgd", 1 - 0.1 * (1 + 2.9)),
        ("sgd:momentum=0", 1 - 0.1 * (1 + 2)),
        ("sgd:momentum=0.5", 1 - 0.1 * (1 + 2.5)),
        # Nesterov steps along gradient + momentum * velocity: 1.9, then 2 + 0.9 * 2.9.
        ("sgd:nesterov=true", 1 - 0.1 * (1.9 + 4.61)),
        # The penalty adds 0.5 w to the gradient: 1.5 moves w to 0.85, then 2.425.
        ("sgd:momentum=0,weight_decay=0.5", 0.85 - 0.1 * 2.425),
        # Sums of squares 1 and 5; the rate is divided by 1, then by 1 + 0.5.
        ("adagrad:lr_decay=0.5,eps=0.001", 1 - 0.1 * 1 / 1.001 - 0.1 / 1.5 * 2 / (5**0.5 + 0.001)),
        # Means of squares 0.5 and 2.25.
        ("rmsprop:alpha=0.5,eps=0.001", 1 - 0.1 * (1 / (0.5**0.5 + 0.001) + 2 / (2.25**0.5 + 0.001))),
        # Means of gradients 0.5 and 1.25, so variances 0.25 and 0.6875; the second velocity keeps half of the first.
        (
            "rmsprop:alpha=0.5,eps=0.001,centered=true,momentum=0.5",
            1 - 0.1 * (1.5 * 1 / (0.25**0.5 + 0.001) + 2 / (0.6875**0.5 + 0.001)),
        ),
    ],
)
def test_an_optimizer_follows_its_formula(text: str, expected: float) -> None:
    assert stepped(text, [1, 2], lr=0.1) == pytest.approx(expected, rel=1e-12)


def adam_by_hand(decay_in_gradient: float, decoupled_decay: float) -> float:
    lr, beta1, beta2, eps = 0.1, 0.8, 0.9, 0.01
    weight, mean, square = 1.0, 0.0, 0.0
    for step, gradient in enumerate([1.0, 2.0], start=1):
        weight -= lr * decoupled_decay * weight
        gradient += decay_in_gradient * weight
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        weight -= lr * (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)) ** 0.5 + eps)
    return weight


@pytest.mark.parametrize(("name", "decays"), [("adam", (0.5, 0.0)), ("adamw", (0.0, 0.5))])
def test_adam_follows_its_formula(name: str, decays: tuple[float, float]) -> None:
    text = f"{name}:beta1=0.8,beta2=0.9,eps=0.01,weight_decay=0.5"
    assert stepped(text, [1, 2], lr=0.1) == pytest.approx(adam_by_hand(*decays), rel=1e-9)


@pytest.mark.parametrize("name", registry.entries("optimizers"))
def test_every_optimizer_moves_all_parameters_from_its_default_rate(name: str) -> None:
    optimizer = build(name)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    bound, x = optimizer.bind(model, optimizer.default_lr), torch.rand(8, 3, generator=torch.Generator().manual_seed(1))
    loss = model(x).sum()
    loss.backward()
    bound.step()
    assert all((parameter != 1).all() for parameter in model.parameters())
    assert model(x).sum() < loss
    assert 0 < optimizer.default_lr < 1


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_hands_its_momentum_over_and_goes_on_as_before(nesterov: bool) -> None:
    """The compressor keeps the gradient's velocity, the optimizer that of the weight decay: the weights are equal."""
    whole = build(f"sgd:momentum=0.8,nesterov={str(nesterov).lower()},weight_decay=0.01")
    remaining, *momentum = whole.hand_over_momentum()
    assert momentum == [0.8, nesterov]
    before, after = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizers = [
        each.bind(torch.nn.ParameterList([weight]), 0.1) for each, weight in ((whole, before), (remaining, after))
    ]
    velocity = torch.zeros(2)
    for index in range(50):
        gradient = torch.tensor([0.0, float(index % 3)])
        velocity = 0.8 * velocity + gradient
        before.grad, after.grad = gradient.clone(), gradient + 0.8 * velocity if nesterov else velocity.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(after, before)
    assert after[0].item() < 0.85  # (1 - 0.1 * 0.01)^50 = 0.951 if the decay had no velocity


@pytest.mark.parametrize("name", sorted(set(registry.entries("optimizers")) - {"sgd"}))
def test_optimizers_without_momentum_refuse_to_hand_it_over(name: str) -> None:
    with pytest.raises(OptionError, match="has no momentum to hand over"):
        build(name).hand_over_momentum()
