"""The proved contraction holds for every gradient of a compressor, and is not larger than necessary."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest
import torch

from compressors.base import Compressor
from compressors.layer import Layer
from gradwire.exchange.reducer import reducer_for
from tests.testing.compressor_cases import CASES, Case, alone, case, layers_of_shapes, reduce_once, step_at

NUMEL = 1100  # not a multiple of the group and block sizes here
VECTOR, LINEAR, CONV = LAYERS = layers_of_shapes((NUMEL,), (20, 55), (20, 11, 5, 1))
BY_KIND = {"hylo", "powersgd"}  # treat layers of these shapes differently
AT_RANDOM = {"randomk", "qsgd", "natural", "terngrad"}
DRAWING = {("rounding", "stochastic"), ("importance", "random"), ("warm_start", False)}
NUM_DRAWS = 40


def gradients() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(NUMEL, generator=generator)
    one_hot = torch.zeros(NUMEL)
    one_hot[77] = -3.0
    ramp = torch.linspace(0.5, 1.0, NUMEL)
    return {
        "noise": noise,
        "heavy-tailed": noise**3,
        "flat": torch.full((NUMEL,), 0.25),
        "one entry": one_hot,
        "one large entry": one_hot * 1000 + 0.1 * noise,
        "ramp": torch.where(noise > 0, ramp, -ramp),
    }


BOUNDED = [
    (each, layer)
    for each in (
        *CASES,
        case("topk", value_dtype="fp32", ratio=0.03),
        case("group_topk", value_dtype="fp32", ratio=0.03, group_size=100, error_feedback=False),
        case("threshold", unit="max", threshold=1.0),
        case("terngrad", clip_sigmas=0, error_feedback=True),
        case("terngrad", clip_sigmas=0.5),
        case("terngrad", clip_sigmas=0.5, error_feedback=True),
        case("dgc", ratio=0.01, sample_ratio=0.1),
        case("randomk", ratio=0.2),
        case("randomk", error_feedback=False, scaled=True, ratio=0.2),
        case("hylo", min_numel=50, importance="l2"),
        case("hylo", min_numel=50, importance="random"),
        case("hylo", min_numel=50, threshold=0.5),
        case("powersgd", rank=2, warm_start=False),
    )
    for layer in LAYERS
    if (each.name != "randomk" or ("ratio", 0.2) in each.options)  # at 1 % a few draws miss a single large entry
    and "clip_norm" not in dict(each.options)  # the clipped part is lost before encoding
    and (layer is VECTOR or each.name in BY_KIND)
    and each.make().contraction_bound(layer) is not None
    and not each.make().leaves_dense(layer)
]


def bound_of(compressor: Compressor, layer: Layer) -> float:
    bound = compressor.contraction_bound(layer)
    assert bound is not None
    return bound


def lost_share(compressor: Compressor, layer: Layer, x: torch.Tensor, index: int = 5) -> float:
    """Return the lost share of the squares at a step after `dense_steps`; draws differ by the step."""
    (sent,), _ = reduce_once(reducer_for(compressor), alone(), [layer], [x], step_at(index))
    return float((x - sent).double().square().sum() / x.double().square().sum())


@pytest.mark.parametrize(("case", "layer"), BOUNDED, ids=lambda value: getattr(value, "name", str(value)))
def test_no_gradient_loses_more_than_is_proved(case: Case, layer: Layer) -> None:
    compressor, bound = case.make(), bound_of(case.make(), layer)
    for x in gradients().values():
        if case.name in AT_RANDOM or DRAWING & set(case.options):
            lost = [lost_share(compressor, layer, x, 5 + index) for index in range(NUM_DRAWS)]
            spread = statistics.stdev(lost) / NUM_DRAWS**0.5
            assert statistics.fmean(lost) <= bound + 4 * spread + 1e-6
        else:
            assert lost_share(compressor, layer, x) <= bound + 1e-6


def crossed() -> torch.Tensor:
    """Return equal singular values, one per row: any two columns of Q capture the same share of them."""
    x = torch.zeros(20, 55)
    x[:, :20] = torch.eye(20)
    return x.view(-1)


def flat_filters_beside_peaks(num_flat: int) -> torch.Tensor:
    """Return filters with equal l1 norms: the first are flat, with the smallest squares; the others are peaks."""
    x = torch.zeros(20, 55)
    x[:num_flat] = 1 / 55
    x[num_flat:, 0] = 1
    return x.view(-1)


@pytest.mark.parametrize(
    ("case", "layer", "x"),
    [
        (case("topk", value_dtype="fp32", ratio=0.03), VECTOR, gradients()["flat"]),
        (case("group_topk", value_dtype="fp32", ratio=0.04, group_size=50), VECTOR, gradients()["flat"]),
        (case("sign"), VECTOR, gradients()["one entry"]),
        (case("twobit", threshold=4.0), VECTOR, gradients()["one entry"]),
        (case("threshold", unit="absolute", threshold=4.0), VECTOR, gradients()["one entry"]),
        (case("hylo", min_numel=50, threshold=4.0), LINEAR, gradients()["one entry"]),
        (case("hylo", min_numel=50, importance="l2"), CONV, gradients()["flat"]),
        (case("hylo", min_numel=275), CONV, flat_filters_beside_peaks(10)),
        (case("powersgd", rank=2, warm_start=False), LINEAR, crossed()),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else "",
)
def test_some_gradient_loses_about_as_much_as_is_proved(case: Case, layer: Layer, x: torch.Tensor) -> None:
    compressor = case.make()
    assert lost_share(compressor, layer, x) == pytest.approx(bound_of(compressor, layer), rel=1e-6)


def ones_at(*places: Any) -> torch.Tensor:
    x = torch.zeros(20, 55)
    for place in places:
        x[place] = 1
    return x.view(-1)


@pytest.mark.parametrize(
    ("case", "layer", "gradients"),
    [
        # a warm start may find nothing
        (case("powersgd", error_feedback=False), LINEAR, (ones_at((0, 0), (1, 1)), ones_at((2, 2)))),
        # filters that waited may take all places
        (case("hylo", min_numel=275, max_age=1, error_feedback=False), CONV, (ones_at(slice(10)), ones_at(slice(10)))),
    ],
    ids=["powersgd", "hylo"],
)
def test_a_second_step_may_send_nothing(case: Case, layer: Layer, gradients: tuple[torch.Tensor, torch.Tensor]) -> None:
    reducer, collective = case.reducer(), alone()
    first, second = (
        reduce_once(reducer, collective, [layer], [x], step_at(index))[0][0] for index, x in enumerate(gradients)
    )
    torch.testing.assert_close(first, gradients[0], rtol=1e-5, atol=1e-5)
    assert not second.any()
    assert reducer.compressor.contraction_bound(layer) == 1


def test_weights_of_zero_may_hide_a_gradient() -> None:
    compressor = case("hylo", min_numel=275, importance="taylor").make()
    layer = dataclasses.replace(CONV, weight=torch.zeros(CONV.shape))
    x = torch.zeros(20, 55)
    x[10:] = 1
    assert lost_share(compressor, layer, x.view(-1)) == bound_of(compressor, layer) == 1


def test_what_has_no_bound_says_so() -> None:
    """A vote sends equal amounts for small gradients, and a shared scale may be another rank's."""
    assert case("sign", mode="vote", error_feedback=False).make().contraction_bound(VECTOR) is None
    assert case("terngrad", shared_scale=True).make().contraction_bound(VECTOR) is None
    assert {each.name for each in CASES if each.make().contraction_bound(LINEAR) is None} == {"sign", "terngrad"}
