"""Adaptive top-k: at most the error of one ratio for all layers, and fewer entries."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from compressors.topk import COMMON, CURVES, FACTORS, AdaptiveTopK, TopK, choose_factors
from gradwire.exchange.reducer import reducer_for
from tests.testing.compressor_cases import alone, layers_of_shapes, reduce_once, step_at

LAYERS = layers_of_shapes((100, 100), (100, 100), (300, 100))


def gradients_at(index: int) -> list[torch.Tensor]:
    """Return a layer with few large entries, one of noise, and one with small entries."""
    generator = torch.Generator().manual_seed(index)
    heavy, noise, small = (torch.randn(layer.numel, generator=generator) for layer in LAYERS)
    return [heavy**3, noise, 0.05 * small]


def curves_of(gradients: list[torch.Tensor], ratio: float = 0.01) -> dict[int, torch.Tensor]:
    """Return the error curve that the first step measures for each layer."""
    reducer = reducer_for(AdaptiveTopK(ratio=ratio, warmup_epochs=0, skip=()))
    layers = layers_of_shapes(*((len(each),) for each in gradients))
    reduce_once(reducer, alone(), layers, gradients, step_at(0))
    return reducer.memory.by_layer(CURVES)


def test_error_curve() -> None:
    curve = curves_of([torch.tensor([1.0, -4.0, 2.0, 3.0] * 100)], 0.25)[0]
    energies = sorted([1.0, 16, 4, 9] * 100, reverse=True)
    counts = [math.floor(min(1, 0.25 * factor) * 400 + 0.5) for factor in FACTORS]  # 12.5 is rounded half up
    assert curve.tolist() == [*(sum(energies[count:]) for count in counts), 400]


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_errors_are_measured_at_any_scale(scale: float) -> None:
    curve, scaled = (curves_of([gradients_at(0)[1] * factor])[0] for factor in (1, scale))
    torch.testing.assert_close(scaled[:-1] / scale**2, curve[:-1], rtol=1e-4, atol=0)


def test_the_choice_keeps_the_error_and_saves_entries() -> None:
    curves = curves_of(gradients_at(0))
    factors = list(choose_factors(curves).values())
    errors = sum(float(curve[FACTORS.index(factor)]) for curve, factor in zip(curves.values(), factors, strict=True))
    assert errors <= sum(float(curve[COMMON]) for curve in curves.values()) * (1 + 1e-9)
    assert sum(f * layer.numel for f, layer in zip(factors, LAYERS, strict=True)) < sum(each.numel for each in LAYERS)
    assert factors[2] < 1
    assert set(choose_factors(curves_of([torch.zeros(1000)] * 2)).values()) == {FACTORS[0]}


def test_training_steps_send_less_at_no_more_error() -> None:
    adaptive, common = reducer_for(AdaptiveTopK(error_feedback=False)), reducer_for(TopK(error_feedback=False))
    sent, error = {}, {}
    for index in range(3):
        for reducer in (adaptive, common):
            gradients = gradients_at(index)
            updates, bucket = reduce_once(reducer, alone(), LAYERS, gradients, step_at(index))
            name = reducer.compressor.component_name
            sent[name] = sum(each.num_entries for each in bucket.encoded)
            error[name] = sum(float((u - g).square().sum()) for u, g in zip(updates, gradients, strict=True))
        if index == 0:
            assert sent["adaptive_topk"] == sent["topk"]
    assert sent["adaptive_topk"] < 0.9 * sent["topk"]
    assert error["adaptive_topk"] < 1.02 * error["topk"]


def test_errors_are_measured_again_where_the_warm_up_changes_the_density() -> None:
    reducer = reducer_for(AdaptiveTopK(warmup_epochs=2))
    measured = []
    for index, epoch in enumerate((0, 0, 1, 1, 2, 3)):
        step = dataclasses.replace(step_at(index), epoch=epoch, warmup=True)
        reduce_once(reducer, alone(), LAYERS, gradients_at(index), step)
        measured.append(reducer.memory.by_layer(CURVES)[0].clone())
    assert [not torch.equal(*pair) for pair in itertools.pairwise(measured)] == [False, True, False, True, False]
