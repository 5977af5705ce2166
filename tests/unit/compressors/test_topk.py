"""Top-k with four bits per value: the selection is that of top-k, and values are rounded to one of eight magnitudes."""

from __future__ import annotations

import pytest
import torch

from collectives.payloads import Sparse, SparseLevels, unpack
from compressors.topk import QSparse, TopK
from tests.testing.compressor_cases import layers_of_shapes, step_at

(LAYER,) = layers_of_shapes((4000,))


def encoded(x: torch.Tensor, **options: float) -> SparseLevels:
    (layer,) = layers_of_shapes((x.numel(),))
    payload = QSparse(**options).encode(x, layer, step_at(0))  # type: ignore[arg-type]
    assert isinstance(payload, SparseLevels)
    return payload


def heavy_tailed(numel: int = LAYER.numel) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(3)) ** 3


@pytest.mark.parametrize("ratio", [0.01, 0.25])
def test_the_same_entries_as_top_k_at_half_the_bytes(ratio: float) -> None:
    x = heavy_tailed()
    plain, ours = TopK(ratio=ratio).encode(x, LAYER, step_at(0)), encoded(x, ratio=ratio)
    assert isinstance(plain, Sparse)
    assert torch.equal(ours.indices, plain.indices)
    assert plain.nbytes - ours.nbytes == int(ratio * LAYER.numel) * 12 // 8 - 8


@pytest.mark.parametrize("numel", [1, 2, 3, 40, 4000])
def test_every_value_becomes_the_nearest_of_a_geometric_row(numel: int) -> None:
    x = heavy_tailed(numel)
    payload = encoded(x, ratio=0.5)
    kept = x[payload.indices].double()
    low, high = float(kept.abs().min()), float(kept.abs().max())
    row = [low * (high / low) ** (j / 7) for j in range(8)]
    for value, arrived in zip(kept.tolist(), payload.values.tolist(), strict=True):
        nearest = min(row, key=lambda magnitude, value=value: abs(abs(value) - magnitude))  # type: ignore[misc]
        assert abs(arrived) == pytest.approx(nearest, rel=1e-6)
        assert (arrived < 0) == (value < 0)
    arrived = unpack(payload.pack()).to_dense()[payload.indices].double().abs()
    assert arrived[kept.abs().argmin()] == low
    assert float(arrived[kept.abs().argmax()]) == pytest.approx(high, rel=1e-6)


@pytest.mark.parametrize(
    "x",
    [
        torch.full((100,), -1e-45),
        torch.full((100,), 3.4e38),
        torch.tensor([3.4e38, *[1e-45] * 99]),
        torch.tensor([torch.inf, -torch.inf, torch.nan, *[0.5] * 97]),
    ],
    ids=["denormal", "huge", "both", "not finite"],
)
def test_whatever_the_scale_what_is_sent_can_be_read(x: torch.Tensor) -> None:
    payload = encoded(x, ratio=1.0)
    again = unpack(payload.pack())
    assert again.to_dense().isfinite().all()
    assert torch.equal(again.to_dense(), payload.to_dense())


def test_zeros_are_left_out() -> None:
    x = torch.zeros(100)
    x[7] = -2.0
    payload = encoded(x, ratio=0.1)
    assert payload.indices.tolist() == [7]
    assert torch.equal(payload.to_dense(), x)
    nothing = encoded(torch.zeros(100), ratio=0.1)
    assert (nothing.num_entries, nothing.nbytes, nothing.pack().numel()) == (0, 24, 24)
