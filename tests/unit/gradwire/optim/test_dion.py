"""Dion: whole steps against a plain reference, on several ranks as on one, and what it sends."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from bench.core import registry
from compressors.layer import layers_of
from gradwire.optim.dion import DionOptions, orthonormal
from tests.testing.matrix_ranks import (
    MATRICES,
    SHAPES,
    Network,
    PlainAdamW,
    Rank,
    Tensors,
    averaged,
    matrix_of,
    noisy,
    rate,
)
from tests.testing.memory_transport import MemoryTransport, run_threads

SMALL = "dion:rank_fraction=0.25"


def closest(got: Tensors, expected: Tensors, tolerance: float) -> None:
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=tolerance, msg=lambda text, name=name: name + text)


def first_basis(name: str, columns: int, rank: int) -> torch.Tensor:
    (layer,) = (layer for layer in layers_of(Network()) if layer.name == name)
    return torch.randn(columns, rank, generator=torch.Generator().manual_seed(layer.id), dtype=torch.float64)


@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_a_hundred_steps_equal_a_plain_reference(fraction: float) -> None:
    network = Network(torch.float64)
    others = {name: PlainAdamW(p.detach()) for name, p in network.named_parameters() if name not in MATRICES}
    matrices, momenta, bases = {}, {}, {}
    for name, shape in MATRICES.items():
        matrices[name] = matrix_of(name, network.get_parameter(name).detach())
        momenta[name] = torch.zeros(max(shape), min(shape), dtype=torch.float64)
        bases[name] = first_basis(name, min(shape), math.ceil(fraction * min(shape)))
    for step, got in enumerate(Rank(f"dion:rank_fraction={fraction}").train(noisy, 100)):
        gradients, lr = noisy(0, step), rate(step)
        for name, (rows, columns) in MATRICES.items():
            gradient, momentum = matrix_of(name, gradients[name]), momenta[name]
            momentum += gradient if rows >= columns else gradient.T
            p, r = torch.linalg.qr(momentum @ bases[name])
            p = p * r.diagonal().sign()
            w = momentum.T @ p
            momentum -= 0.05 * p @ w.T
            bases[name] = w / (w.norm(dim=0) + 1e-8)
            update = p @ bases[name].T
            update = update if rows >= columns else update.T
            matrices[name] = (1 - lr * 0.01) * matrices[name] - lr * math.sqrt(rows / columns) * update
            torch.testing.assert_close(matrix_of(name, got[name]), matrices[name], rtol=0, atol=1e-9)
        for name, other in others.items():
            other.step(gradients[name], 1e-3 * lr / rate(0))
            torch.testing.assert_close(got[name], other.weight, rtol=0, atol=1e-9)


@pytest.mark.parametrize("fraction", [0.25, 0.7, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["fp32", "fp64"])
def test_ranks_follow_one_rank_that_gets_the_mean_gradient(
    fraction: float, dtype: torch.dtype, tolerance: float
) -> None:
    text = f"dion:rank_fraction={fraction}"

    def train(transport: MemoryTransport) -> tuple[Tensors, Tensors]:
        rank = Rank(text, transport, dtype)
        last = rank.after(noisy, 30)
        return last, {
            name: rank.optimizer.state[rank.model.get_parameter(name)]["momentum"].clone() for name in MATRICES
        }

    alone = Rank(text, dtype=dtype)
    expected = alone.after(averaged(3), 30)
    results = run_threads(train, 3)
    for got, _ in results:
        closest(got, expected, tolerance)
        assert all(torch.equal(got[name], results[0][0][name]) for name in got)
    momenta = {name: [own[name] for _, own in results] for name in MATRICES}
    for name, by_rank in momenta.items():
        expected_momentum = alone.optimizer.state[alone.model.get_parameter(name)]["momentum"]
        size = expected_momentum.norm()
        assert (torch.stack(by_rank).mean(0) - expected_momentum).norm() < tolerance * size
        assert torch.equal(by_rank[0], by_rank[1]) is (fraction == 1.0 or name in _whole(fraction))


def _whole(fraction: float) -> list[str]:
    """Return the names of the matrices whose gradients are exchanged."""
    options = DionOptions(rank_fraction=fraction)
    return [name for name, shape in MATRICES.items() if not options.compresses(*shape)]


def test_matrices_smaller_than_their_factors_are_not_compressed() -> None:
    assert [DionOptions(rank_fraction=fraction).rank_of(100, 200) for fraction in (0.07, 0.071, 1.0, 1e-12)] == [
        7,
        8,
        100,
        1,
    ]
    assert _whole(0.25) == []
    assert _whole(0.7) == ["wide.weight", "tall.weight"]  # (20 + 6) * 5 is more than 120


def test_with_the_full_rank_only_a_share_of_the_momentum_is_left() -> None:
    rank = Rank("dion:rank_fraction=1")
    rank.after(noisy, 1)
    gradients = noisy(0, 0)
    for name in MATRICES:
        momentum = rank.optimizer.state[rank.model.get_parameter(name)]["momentum"]
        torch.testing.assert_close(momentum, 0.95 * matrix_of(name, gradients[name]), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("fraction", "compressor", "world_size"), [(0.25, "none", 2), (0.25, "bf16", 4), (0.7, "none", 4), (1.0, "none", 2)]
)
def test_sent_bytes_equal_the_formula(fraction: float, compressor: str, world_size: int) -> None:
    def train(transport: MemoryTransport) -> tuple[int, list[float]]:
        rank = Rank(f"dion:rank_fraction={fraction}", transport, torch.float32, compressor=compressor)
        rank.after(noisy, 3)
        assert rank.channel is not None
        encoded = rank.channel.finish_step().encoded
        return rank.channel.traffic["gradient"].nbytes, [each.nbytes for each in encoded]

    numel, num_factors = 0, 0
    for name, shape in SHAPES.items():
        m, n = MATRICES.get(name, (0, 0))
        factors = (m + n) * math.ceil(fraction * min(m, n))
        is_compressed = 0 < factors < m * n
        numel += factors if is_compressed else math.prod(shape)
        num_factors += 2 if is_compressed else 1
    nbytes = {"none": 4, "bf16": 2}[compressor] * numel
    results = run_threads(train, world_size)
    assert sum(sent for sent, _ in results) == 3 * 2 * (world_size - 1) * nbytes
    assert all(sum(encoded) == nbytes for _, encoded in results)
    assert len(results[0][1]) == num_factors


def test_factors_in_bf16_stay_close_to_those_in_fp32() -> None:
    def train(transport: MemoryTransport) -> Tensors:
        return Rank(SMALL, transport, torch.float32, compressor="bf16").after(noisy, 10)

    start = dict(Network().named_parameters())
    expected = Rank(SMALL, dtype=torch.float32).after(averaged(2), 10)
    first, second = run_threads(train, 2)
    for name, weight in expected.items():
        assert torch.equal(first[name], second[name])
        assert 0 < (first[name] - weight).norm() < 0.05 * (weight - start[name]).norm()


@pytest.mark.parametrize("collective", registry.entries("collectives"))
def test_every_collective_gives_the_same(collective: str) -> None:
    spec = {"server": "server:placement=sharded,split_numel=16"}.get(collective, collective)

    def train(transport: MemoryTransport) -> Tensors:
        return Rank(SMALL, transport, torch.float32, collective=spec).after(noisy, 2)

    expected = Rank(SMALL, dtype=torch.float32).after(averaged(2), 2)
    for got in run_threads(train, 2):
        closest(got, expected, 1e-6)


def test_a_momentum_of_zeros_leaves_the_basis() -> None:
    rank = Rank("dion:weight_decay=0")
    weight = rank.model.tall.weight
    basis = rank.optimizer.state[weight]["basis"].clone()
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    last = rank.after(lambda *_: zeros, 2)
    assert torch.equal(last["tall.weight"], Network(torch.float64).tall.weight)
    assert torch.equal(rank.optimizer.state[weight]["basis"], basis)
    assert not torch.equal(rank.after(noisy, 1)["tall.weight"], last["tall.weight"])


def test_a_matrix_is_orthonormalised_with_fixed_signs() -> None:
    matrix = torch.randn(9, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    q = orthonormal(matrix)
    torch.testing.assert_close(q.T @ q, torch.eye(4, dtype=torch.float64))
    assert bool(((q.T @ matrix).diagonal() > 0).all())
    assert not orthonormal(torch.zeros(5, 2)).any()


def test_a_resumed_training_continues_bit_for_bit() -> None:
    def train(transport: MemoryTransport) -> None:
        whole = Rank(SMALL, transport, torch.float32).after(noisy, 9)
        first = Rank(SMALL, transport, torch.float32)
        first.after(noisy, 4)
        second = Rank(SMALL, transport, torch.float32)
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        for name, weight in second.after(noisy, 5, first=4).items():
            assert torch.equal(weight, whole[name]), name

    run_threads(train, 2)


def test_a_parameter_without_gradient_takes_part_with_zeros() -> None:
    def train(transport: MemoryTransport) -> None:
        def lacking(rank: int, step: int) -> Tensors:
            gradients = noisy(rank, step)
            return gradients | {"tall.weight": torch.zeros(SHAPES["tall.weight"])} if rank == 1 else gradients

        zeros, without = (Rank(SMALL, transport, torch.float32) for _ in range(2))
        expected = zeros.after(lacking, 1)
        for name, parameter in without.model.named_parameters():
            gradient = lacking(transport.rank, 0)[name].float()
            parameter.grad = gradient if gradient.any() else None
        without.optimizer.step()
        for name, parameter in without.model.named_parameters():
            assert torch.equal(parameter, expected[name])

    run_threads(train, 2)
