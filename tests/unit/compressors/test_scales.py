"""Gradients far from 1: at any scale, messages and residuals stay finite, and something is sent."""

from __future__ import annotations

import pytest
import torch

from compressors.powersgd import PowerSgd
from gradwire.exchange.reducer import reducer_for
from tests.testing.compressor_cases import Case, alone, case, gradient, layers_of_shapes, reduce_once, step_at

CONV = layers_of_shapes((16, 4, 3, 3))[0]
LAYERS = layers_of_shapes((40, 50), (30, 40))


@pytest.mark.parametrize("scale", [1e-30, 1e-24, 1e19, 1e36])
@pytest.mark.parametrize(
    "case",
    [
        case("algc", min_numel=100, value_dtype="fp32", ratio=0.05),
        case("onebit"),
        case("terngrad"),
        case("threshold", unit="rms", value_dtype="fp32"),
        case("adaptive_topk", value_dtype="fp32"),
    ],
    ids=str,
)
def test_scales_of_a_gradient(case: Case, scale: float) -> None:
    reducer, collective = case.reducer(), alone()
    for index in range(4):
        gradients = [gradient(layer, index, 0, scale=scale).clamp(-10 * scale, 10 * scale) for layer in LAYERS]
        updates, _ = reduce_once(reducer, collective, LAYERS, gradients, step_at(index))
        for update in updates:
            assert 0.01 * scale < float(update.abs().max()) < 1000 * scale
    assert all(torch.isfinite(residual).all() for residual in reducer.state_dict()["residuals"].values())


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_filters_are_ranked_at_any_scale(scale: float) -> None:
    chosen = []
    for factor in (1.0, scale):
        reducer = case("hylo", min_numel=100, importance="l2").reducer()
        (update,), _ = reduce_once(reducer, alone(), [CONV], [gradient(CONV, 0, 0) * factor], step_at(0))
        chosen.append((update.view(16, -1) != 0).any(1))
    assert torch.equal(chosen[0], chosen[1])


def test_a_warm_start_that_collapsed_is_drawn_anew() -> None:
    """After zeros, the next Q would be the first rows of the gradient; if those are zero, it would stay zero."""
    layer = layers_of_shapes((40, 30))[0]
    reducer, collective = reducer_for(PowerSgd(rank=2)), alone()
    x = torch.zeros(40, 30)
    x[10:, 10:] = gradient(layer, 0, 0).view(40, 30)[10:, 10:]
    sent = []
    for index, g in enumerate([torch.zeros(1200), x.view(-1), x.view(-1), x.view(-1)]):
        (update,), _ = reduce_once(reducer, collective, [layer], [g], step_at(index))
        sent.append(bool(update.any()))
    assert sent == [False, True, True, True]
