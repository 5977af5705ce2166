"""Quantisers: unbiased if they claim it (by Monte Carlo, confidence stated), exact layouts, bits per element."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from collectives.kernels.library import serving
from collectives.kernels.loop import Parts
from collectives.options import OptionError
from collectives.payloads import Codes
from compressors.base import Compressor
from compressors.floats import Fp16
from compressors.kernels import quantisation
from compressors.quantizers import Int8, Natural, Qsgd, TernGrad
from compressors.sign import OneBit, Sign, TwoBit
from gradwire.exchange.reducer import reducer_for
from tests.testing.compressor_cases import alone, gradient, layers_of_shapes, on_ranks, reduce_once, step_at

LAYER = layers_of_shapes((40, 50))[0]

BOUNDED: list[Compressor] = [
    *(Qsgd(bits=2, block_numel=64), Qsgd(), Qsgd(norm="max", block_numel=100), Qsgd(bits=8)),
    *(Natural(), Natural(bits=4, block_numel=128)),
]
UNBIASED = [*BOUNDED, TernGrad(clip_sigmas=0), Int8(rounding="stochastic")]


def draws(compressor: Compressor, x: torch.Tensor, count: int) -> torch.Tensor:
    """Return the decoded values at `count` steps, fp64 [count, numel]."""
    rows = [compressor.encode(x, LAYER, step_at(index)).to_dense() for index in range(count)]
    return torch.stack(rows).double()


@pytest.mark.parametrize("compressor", UNBIASED, ids=str)
def test_the_mean_of_many_draws_is_the_gradient(compressor: Compressor) -> None:
    """20 values, 100 times each, 300 draws: every value's mean of 30 000 lies within 4.5 standard errors.

    For an unbiased quantiser, this holds for all 20 together with a probability of 99.98 %; the seeds are fixed.
    """
    values = torch.tensor([-2.0, -1.1, -0.7, -0.31, -0.2, -0.1, -0.05, -0.01, -0.003, 0.0,
                           0.002, 0.011, 0.06, 0.13, 0.25, 0.26, 0.4, 0.9, 1.5, 3.0])  # fmt: skip
    sample = draws(compressor, values.repeat(100), 300).view(-1, 20)
    standard_error = sample.std(0) / math.sqrt(len(sample))
    assert bool(((sample.mean(0) - values).abs() <= 4.5 * standard_error + 1e-6).all())


@pytest.mark.parametrize("name", ["levels", "powers", "ternary"])
def test_of_all_random_numbers_as_many_round_up_as_the_value_is_over(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All random numbers at distances of 1/65536 are used once, for a value 3/7 of the way to the next level."""

    def even(key: int, count: int, device: torch.device) -> torch.Tensor:
        return torch.arange(count) << 16 | 1 << 15

    share, numel = 3 / 7, 1 << 16
    packed, one = torch.empty(numel, dtype=torch.uint8), torch.ones(1)
    monkeypatch.setattr(quantisation, "shared_words", even)
    with serving("reference"):
        match name:
            case "levels":
                x = torch.full((numel,), (1 + share) / 127)
                quantisation.pack_levels(Parts([x]), one, numel, bits=8, multiplier=127, key=1, out=packed)
                lower, upper = 1, 2
            case "powers":
                x = torch.full((numel,), 0.25 * (1 + share))
                quantisation.pack_powers(Parts([x]), one, numel, bits=8, key=1, out=packed)
                lower, upper = 3, 2  # code j is 2^(1-j)
            case _:
                packed = quantisation.random_ternary(torch.full((numel,), share), 1.0, 1, quantisation.LEVELS)
                lower, upper = 0, 1
    assert int((packed == lower).sum() + (packed == upper).sum()) == numel
    assert abs(int((packed == upper).sum()) - share * numel) <= 0.51  # half a count, and the rounding of x


@pytest.mark.parametrize("compressor", BOUNDED, ids=str)
def test_the_variance_stays_within_its_bound(compressor: Any) -> None:
    for index in range(3):
        x = gradient(LAYER, index, 0)
        error = (draws(compressor, x, 60) - x).square().sum(1).mean()
        assert float(error) <= compressor.variance_bound * float(x.square().sum()) * 1.05


def test_ranks_and_steps_round_independently() -> None:
    x = gradient(LAYER, 0, 0)
    first = Qsgd().encode(x, LAYER, step_at(0, 0, 2)).to_dense()
    assert torch.equal(first, Qsgd().encode(x, LAYER, step_at(0, 0, 2)).to_dense())
    assert not torch.equal(first, Qsgd().encode(x, LAYER, step_at(0, 1, 2)).to_dense())
    assert not torch.equal(first, Qsgd().encode(x, LAYER, step_at(1, 0, 2)).to_dense())


@pytest.mark.parametrize(
    ("compressor", "bits", "extra"),
    [
        (Sign(), 1, 28), (OneBit(), 1, 24), (TwoBit(), 2, 28), (TernGrad(), 2, 28),
        (Qsgd(bits=4, block_numel=512), 4, 24 + 4 * 4), (Natural(), 8, 24 + 4 * 4), (Int8(), 8, 24 + 4 * 8),
    ],
    ids=lambda value: getattr(value, "component_name", str(value)),
)  # fmt: skip
def test_bits_per_element_and_nothing_but_scales_beside_them(compressor: Compressor, bits: int, extra: int) -> None:
    x = gradient(LAYER, 0, 0)
    assert compressor.encode(x, LAYER, step_at(0)).pack().numel() == 2000 * bits // 8 + extra
    assert compressor.expected_nbytes(LAYER) == 2000 * bits // 8 + extra


@pytest.mark.parametrize("magnitude", [1e-38, 1e-44, 1e30, 3e38])
@pytest.mark.parametrize("compressor", UNBIASED, ids=str)
def test_extreme_magnitudes_stay_finite(compressor: Compressor, magnitude: float) -> None:
    x = torch.linspace(-1, 1, LAYER.numel).mul(magnitude)
    sent = compressor.encode(x, LAYER, step_at(0)).to_dense()
    assert bool(torch.isfinite(sent).all())
    assert (
        float(sent.abs().max())
        <= 2.0 * magnitude * (5 if compressor.option_texts().get("norm") == "l2" else 1.001) + 1e-44
    )


def test_int8_rounds_to_the_nearest_level_of_each_block() -> None:
    x = gradient(LAYER, 0, 0)
    sent = Int8(block_numel=100).encode(x, LAYER, step_at(0)).to_dense()
    scales = x.view(-1, 100).abs().amax(1) / 127
    assert bool(((sent - x).view(-1, 100).abs() <= scales[:, None] * 0.5001).all())
    torch.testing.assert_close(sent.view(-1, 100).abs().amax(1), x.view(-1, 100).abs().amax(1))


def test_natural_sends_powers_of_two_next_to_the_value() -> None:
    x = gradient(LAYER, 0, 0)
    sent = Natural().encode(x, LAYER, step_at(0)).to_dense()
    mantissas, _ = torch.frexp(sent.abs())
    assert bool((mantissas == 0.5).all())
    ratio = sent / x
    assert bool(((ratio > 0.5) & (ratio < 2)).all())
    exact = torch.tensor([1.0, -0.5, 0.25, 0.0] * 500)
    assert torch.equal(Natural().encode(exact, LAYER, step_at(3)).to_dense(), exact)


def test_terngrad_values_and_clipping() -> None:
    x = gradient(LAYER, 0, 0)
    sent = TernGrad(clip_sigmas=2.5).encode(x, LAYER, step_at(0)).to_dense()
    limit = 2.5 * float(x.double().square().mean().sqrt())
    assert sorted(sent.unique().tolist()) == pytest.approx([-limit, 0, limit], rel=1e-5)
    flat = torch.full((2000,), 0.1)
    assert torch.equal(TernGrad(clip_sigmas=2.5).encode(flat, LAYER, step_at(0)).to_dense(), flat)
    with pytest.raises(OptionError, match="exclude each other"):
        TernGrad(shared_scale=True, error_feedback=True)


def test_a_shared_scale_is_the_largest_of_all_ranks_and_sums_are_integers() -> None:
    def rank_of(transport: Any, collective: Any) -> torch.Tensor:
        g = gradient(LAYER, 0, transport.rank) * (transport.rank + 1)
        reducer = reducer_for(TernGrad(shared_scale=True, clip_sigmas=0))
        (update,), bucket = reduce_once(reducer, collective, [LAYER], [g], step_at(0, transport.rank, 3))
        assert bucket.encoded[0].nbytes == 16 + 2000
        return update

    scale = max(float((gradient(LAYER, 0, rank) * (rank + 1)).abs().max()) for rank in range(3))
    updates = on_ranks(3, "ring", rank_of)
    sums = updates[0] * 3 / scale
    assert torch.equal(updates[0], updates[1])
    torch.testing.assert_close(sums, sums.round(), atol=1e-5, rtol=0)
    assert int(sums.round().abs().max()) <= 3


def test_error_feedback_shrinks_an_unbiased_quantiser_to_a_contraction() -> None:
    x = gradient(LAYER, 0, 0)
    plain, shrunk = (Qsgd(bits=2, error_feedback=ef).encode(x, LAYER, step_at(0)).to_dense() for ef in (False, True))
    torch.testing.assert_close(shrunk, plain / (1 + Qsgd(bits=2).variance_bound))


def test_sign() -> None:
    x = gradient(LAYER, 0, 0)
    payload = Sign().encode(x, LAYER, step_at(0))
    torch.testing.assert_close(payload.to_dense(), torch.where(x >= 0, 1.0, -1.0) * x.abs().mean())
    with pytest.raises(OptionError, match="needs error_feedback=false"):
        Sign(mode="vote")
    assert Sign(mode="vote", error_feedback=False).warnings()
    assert Sign(error_feedback=False).warnings()
    assert not Sign().warnings()


def test_a_vote_follows_the_majority_and_an_even_one_moves_nothing() -> None:
    layer = layers_of_shapes((2, 2))[0]
    votes = [[1.0, -9.0, 2.0, -0.1], [0.5, 3.0, -5.0, -2.0], [-7.0, 4.0, 1.0, -3.0], [-1.0, 1.0, 1.0, -3.0]]

    def rank_of(transport: Any, collective: Any) -> list[float]:
        reducer = reducer_for(Sign(mode="vote", error_feedback=False))
        g = torch.tensor(votes[transport.rank])
        (update,), _ = reduce_once(reducer, collective, [layer], [g], step_at(0, transport.rank, 4))
        return update.tolist()

    assert on_ranks(4, "allgather", rank_of) == [[0, 1, 1, -1]] * 4


def test_onebit_sends_the_two_means() -> None:
    x = torch.tensor([1.0, 3.0, -1.0, -2.0, -6.0, 0.0])
    layer = layers_of_shapes((6,))[0]
    assert OneBit().encode(x, layer, step_at(0)).to_dense().tolist() == pytest.approx([4 / 3, 4 / 3, -3, -3, -3, 4 / 3])
    positive = OneBit().encode(torch.ones(6), layer, step_at(0))
    assert positive.to_dense().tolist() == [1] * 6


def mxnet_two_bit(residual: list[float], gradient: list[float], threshold: float) -> tuple[bytes, list[float]]:
    """Return the compressed bytes and decoded values of Apache MXNet's kernel; the transcription changes `residual`."""
    positive, negative = (0xC0, 0x30, 0x0C, 0x03), (0x80, 0x20, 0x08, 0x02)
    packed, decoded = bytearray(-(-len(gradient) // 4)), []
    for i, g in enumerate(gradient):
        residual[i] += g
        value = 0.0
        if residual[i] >= threshold:
            packed[i // 4] |= positive[i % 4]
            value = threshold
        elif residual[i] <= -threshold:
            packed[i // 4] |= negative[i % 4]
            value = -threshold
        residual[i] -= value
        decoded.append(value)
    return bytes(packed), decoded


@pytest.mark.parametrize("numel", [1, 3, 4, 5, 15, 16, 17])
def test_twobit_is_mxnets_layout_and_arithmetic(numel: int) -> None:
    layer = layers_of_shapes((numel,))[0]
    reducer, collective = reducer_for(TwoBit(threshold=0.5)), alone()
    residual = [0.0] * numel
    for index in range(100):
        g = gradient(layer, index, 0).mul(64).round().div(64)  # exact sums in fp32, as in Python's floats
        kept = reducer.state_dict()["residuals"].get(0, torch.zeros(numel))
        packed, decoded = mxnet_two_bit(residual, g.tolist(), 0.5)
        payload = reducer.compressor.encode(g + kept, layer, step_at(index))
        assert isinstance(payload, Codes)
        assert bytes(payload.packed.tolist()) == packed
        (update,), _ = reduce_once(reducer, collective, [layer], [g], step_at(index))
        assert update.tolist() == decoded
        assert reducer.state_dict()["residuals"][0].tolist() == residual


def test_twobits_default_threshold_is_mxnets_for_the_mean_over_a_batch() -> None:
    layer, batch = layers_of_shapes((2,))[0], 32
    per_sample = torch.tensor([0.51, 0.49]) / batch
    summed = TwoBit(threshold=0.5).encode(per_sample * batch, layer, step_at(0)).to_dense()
    mean = TwoBit().encode(per_sample, layer, step_at(0)).to_dense()
    assert torch.equal(mean, summed / batch)


def test_fp16_leaves_room_for_the_sum() -> None:
    layer = layers_of_shapes((3,))[0]

    def rank_of(transport: Any, collective: Any) -> list[float]:
        g = torch.tensor([6e4, -6e4, 1e-6])
        (update,), _ = reduce_once(reducer_for(Fp16()), collective, [layer], [g], step_at(0, transport.rank, 3))
        return update.tolist()

    (result, *others) = on_ranks(3, "native", rank_of)
    assert others == [result, result]
    assert result[0] == -result[1] == pytest.approx(65504 / 3, rel=1e-2)
    assert result[2] == pytest.approx(1e-6, rel=0.05)  # dividing before rounding would lose it
