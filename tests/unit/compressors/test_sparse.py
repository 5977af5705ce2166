"""Density, warm-up, momentum correction and the per-layer policy, common to all sparsifiers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from collectives.base import Collective
from collectives.options import OptionError, build
from collectives.payloads import Dense, Sparse
from compressors.algc import Algc
from compressors.base import Compressor
from compressors.group_topk import GroupTopK
from compressors.hylo import Hylo
from compressors.layer import Step
from compressors.randomk import RandomK
from compressors.sparse import Sparsifier
from compressors.topk import AdaptiveTopK, Dgc, Threshold, TopK
from gradwire.exchange.reducer import reducer_for
from tests.testing.compressor_cases import LAYERS, alone, gradient, layers_of_shapes, on_ranks, reduce_once, step_at
from tests.testing.memory_transport import MemoryTransport


def step_in(epoch: int, *, index: int = 10, warmup: bool = True) -> Step:
    return Step(index=index, epoch=epoch, rank=0, world_size=1, seed=0, warmup=warmup)


@pytest.mark.parametrize("made", [TopK(ratio=0.01), Algc(ratio=0.01, min_numel=0)], ids=str)
def test_the_density_falls_to_the_ratio_over_the_epochs(made: Sparsifier) -> None:
    densities = [made.density_for(LAYERS[0], step_in(epoch)) for epoch in range(6)]
    assert densities == [0.25, 0.0625, 0.015625, 0.01, 0.01, 0.01]
    assert made.density_for(LAYERS[0], step_in(0, warmup=False)) == 0.01
    assert TopK(ratio=0.01, warmup_epochs=1).density_for(LAYERS[0], step_in(1)) == 0.01
    assert TopK(ratio=0.01, warmup_epochs=0).density_for(LAYERS[0], step_in(0)) == 0.01
    assert TopK(ratio=0.5).density_for(LAYERS[0], step_in(0)) == 0.5


@pytest.mark.parametrize("make", [TopK, GroupTopK])
def test_warm_up_sends_what_the_density_says(make: type[TopK] | type[GroupTopK]) -> None:
    layer = layers_of_shapes((64, 64))[0]
    payload = make(ratio=0.01).encode(gradient(layer, 0, 0), layer, step_in(0))
    assert payload.num_entries == 1024


@pytest.mark.parametrize("make", [TopK, GroupTopK, Threshold, Dgc])
def test_the_first_steps_may_be_dense(make: Any) -> None:
    compressor = make(dense_steps=2)
    reducer = reducer_for(compressor)
    assert Dense in compressor.traits.emits
    for index, expected in enumerate([{"Dense"}, {"Dense"}, {compressor.sends.__name__}]):
        _, bucket = reduce_once(
            reducer, alone(), LAYERS, [gradient(layer, index, 0) for layer in LAYERS], step_at(index)
        )
        assert {encoded.payload for encoded in bucket.encoded} == expected


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction_that_sends_everything_is_plain_momentum(nesterov: bool) -> None:
    """Without a remainder there is nothing to correct, and dense steps do not mask the entries that they send."""
    layers = layers_of_shapes((4, 5), (7,))
    reducer = reducer_for(
        TopK(momentum_correction=True, dense_steps=100, value_dtype="fp32", skip=("bias",)),
        momentum=0.9,
        nesterov=nesterov,
    )
    parameters = [nn.Parameter(torch.zeros(layer.numel)) for layer in layers]
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9, nesterov=nesterov)
    moved = [torch.zeros(layer.numel) for layer in layers]
    for index in range(5):
        gradients = [gradient(layer, index, 0) for layer in layers]
        updates, _ = reduce_once(reducer, alone(), layers, gradients, step_at(index))
        for parameter, g in zip(parameters, gradients, strict=True):
            parameter.grad = g.clone()
        optimizer.step()
        for total, update, parameter in zip(moved, updates, parameters, strict=True):
            total -= update
            torch.testing.assert_close(total, parameter.data, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction_against_a_transcription_of_its_definition(nesterov: bool) -> None:
    layer = layers_of_shapes((50, 10))[0]
    reducer = reducer_for(
        TopK(ratio=0.1, value_dtype="fp32", momentum_correction=True), momentum=0.9, nesterov=nesterov
    )
    velocity, accumulated = torch.zeros(500), torch.zeros(500)
    for index in range(6):
        g = gradient(layer, index, 0)
        if nesterov:
            velocity = 0.9 * (velocity + g)
            accumulated = accumulated + velocity + g
        else:
            velocity = 0.9 * velocity + g
            accumulated = accumulated + velocity
        chosen = accumulated.abs().topk(50).indices
        expected = torch.zeros(500).index_copy_(0, chosen, accumulated[chosen])
        (update,), _ = reduce_once(reducer, alone(), [layer], [g], step_at(index))
        torch.testing.assert_close(update, expected, rtol=1e-5, atol=1e-5)
        accumulated[chosen] = 0
        velocity[chosen] = 0


def test_momentum_correction_needs_a_residual() -> None:
    with pytest.raises(OptionError, match="topk: momentum_correction=true needs error_feedback=true"):
        TopK(momentum_correction=True, error_feedback=False)
    assert TopK(momentum_correction=True).traits.owns_momentum
    assert Dgc().traits.owns_momentum
    assert not TopK().traits.owns_momentum


def test_policy() -> None:
    compressor = TopK(min_numel=400, skip=("norm",), dense_ends=True)
    dense = [layer.name for layer in LAYERS if compressor.leaves_dense(layer)]
    assert dense == [layer.name for layer in LAYERS if layer.numel <= 400 or layer.position in (0, 1)]
    assert compressor.traits.emits == {Sparse, Dense}
    assert TopK().traits.emits == {Sparse}
    with pytest.raises(OptionError, match="skip"):
        TopK(skip=("batchnorm",))  # type: ignore[arg-type]


def test_values_beyond_fp16_saturate_and_the_rest_waits() -> None:
    layer = layers_of_shapes((2, 2))[0]
    reducer = reducer_for(TopK(ratio=0.25))
    (update,), _ = reduce_once(reducer, alone(), [layer], [torch.tensor([0.0, 1e5, 1.0, 0.0])], step_at(0))
    assert update.tolist() == [0, 65504, 0, 0]
    assert reducer.state_dict()["residuals"][0].tolist() == [0, 1e5 - 65504, 1, 0]


@pytest.mark.parametrize(
    "made",
    [
        TopK(ratio=0.5),
        GroupTopK(ratio=0.5, group_size=2, value_dtype="fp16"),
        Hylo(min_numel=1, exponent=1.0, value_dtype="fp16"),
    ],
    ids=lambda made: made.component_name,
)
def test_what_a_sum_in_fp16_cannot_hold_waits_in_the_residual(made: Compressor) -> None:
    """The sum of four times 30000 saturates at 65504 on the way, and no rank would notice."""
    layer = layers_of_shapes((2, 1, 1, 1))[0]

    def rank_of(transport: MemoryTransport, collective: Collective) -> torch.Tensor:
        reducer, g = reducer_for(made), torch.tensor([30000.0, 0.0])
        total = torch.zeros(2)
        for index in range(2):
            (update,), _ = reduce_once(reducer, collective, [layer], [g], step_at(index, transport.rank, 4))
            total += update
        return torch.stack([total, reducer.state_dict()["residuals"][0]])

    for arrived, waits in on_ranks(4, "ring", rank_of):
        assert (arrived + waits).tolist() == [60000.0, 0.0]


@pytest.mark.parametrize("unit", ["absolute", "max", "rms"])
def test_threshold(unit: Any) -> None:
    layer = layers_of_shapes((30, 30))[0]
    x = gradient(layer, 0, 0)
    level = {"absolute": 1.0, "max": float(x.abs().max()), "rms": float(x.square().mean().sqrt())}[unit] * 0.7
    payload = Threshold(threshold=0.7, unit=unit, value_dtype="fp32").encode(x, layer, step_at(0))
    assert torch.equal(payload.to_dense(), torch.where(x.abs() >= level, x, 0))
    assert 0 < payload.num_entries < 900


def test_a_threshold_sees_negative_entries_and_may_send_nothing() -> None:
    layer = layers_of_shapes((2, 2))[0]
    x = torch.tensor([-3.0, 0.1, 0.2, 0.0])
    compressor = Threshold(threshold=1.0, unit="absolute")
    assert compressor.encode(x, layer, step_at(0)).to_dense().tolist() == [-3, 0, 0, 0]
    assert compressor.encode(x / 100, layer, step_at(0)).nbytes == 16
    flat = Threshold(threshold=3.0, unit="rms").encode(torch.full((4,), 0.1), layer, step_at(0))
    assert flat.num_entries == 4


def test_dgc_sends_at_most_k_and_nearly_as_many_and_the_largest_where_a_sample_would_not_tell() -> None:
    layer = layers_of_shapes((400, 500))[0]
    compressor = Dgc(ratio=0.01, momentum_correction=False)
    for index in range(8):
        x = gradient(layer, index, 0)
        kept = compressor.encode(x, layer, step_at(index)).to_dense().abs()
        assert 0.8 * 2000 <= int((kept > 0).sum()) <= 2000
        assert int((x.abs() > kept[kept > 0].min() * 1.001).sum()) <= 2000 * 1.01
    # A sample of one percent would contain nine of the 999 largest entries, one too few to find the threshold.
    (layer,) = layers_of_shapes((999, 100))
    x = gradient(layer, 0, 0)
    payload = Dgc(ratio=0.01, momentum_correction=False, value_dtype="fp32").encode(x, layer, step_at(0))
    largest = x.abs().topk(999).indices
    assert payload.num_entries == 999
    assert torch.equal(payload.to_dense(), torch.zeros_like(x).index_copy(0, largest, x[largest]))


def test_dgc_clips_its_own_gradient_to_the_share_of_one_rank() -> None:
    (layer,) = layers_of_shapes((10, 10))
    g = gradient(layer, 0, 0)
    clipped, small = g * (2.0 / g.norm()), g / g.norm()
    for given, wanted in ((g, clipped), (small, small)):
        reducer = reducer_for(Dgc(ratio=1.0, clip_norm=2.0, value_dtype="fp32", momentum_correction=False))
        (update,), _ = reduce_once(reducer, alone(), [layer], [given], step_at(0))
        assert torch.equal(update, small) if given is small else torch.allclose(update, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("made", [TopK, Dgc, AdaptiveTopK])
def test_what_is_zero_on_the_wire_is_not_sent(made: Any) -> None:
    layer = layers_of_shapes((40, 50))[0]
    x = torch.zeros(2000)
    x[[3, 700, 1999]] = torch.tensor([1.0, -2.0, 0.5])
    x[900:1100] = 1e-10  # zero in fp16
    payload = made(ratio=0.5).encode(x, layer, step_at(0))
    assert payload.num_entries == 3
    assert torch.equal(payload.to_dense(), torch.where(x.abs() > 1e-5, x, 0))


@pytest.mark.parametrize("made", [TopK, GroupTopK, RandomK])
def test_velocity_goes_on_where_the_value_became_zero_on_the_wire(made: Any) -> None:
    layer = layers_of_shapes((2, 2))[0]
    reducer = reducer_for(made(ratio=1.0, momentum_correction=True, value_dtype="fp16"), momentum=0.5)
    g = torch.tensor([1.0, 1e-10, -2.0, 1e-10])
    for index in range(2):
        reduce_once(reducer, alone(), [layer], [g], step_at(index))
    state = reducer.state_dict()
    assert state["velocities"][0].tolist() == pytest.approx([0, 1.5e-10, 0, 1.5e-10])
    assert state["residuals"][0].tolist() == pytest.approx([0, 2.5e-10, 0, 2.5e-10])


@pytest.mark.parametrize("name", ["topk", "group_topk", "dgc", "qsparse", "randomk", "adaptive_topk", "algc"])
def test_a_warm_up_counted_in_steps_needs_no_epochs(name: str) -> None:
    made = build("compressors", Sparsifier, f"{name}:ratio=0.01,warmup_steps=8")
    step = Step(index=0, epoch=None, rank=0, world_size=1, seed=0)
    densities = [made.density_for(LAYERS[0], dataclasses.replace(step, index=index)) for index in range(10)]
    assert densities == [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.01, 0.01, 0.01, 0.01]
    assert made.density_for(LAYERS[0], dataclasses.replace(step, index=1, epoch=99)) == 0.25
    assert made.density_for(LAYERS[0], dataclasses.replace(step, warmup=False)) == 0.01
    assert made.traits.denser_epochs == 0  # so no hook misses set_epoch
    assert build("compressors", Sparsifier, f"{name}:warmup_steps=8,warmup_epochs=0") == type(made)(warmup_steps=8)
    with pytest.raises(OptionError, match="warmup_steps=8 and warmup_epochs=4 are two warm-ups of the density"):
        build("compressors", Sparsifier, f"{name}:warmup_steps=8,warmup_epochs=4")
    assert build("compressors", Sparsifier, f"{name}:warmup_epochs=4") == build("compressors", Sparsifier, name)
