"""Generated images: equal on every rank, any number, not linearly separable, and learnable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from bench.datasets.base import Samples, normalise
from bench.datasets.built_in import Synthetic
from bench.models.cnn import Linear, SmallCnn

NOWHERE = Path(__file__) / "nowhere"  # a file has no children


def make(train_size: int, test_size: int = 10, *, seed: int = 1, noise: float = 0.05) -> tuple[Samples, Samples]:
    return Synthetic(noise=noise).load(NOWHERE, seed=seed, train_size=train_size, test_size=test_size)


def same(a: Samples, b: Samples) -> bool:
    return torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)


def test_same_seed_gives_the_same_images_and_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second = make(700), make(700)
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_number_of_threads_does_not_matter() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = make(500)[0]
        torch.set_num_threads(2)
        two = make(500)[0]
    finally:
        torch.set_num_threads(threads)
    assert same(one, two)


def test_seeds_and_parts_differ() -> None:
    train, test = make(500, 500)
    other, _ = make(500, seed=2)
    assert not torch.equal(train.inputs, test.inputs)
    assert not torch.equal(train.inputs, other.inputs)
    assert not torch.equal(train.targets, other.targets)


def test_blocks_differ() -> None:
    train, _ = make(1000)
    assert len(torch.unique(train.inputs.flatten(1), dim=0)) == 1000


@pytest.mark.parametrize("size", [1, 15, 499, 500, 501, 1037])
def test_a_smaller_set_is_the_beginning_of_a_larger_one_and_balanced(size: int) -> None:
    large, (small, _) = make(1200)[0], make(size)
    assert same(small, Samples(inputs=large.inputs[:size], targets=large.targets[:size]))
    counts = small.targets.bincount(minlength=10)
    assert counts.max() - counts.min() <= 1


def test_sizes_are_options() -> None:
    dataset = Synthetic(train_size=30, test_size=20)
    assert dataset.sizes() == (30, 20)
    assert [len(part) for part in dataset.load(NOWHERE, seed=1)] == [30, 20]


def test_noise_changes_pixels_only_a_little() -> None:
    clean, noisy = make(500, noise=0)[0], make(500, noise=0.1)[0]
    difference = (noisy.inputs.double() - clean.inputs.double()) / 255
    assert difference.std().item() == pytest.approx(0.1, rel=0.1)


@pytest.mark.long
@pytest.mark.slow
def test_linear_model_stays_near_chance_where_a_small_network_learns() -> None:
    train, test = make(3000, 500)
    linear, network = (accuracy_after_training(model, train, test) for model in (Linear(), SmallCnn()))
    assert linear < 0.3
    assert network > linear + 0.25


def accuracy_after_training(model: Linear | SmallCnn, train: Samples, test: Samples) -> float:
    torch.manual_seed(1)
    network: nn.Module = model.build(10)
    epochs, batch_size = 3, 50
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    x, y = (normalise(part.inputs, Synthetic.mean, Synthetic.std) for part in (train, test))
    for _ in range(epochs):
        for chosen in torch.randperm(len(train)).view(-1, batch_size):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(network(x[chosen]), train.targets[chosen]))
            optimizer.step()
    network.eval()
    with torch.no_grad():
        return float((network(y).argmax(1) == test.targets).double().mean())
