"""The proved contraction holds for every gradient that a compressor may be given, and is no larger than it need be."""

from __future__ import annotations

import statistics

import pytest
import torch

from compressors.base import Compressor
from tests.compressor_cases import CASES, Case, case, layers_of_shapes, step_at

NUMEL = 1100  # of the group and block sizes here no multiple
(LAYER,) = layers_of_shapes((NUMEL,))
AT_RANDOM = {"randomk", "qsgd", "natural", "terngrad"}
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
    each
    for each in (
        *CASES,
        case("topk", value_dtype="fp32", ratio=0.03),
        case("group_topk", value_dtype="fp32", ratio=0.03, group_size=100, error_feedback=False),
        case("threshold", unit="max", threshold=1.0),
        case("terngrad", clip_sigmas=0, error_feedback=True),
        case("randomk", ratio=0.2),
        case("randomk", error_feedback=False, scaled=True, ratio=0.2),
    )
    if (each.name != "randomk" or ("ratio", 0.2) in each.options)  # at 1 % a few draws miss a single large entry
    and each.make().contraction_bound(LAYER) is not None
    and not each.make().leaves_dense(LAYER)
]


def bound_of(compressor: Compressor) -> float:
    bound = compressor.contraction_bound(LAYER)
    assert bound is not None
    return bound


def lost_share(compressor: Compressor, x: torch.Tensor, index: int) -> float:
    payload = compressor.encode(x, LAYER, step_at(index))
    compressor.commit()
    return float((x - payload.to_dense()).double().square().sum() / x.double().square().sum())


@pytest.mark.parametrize("case", BOUNDED, ids=str)
@pytest.mark.parametrize("name", gradients())
def test_no_gradient_loses_more_than_is_proved(case: Case, name: str) -> None:
    compressor, x = case.make(), gradients()[name]
    is_random = case.name in AT_RANDOM or ("rounding", "stochastic") in case.options
    if is_random:
        lost = [lost_share(compressor, x, index) for index in range(NUM_DRAWS)]
        spread = statistics.stdev(lost) / NUM_DRAWS**0.5
        assert statistics.fmean(lost) <= bound_of(compressor) + 4 * spread + 1e-6
    else:
        assert lost_share(compressor, x, 0) <= bound_of(compressor) + 1e-6


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (case("topk", value_dtype="fp32", ratio=0.03), "flat"),
        (case("group_topk", value_dtype="fp32", ratio=0.04, group_size=50), "flat"),
        (case("sign"), "one entry"),
    ],
    ids=str,
)
def test_some_gradient_loses_about_as_much_as_is_proved(case: Case, name: str) -> None:
    compressor, x = case.make(), gradients()[name]
    assert lost_share(compressor, x, 0) == pytest.approx(bound_of(compressor), rel=1e-6)


def test_where_nothing_is_proved_nothing_is_said() -> None:
    assert case("twobit").make().contraction_bound(LAYER) is None
    assert case("sign", mode="vote", error_feedback=False).make().contraction_bound(LAYER) is None
    assert case("threshold", unit="absolute", threshold=0.5).make().contraction_bound(LAYER) is None
    assert case("terngrad").make().contraction_bound(LAYER) is None
