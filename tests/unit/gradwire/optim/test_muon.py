"""Muon: its polynomial, whole steps against plain references, and the division of work among ranks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from bench.core import spec
from bench.models.base import Model
from compressors.layer import layers_of
from gradwire.optim.matrices import hidden_layers
from gradwire.optim.muon import Coefficients, orthogonalised
from tests.testing.matrix_ranks import MATRICES, Network, PlainAdamW, Rank, averaged, matrix_of, noisy, rate
from tests.testing.memory_transport import MemoryTransport, run_threads

QUINTIC = (3.4445, -4.7750, 2.0315)
SCALES = {
    "original": lambda m, n: math.sqrt(max(1, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "spectral": lambda m, n: math.sqrt(m / n),
}


def with_singular_values(values: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return U, V and the matrix U diag(values) V^T with this number of rows, fp64."""
    generator = torch.Generator().manual_seed(3)
    u, v = (
        torch.linalg.qr(torch.randn(size, len(values), generator=generator, dtype=torch.float64))[0]
        for size in (rows, len(values))
    )
    return u, v, u * values @ v.T


def polynomial(values: torch.Tensor) -> torch.Tensor:
    a, b, c = QUINTIC
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return values


def test_singular_values_become_those_of_the_polynomial() -> None:
    values = torch.logspace(-2.5, 0, 40, dtype=torch.float64)
    u, v, matrix = with_singular_values(values, rows=70)
    got = orthogonalised(matrix.float(), 5).double()
    expected = polynomial(values / values.norm())
    torch.testing.assert_close(got, u * expected @ v.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("coefficients", "low", "high"), [("quintic", 0.68, 1.21), ("polar_express", 0.859, 1.141)])
def test_singular_values_are_about_one(coefficients: Coefficients, low: float, high: float) -> None:
    values = torch.logspace(-1.5, 0, 30, dtype=torch.float64)
    _, _, matrix = with_singular_values(values, rows=30)
    assert values[0] > 0.01 * values.norm()
    got = torch.linalg.svdvals(orthogonalised(matrix, 5, coefficients))
    assert low < got.min() < got.max() < high
    assert got.max() - got.min() > 0.1  # five iterations do not end at a multiple of an orthogonal matrix


def test_one_direction_stays_one_direction() -> None:
    # In fp64, because the iterations multiply rounding errors in other directions by up to 3.4445^5 = 485.
    u = torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    v = torch.arange(1, 5, dtype=torch.float64)
    first, *others = torch.linalg.svdvals(orthogonalised(torch.outer(u, v), 5)).tolist()
    assert first == pytest.approx(polynomial(torch.tensor(1.0)).item(), abs=1e-5) == pytest.approx(0.6964, abs=1e-4)
    assert max(others) < 1e-12


def test_neither_size_nor_orientation_matters() -> None:
    matrix = torch.randn(8, 20, generator=torch.Generator().manual_seed(5))
    expected = orthogonalised(matrix, 5)
    torch.testing.assert_close(orthogonalised(matrix.T, 5).T, expected)
    for factor in (1e-3, 1e3):
        torch.testing.assert_close(orthogonalised(matrix * factor, 5), expected, rtol=1e-4, atol=1e-5)
    assert not orthogonalised(torch.zeros(3, 4), 5).any()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", SCALES)
def test_steps_equal_those_of_torch_in_bf16(scale: str, nesterov: bool) -> None:
    names = [name for name, shape in MATRICES.items() if len(Network().get_parameter(name).shape) == 2]
    ours = Rank(
        f"muon:precision=bf16,weight_decay=0.1,scale={scale},nesterov={str(nesterov).lower()}", dtype=torch.float32
    )
    theirs = [copy.deepcopy(ours.model.get_parameter(name)) for name in names]
    torch_scale = {"spectral": "spectral_unclamped"}.get(scale, scale)
    optimizer = torch.optim.Muon(theirs, lr=1.0, nesterov=nesterov, adjust_lr_fn=torch_scale, weight_decay=0.1)
    for step, weights in enumerate(ours.train(noisy, 10)):
        for name, weight in zip(names, theirs, strict=True):
            weight.grad = noisy(0, step)[name].float()
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        for name, weight in zip(names, theirs, strict=True):
            moved = (weights[name] - Network().get_parameter(name)).norm()
            assert (weights[name] - weight).norm() < 2e-2 * moved


@pytest.mark.parametrize("scale", SCALES)
def test_a_hundred_steps_equal_a_plain_reference(scale: str) -> None:
    """The reference orthogonalises by a singular value decomposition."""
    network = Network(torch.float64)
    matrices = {name: matrix_of(name, network.get_parameter(name).detach()) for name in MATRICES}
    momenta = {name: torch.zeros_like(matrix) for name, matrix in matrices.items()}
    others = {name: PlainAdamW(p.detach()) for name, p in network.named_parameters() if name not in MATRICES}
    for step, got in enumerate(Rank(f"muon:scale={scale},weight_decay=0.05").train(noisy, 100)):
        gradients, lr = noisy(0, step), rate(step)
        for name, matrix in matrices.items():
            gradient = matrix_of(name, gradients[name])
            momenta[name] = 0.95 * momenta[name] + 0.05 * gradient
            u, s, vh = torch.linalg.svd(0.05 * gradient + 0.95 * momenta[name], full_matrices=False)
            update = u * polynomial(s / s.norm()) @ vh
            matrices[name] = (1 - lr * 0.05) * matrix - lr * SCALES[scale](*MATRICES[name]) * update
            torch.testing.assert_close(matrix_of(name, got[name]), matrices[name], rtol=0, atol=1e-6)
        for name, other in others.items():
            other.step(gradients[name], 1e-3 * lr / rate(0))
            torch.testing.assert_close(got[name], other.weight, rtol=0, atol=1e-6)


def test_ranks_that_divide_the_matrices_equal_one_that_updates_all_of_them() -> None:
    def train(transport: MemoryTransport) -> tuple[dict[str, torch.Tensor], int, int]:
        rank = Rank("muon:shard=true", transport, torch.float32)
        last = rank.after(averaged(3), 5)
        assert rank.channel is not None
        traffic = rank.channel.traffic
        return last, traffic["state"].nbytes, traffic["gradient"].nbytes

    alone = Rank("muon", dtype=torch.float32).after(averaged(3), 5)
    results = run_threads(train, 3)
    for last, _, of_gradients in results:
        assert of_gradients == 0
        for name, weight in alone.items():
            assert torch.equal(last[name], weight), name
    numel = sum(rows * columns for rows, columns in MATRICES.values())
    assert sum(of_state for _, of_state, _ in results) == 5 * 2 * 4 * numel


def test_a_resumed_training_continues_bit_for_bit() -> None:
    whole = Rank("muon", dtype=torch.float32).after(noisy, 9)
    first = Rank("muon", dtype=torch.float32)
    first.after(noisy, 4)
    second = Rank("muon", dtype=torch.float32)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for name, weight in second.after(noisy, 5, first=4).items():
        assert torch.equal(weight, whole[name]), name


def test_the_other_parameters_can_have_the_same_rate() -> None:
    rank, network = Rank("muon:adamw_lr=none"), Network(torch.float64)
    other = PlainAdamW(network.out.bias.detach())
    for step, got in enumerate(rank.train(noisy, 3)):
        other.step(noisy(0, step)["out.bias"], rate(step))
        torch.testing.assert_close(got["out.bias"], other.weight)


class Tied(nn.Module):
    """Linear layers between an embedding and an output layer that shares its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(10, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.token.weight


def of_bench(name: str, num_classes: int = 10) -> nn.Module:
    model: Model = spec.build("models", name)
    return model.build(num_classes)


@pytest.mark.parametrize(
    ("network", "hidden"),
    [
        (Network(), list(MATRICES)),
        (Tied(), ["hidden.weight"]),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), ["0.weight"]),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)), ["0.weight"]),
        (
            nn.Sequential(nn.MultiheadAttention(4, 2), nn.LayerNorm(4), nn.Linear(4, 2)),
            ["0.in_proj_weight", "0.out_proj.weight"],
        ),
        (of_bench("linear"), []),
        (of_bench("ngram_embedding", 256), ["hidden.weight"]),
    ],
    ids=["network", "tied", "mlp", "convolutions", "attention", "linear", "ngram_embedding"],
)
def test_hidden_matrices_are_all_but_embeddings_and_the_output_layer(network: nn.Module, hidden: list[str]) -> None:
    assert [layer.name for layer in hidden_layers(layers_of(network))] == hidden


def test_all_matrices_of_a_transformer_with_tied_weights_are_hidden() -> None:
    layers = layers_of(of_bench("gpt", 256))
    hidden = {layer.name for layer in hidden_layers(layers)}
    assert {layer.name for layer in layers} - hidden == {
        layer.name for layer in layers if "norm" in layer.name or layer.kind == "embedding"
    }
