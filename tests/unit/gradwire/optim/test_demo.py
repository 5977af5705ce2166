"""DeMo: its transform, what is sent and what stays, and its steps beside those of a plain process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from bench.optimizers.gradwire_optimizers import UseDeMo
from collectives.payloads import Bundle, Dense, GroupSparse, Payload, PayloadError
from gradwire.optim.demo import DeMo, Tiles, mean_over_senders
from tests.testing.belief_ranks import LR, SHAPES, Network, Rank, Tensors, noisy
from tests.testing.memory_transport import MemoryTransport, run_threads


def by_definition(x: torch.Tensor) -> torch.Tensor:
    """Return the orthonormal DCT-II along the first dimension, in fp64."""
    n = len(x)
    rows = [
        sum(x[j].double() * math.cos(math.pi * (2 * j + 1) * u / (2 * n)) for j in range(n))
        * math.sqrt((2 if u else 1) / n)
        for u in range(n)
    ]
    return torch.stack(cast(list[torch.Tensor], rows))


def test_frequencies_are_those_of_the_definition() -> None:
    x = torch.randn(6, 15, generator=torch.Generator().manual_seed(1))
    first = Tiles(x.shape, 5, "dct").split(x.view(-1))[:15].view(3, 5)  # chunks of 3 x 5
    expected = by_definition(by_definition(x[:3, :5]).T).T
    torch.testing.assert_close(first.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(128, 192), (97, 10), (4, 3, 3, 3), (150,), (1,), ()])
@pytest.mark.parametrize("transform", ["dct", "none"])
def test_frequencies_hold_all_of_a_parameter(shape: tuple[int, ...], transform: Any) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).reshape(-1)
    tiles = Tiles(torch.Size(shape), 64, transform)
    frequencies = tiles.split(x)
    assert float(frequencies.norm()) == pytest.approx(float(x.norm()), rel=1e-6)
    torch.testing.assert_close(tiles.join(frequencies), x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "numel"),
    [((128, 192), 64 * 64), ((150,), 50), ((97, 10), 10), ((6, 4, 3, 3), 6 * 36), ((), 1)],
)
def test_sides_of_chunks_are_the_largest_divisors(shape: tuple[int, ...], numel: int) -> None:
    assert Tiles(torch.Size(shape), 64, "dct").numel == numel


def plain(options: UseDeMo, steps: int, num_ranks: int) -> Tensors:
    """Train all ranks in one process, in fp64, with a torch.topk per chunk; all parameters are vectors or matrices."""
    weights = [p.detach().double() for p in Network().parameters()]
    momenta = [[torch.zeros_like(w) for w in weights] for _ in range(num_ranks)]
    h = {(7, 10): (7, 5), (33,): (1, 3), (): (1, 1)}  # the largest divisors up to 8 of each dimension
    for step in range(steps):
        sums, counts = ([torch.zeros(w.numel(), dtype=torch.float64) for w in weights] for _ in range(2))
        bases = []
        for shape in SHAPES:
            rows, columns = shape if len(shape) == 2 else (1, math.prod(shape))
            height, width = h[shape]
            left, right = (by_definition(torch.eye(side, dtype=torch.float64)) for side in (height, width))
            basis = torch.zeros(rows * columns, rows * columns, dtype=torch.float64)  # all chunks, as one matrix
            places = torch.arange(rows * columns).view(rows, columns)
            number = 0
            for top in range(0, rows, height):
                for first in range(0, columns, width):
                    inside = places[top : top + height, first : first + width].reshape(-1)
                    basis[number : number + len(inside), inside] = torch.kron(left, right)
                    number += len(inside)
            bases.append(basis)
        for rank in range(num_ranks):
            for index, gradient in enumerate(noisy(rank, step)):
                m = options.beta * momenta[rank][index] + (LR if options.lr_inside else 1) * gradient
                size = math.prod(h[SHAPES[index]])
                chunks = (bases[index] @ m.view(-1)).view(-1, size)
                largest = chunks.abs().topk(min(options.k, size)).indices
                kept = torch.zeros_like(chunks).scatter(1, largest, chunks.gather(1, largest)).view(-1)
                momenta[rank][index] = m - (bases[index].T @ kept).view(m.shape)
                sums[index] += kept
                counts[index] += kept != 0
        for weight, total, count, basis in zip(weights, sums, counts, bases, strict=True):
            weight -= LR * options.weight_decay * weight
            weight -= LR * (basis.T @ (total / count.clamp(min=1))).sign().view(weight.shape)
    return weights


@pytest.mark.parametrize("lr_inside", [True, False])
def test_100_steps_are_those_of_a_plain_process(lr_inside: bool) -> None:
    options = UseDeMo(chunk=8, k=3, beta=0.99, lr_inside=lr_inside, weight_decay=0.1)
    expected = plain(options, 100, 3)

    def train(transport: MemoryTransport) -> Tensors:
        *_, weights = Rank(transport, options, collective="allgather").train(noisy, 100)
        return weights

    for weights in run_threads(train, 3):
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=LR / 10)


@pytest.mark.parametrize("transform", ["dct", "none"])
def test_if_all_is_sent_it_is_sign_descent_on_the_mean_gradient(transform: Any) -> None:
    options = UseDeMo(chunk=8, k=64, transform=transform)

    def train(transport: MemoryTransport) -> Tensors:
        rank = Rank(transport, options, collective="allgather")
        for _ in rank.train(noisy, 20):
            momentum = cast(DeMo, rank.optimizer).memory["momentum"]
            assert float(momentum.abs().max()) <= (0.0 if transform == "none" else 1e-8)
        return [p.detach() for p in rank.model.parameters()]

    weights = [p.detach() for p in Network().parameters()]
    for step in range(20):
        for weight, *gradients in zip(weights, noisy(0, step), noisy(1, step), strict=True):
            weight -= LR * torch.stack(gradients).mean(0).sign()
    for ours in run_threads(train, 2):
        for our, their in zip(ours, weights, strict=True):
            torch.testing.assert_close(our, their)


@pytest.mark.parametrize("value_dtype", ["fp32", "bf16"])
def test_what_was_sent_and_what_stays_are_all_gradients(value_dtype: Any) -> None:
    def train(transport: MemoryTransport) -> None:
        rank = Rank(transport, UseDeMo(chunk=8, k=3, beta=1.0, value_dtype=value_dtype), collective="allgather")
        optimizer = cast(DeMo, rank.optimizer)
        gathered, sent = optimizer._gathered, [torch.zeros(p.shape).view(-1) for p in rank.model.parameters()]

        def watched(payloads: Sequence[Payload]) -> Sequence[Payload]:
            for total, tiles, payload in zip(sent, optimizer._tiles, payloads, strict=True):
                total += tiles.join(payload.to_dense())
            return gathered(payloads)

        optimizer._gathered = watched  # type: ignore[method-assign]
        for _ in rank.train(noisy, 100):
            pass
        gradients = [sum(noisy(transport.rank, step)[index] for step in range(100)) for index in range(3)]
        whole = LR * torch.cat([torch.as_tensor(gradient).view(-1) for gradient in gradients])
        difference = torch.cat(sent) + optimizer.memory["momentum"] - whole
        assert float(difference.norm()) < 1e-6 * float(whole.norm())

    run_threads(train, 2)


def test_a_mean_is_over_the_ranks_that_sent_a_value() -> None:
    def message(*chunks: tuple[list[float], list[int]]) -> Bundle:
        return Bundle([GroupSparse(4, 4, 2, torch.tensor(v), torch.tensor(i)) for v, i in chunks])

    terms = [
        message(([2.0, 4.0], [0, 1]), ([0.0, 0.0], [0, 1])),  # rank 0 sends nothing of the second layer
        message(([6.0, 8.0], [1, 3]), ([1.0, 3.0], [2, 3])),
    ]
    assert mean_over_senders(terms, [4, 4]).tolist() == [2, 5, 0, 8, 0, 0, 1, 3]
    for damaged in (
        Bundle([Dense(torch.ones(4)), Dense(torch.ones(4))]),
        GroupSparse(8, 4, 1, terms[0].to_dense()[:2], torch.tensor([0, 3])),
    ):
        with pytest.raises(PayloadError, match="other payloads than one GroupSparse per layer"):
            mean_over_senders([terms[0], damaged], [4, 4])


@pytest.mark.parametrize(("value_dtype", "nbytes"), [("fp32", 4), ("bf16", 2)])
def test_bytes_are_those_of_the_formula(value_dtype: Any, nbytes: int) -> None:
    def train(transport: MemoryTransport) -> int:
        rank = Rank(transport, UseDeMo(chunk=8, k=3, value_dtype=value_dtype), collective="allgather")
        for _ in rank.train(noisy, 5):
            pass
        return transport.traffic["gradient"].nbytes

    # (7, 10): 2 chunks of 7 x 5, 6 indices of 6 bits; (33,): 11 chunks of 3, bitmap; (): 1 chunk of 1, no index
    layers = [24 + 6 * nbytes + 5, 24 + 33 * nbytes + 5, 24 + nbytes]
    bundle = 16 + 16 + sum(-(-layer // 8) * 8 for layer in layers)
    assert run_threads(train, 3) == [5 * 2 * bundle] * 3


@pytest.mark.parametrize(("value_dtype", "times_less"), [("fp32", 93), ("bf16", 146)])
def test_the_compression_of_the_default_chunk(value_dtype: Any, times_less: int) -> None:
    weight = torch.nn.Parameter(torch.randn(512, 512, generator=torch.Generator().manual_seed(1)))
    optimizer = DeMo([weight], LR, value_dtype=value_dtype)
    payload = optimizer._encode(weight.detach().view(-1), optimizer._tiles[0])
    assert 4 * weight.numel() / len(payload.pack()) == pytest.approx(times_less, abs=0.5)
