"""The measurement of a compressor times, counts and compares what training would send."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from bench.extensions.microbenchmarks.compressors_worker import WARMUP_PASSES, Encoding, recorded, synthetic
from bench.extensions.microbenchmarks.options import CompressorsConfig
from bench.launch.layer_plan import expected_bucket_nbytes
from compressors.layer import layers_of
from compressors.topk import TopK
from gradwire.ddp.buckets import buckets_of
from tests.testing.compressor_cases import LAYERS, NAMES, layers_of_shapes

CONFIG = CompressorsConfig(compressors="none", model="linear", dataset="digits", repeats=3)
NUMEL = sum(layer.numel for layer in LAYERS)


def measured(compressor: str, gradients: list[torch.Tensor], **changes: float) -> Encoding:
    encoding = Encoding(dataclasses.replace(CONFIG, **changes), compressor, LAYERS)  # type: ignore[arg-type]
    for gradient in gradients:
        encoding.measure(gradient)
    return encoding


def gradients(count: int = WARMUP_PASSES + 3) -> list[torch.Tensor]:
    return synthetic(LAYERS, count, seed=3)


@pytest.mark.parametrize("name", NAMES)
def test_every_compressor_can_be_measured(name: str) -> None:
    given = gradients()
    before = [gradient.clone() for gradient in given]
    row = measured(name, given).row()
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    assert row["encode_s"] > 0
    assert row["decode_s"] > 0
    assert 0 < row["packed_bytes"] < 1.1 * row["dense_bytes"]
    assert 0 <= row["effective_density"] <= 1
    assert all(math.isfinite(row[key]) for key in ("relative_error", "cosine", "contraction_seen"))
    if name not in ("randomk", "qsgd", "natural"):  # their bound holds in expectation
        assert row["contraction_proved"] is None or row["contraction_seen"] <= row["contraction_proved"]


def test_bytes_are_those_of_the_packed_messages() -> None:
    for name in ("topk", "sign", "powersgd"):
        encoding = measured(name, gradients())
        assert encoding.row()["packed_bytes"] == expected_bucket_nbytes(encoding._compressor, LAYERS)


def test_errors_without_a_residual_are_those_of_the_gradient() -> None:
    given = gradients(WARMUP_PASSES + 1)
    row = measured("topk:ratio=0.1,error_feedback=false,value_dtype=fp32", given).row()
    lost = kept = 0.0
    worst = 0.0
    for layer, x in zip(LAYERS, torch.split(given[-1], [layer.numel for layer in LAYERS]), strict=True):
        squares = x.double().square().sort(descending=True).values
        num_kept = max(1, int(0.1 * layer.numel + 0.5))
        kept += float(squares[:num_kept].sum())
        lost += float(squares[num_kept:].sum())
        worst = max(worst, float(squares[num_kept:].sum() / squares.sum()))
    assert row["relative_error"] == pytest.approx(math.sqrt(lost / (lost + kept)))
    assert row["cosine"] == pytest.approx(math.sqrt(kept / (lost + kept)))
    assert row["contraction_seen"] == pytest.approx(worst)


def test_errors_with_a_residual_are_those_of_the_compensated_gradient() -> None:
    given = gradients(WARMUP_PASSES + 1)
    row = measured("topk:ratio=0.1,value_dtype=fp32", given).row()
    residual = torch.zeros(NUMEL)
    for gradient in given:
        x = gradient + residual
        residual = x.clone()
        for part in torch.split(residual, [layer.numel for layer in LAYERS]):
            part[part.abs().topk(max(1, int(0.1 * len(part) + 0.5))).indices] = 0
    assert row["relative_error"] == pytest.approx(float(residual.norm() / x.norm()), rel=1e-5)


def test_layers_that_travel_whole_count_as_sent_but_not_as_contracted() -> None:
    row = measured("topk:ratio=0.5,skip=linear+conv+norm+bias", gradients()).row()
    assert (row["relative_error"], row["contraction_seen"], row["contraction_proved"]) == (0, 0, 0)
    assert row["effective_density"] == 1


def test_a_gradient_of_zeros_has_no_error() -> None:
    row = measured("topk", [torch.zeros(NUMEL)] * (WARMUP_PASSES + 1)).row()
    assert (row["relative_error"], row["contraction_seen"]) == (0, 0)


def test_buckets_are_laid_from_the_last_layer_and_closed_at_the_limit() -> None:
    layers = layers_of_shapes((100,), (10,), (100,), (10,))
    assert [[layer.id for layer in bucket] for bucket in buckets_of(layers, 400 / 2**20)] == [[3, 2], [1, 0]]
    assert [[layer.id for layer in bucket] for bucket in buckets_of(layers, math.inf)] == [[3, 2, 1, 0]]
    small = measured("group_topk:warmup_epochs=0", gradients(), bucket_mb=0.001)
    assert len(small._buckets) > 1
    assert len(measured("group_topk:preset=patent", gradients(), bucket_mb=0.001)._buckets) == 1


def test_synthetic_gradients_follow_their_seed_and_have_layers_of_many_scales() -> None:
    first, again, other = (synthetic(LAYERS, 2, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])
    scales = [float(part.std()) for part in torch.split(first[0], [layer.numel for layer in LAYERS])]
    assert max(scales) > 10 * min(scales)
    assert float(first[0].abs().max()) < 100


def test_recorded_gradients_come_from_training() -> None:
    torch.manual_seed(1)
    linear = torch.nn.Linear(3 * 32 * 32, 10)
    model = torch.nn.Sequential(torch.nn.Flatten(), linear)
    before = linear.weight.clone()
    layers = layers_of(model)
    first, second = recorded(CONFIG, model, layers, 2)
    assert first.shape == (3 * 32 * 32 * 10 + 10,)
    assert not torch.equal(first, second)
    assert not torch.equal(before, linear.weight)


def test_the_compressor_under_test_has_the_options_of_its_spec() -> None:
    encoding = Encoding(CONFIG, "topk:ratio=0.25", LAYERS)
    assert isinstance(encoding._compressor, TopK)
    assert encoding._compressor.ratio == 0.25
