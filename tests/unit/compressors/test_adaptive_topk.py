"""Adaptive top-k: at most the error of one ratio for all layers, and fewer entries."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from compressors.topk import COMMON, CURVES, FACTORS, AdaptiveTopK, TopK, _error_curve, choose_factors
from gradwire.exchange.reducer import reducer_for
from tests.testing.compressor_cases import alone, layers_of_shapes, reduce_once, step_at

LAYERS = layers_of_shapes((100, 100), (100, 100), (300, 100))


def gradients_at(index: int) -> list[torch.Tensor]:
    """Return a layer with few large entries, one of noise, and one with small entries."""
    generator = torch.Generator().manual_seed(index)
    heavy, noise, small = (torch.randn(layer.numel, generator=generator) for layer in LAYERS)
    return [heavy**3, noise, 0.05 * small]


def test_error_curve() -> None:
    x = torch.tensor([1.0, 4.0, 2.0, 3.0] * 100)
    curve = _error_curve(x, 0.25)
    energies = sorted((x**2).tolist(), reverse=True)
    expected = [
        sum(energies[min(400, round(400 * 0.25 * factor)) if 0.25 * factor < 1 else 400 :]) for factor in FACTORS
    ]
    # 12.5 entries are rounded half up
    expected[0] = sum(energies[13:])
    assert curve[:-1].tolist() == expected
    assert curve[-1] == 400


def test_the_choice_keeps_the_error_and_saves_entries() -> None:
    curves = torch.stack([_error_curve(g.abs(), 0.01) for g in gradients_at(0)])
    factors = list(choose_factors(dict(enumerate(curves))).values())
    errors = sum(float(curve[FACTORS.index(factor)]) for curve, factor in zip(curves, factors, strict=True))
    assert errors <= float(curves[:, COMMON].sum()) * (1 + 1e-9)
    entries = sum(factor * layer.numel for factor, layer in zip(factors, LAYERS, strict=True))
    assert entries < sum(layer.numel for layer in LAYERS)
    assert factors[2] < 1


def test_zeros_choose_the_least() -> None:
    assert choose_factors(dict.fromkeys((0, 1), _error_curve(torch.zeros(1000), 0.01))) == dict.fromkeys(
        (0, 1), FACTORS[0]
    )


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
