"""Hylo: filters of convolutions, two bits for fully connected layers, and the options of both."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from bench.models.resnet import ResNet18
from collectives.allreduce import Allgather
from collectives.options import Incompatible, OptionError
from collectives.payloads import Codes, Dense, RowSparse
from compressors.hylo import Hylo
from compressors.layer import Layer, layers_of
from gradwire.exchange.reducer import reducer_for
from tests.testing.compressor_cases import alone, gradient, layers_of_shapes, on_ranks, reduce_once, step_at

CONV = layers_of_shapes((16, 4, 3, 3))[0]
LINEAR = layers_of_shapes((20, 30))[0]


def layer_of(module: nn.Module) -> Layer:
    return layers_of(module)[0]


def test_rates_of_resnet18() -> None:
    """3x3 convolutions from and to 64, 128, 256 and 512 channels, the first of a stage from half as many, and 1x1."""
    hylo = Hylo()
    with torch.device("meta"):
        layers = layers_of(ResNet18().build(10))
    rates = {layer.numel: hylo.rate(layer) for layer in layers if layer.kind == "conv" and not hylo.leaves_dense(layer)}
    assert rates == pytest.approx(
        {
            36_864: 0.667, 147_456: 0.333, 589_824: 0.167, 2_359_296: 0.083,
            73_728: 0.471, 294_912: 0.236, 1_179_648: 0.118, 32_768: 0.707, 131_072: 0.354,
        },
        abs=5e-4,
    )  # fmt: skip


def test_the_rate_falls_from_1_to_its_least() -> None:
    hylo = Hylo()
    assert hylo.rate(dataclasses.replace(CONV, numel=16_384)) == 1
    assert hylo.rate(dataclasses.replace(CONV, numel=10**9)) == 0.05
    rates = [hylo.rate(dataclasses.replace(CONV, numel=numel)) for numel in range(16_384, 10**7, 50_000)]
    assert rates == sorted(rates, reverse=True)


def test_kinds_of_layers() -> None:
    model = nn.ModuleDict({
        "conv": nn.Conv2d(8, 16, 3), "norm": nn.BatchNorm2d(16), "small": nn.Conv2d(1, 4, 3),
        "linear": nn.Linear(20, 30), "up": nn.ConvTranspose2d(8, 16, 3), "line": nn.Conv1d(8, 32, 3),
        "cube": nn.Conv3d(4, 8, 3), "depthwise": nn.Conv2d(16, 16, 3, groups=16), "rnn": nn.GRU(20, 10),
        "attention": nn.MultiheadAttention(20, 2), "table": nn.Embedding(50, 4), "small table": nn.Embedding(30, 4),
    })  # fmt: skip
    compressor, fc_like = Hylo(min_numel=150), Hylo(min_numel=150, fc_like=True)
    layers = layers_of(model)
    compressed = {layer.name: compressor.kind_for(layer) for layer in layers if not compressor.leaves_dense(layer)}
    assert compressed == {
        "conv.weight": RowSparse, "linear.weight": Codes, "up.weight": RowSparse, "line.weight": RowSparse,
        "cube.weight": RowSparse, "attention.in_proj_weight": Codes, "attention.out_proj.weight": Codes,
        "table.weight": RowSparse,
    }  # fmt: skip
    more = {layer.name for layer in layers if not fc_like.leaves_dense(layer)}
    assert more - compressed.keys() == {"rnn.weight_ih_l0", "rnn.weight_hh_l0"}


@pytest.mark.parametrize("importance", ["l1", "l2"])
def test_the_filters_that_are_sent_are_the_most_important_and_go_whole(importance: Any) -> None:
    reducer = reducer_for(Hylo(min_numel=100, importance=importance))
    x = gradient(CONV, 0, 0)
    k = 7  # (100 / 576)^0.5 = 0.4167 of 16 filters
    (sent,), _ = reduce_once(reducer, alone(), [CONV], [x], step_at(0))
    filters, sent = x.view(16, -1), sent.view(16, -1)
    kept = reducer.state_dict()["residuals"][0].view(16, -1)
    scores = filters.abs().sum(1) if importance == "l1" else filters.square().sum(1)
    chosen = sent.abs().sum(1) > 0
    assert int(chosen.sum()) == k
    assert float(scores[chosen].min()) >= float(scores[~chosen].max())
    assert torch.equal(sent[chosen], filters[chosen])
    assert torch.equal(kept[chosen], torch.zeros(k, 36))
    assert torch.equal(kept[~chosen], filters[~chosen])


@pytest.mark.parametrize(
    "module",
    [nn.ConvTranspose2d(6, 12, 3), nn.ConvTranspose1d(6, 12, 3, groups=2), nn.Conv1d(6, 12, 5), nn.Conv3d(3, 12, 2)],
    ids=lambda module: type(module).__name__,
)
def test_filters_lie_where_the_module_has_them(module: nn.Module) -> None:
    layer = layer_of(module)
    assert layer.filter_axis is not None
    x = gradient(layer, 0, 0)
    compressor = Hylo(min_numel=20, exponent=0.4)
    payload = compressor.encode(x, layer, step_at(0))
    assert payload.nbytes == payload.pack().numel() == compressor.expected_nbytes(layer)
    sent = payload.to_dense().view(layer.shape).movedim(layer.filter_axis, 0).flatten(1)
    original = x.view(layer.shape).movedim(layer.filter_axis, 0).flatten(1)
    chosen = sent.abs().sum(1) > 0
    assert 1 <= int(chosen.sum()) < layer.shape[layer.filter_axis]
    assert torch.equal(sent[chosen], original[chosen])
    assert float(original[chosen].abs().sum(1).min()) >= float(original[~chosen].abs().sum(1).max())


@pytest.mark.parametrize(("nonzero", "sent"), [(50, 35), (20, 20)])
def test_the_most_important_rows_of_an_embedding_are_sent_but_no_rows_of_zeros(nonzero: int, sent: int) -> None:
    table = layer_of(nn.Embedding(50, 4))
    compressor = Hylo(min_numel=100)  # (100 / 200)^0.5 = 0.707 of 50 rows
    x = gradient(table, 0, 0).view(50, 4)
    x[nonzero:] = 0
    payload = compressor.encode(x.view(-1), table, step_at(0))
    assert isinstance(payload, RowSparse)
    assert payload.nbytes == payload.pack().numel() == 24 + sent * 16 + 7
    scores = x.abs().sum(1)
    assert payload.rows.tolist() == scores.topk(sent).indices.sort().values.tolist()
    assert torch.equal(payload.values, x[payload.rows])
    assert compressor.expected_nbytes(table) is None


@pytest.mark.parametrize("options", [{"max_age": 2}, {"importance": "random"}])
def test_rows_of_zeros_take_no_row_s_place(options: dict[str, Any]) -> None:
    table = layer_of(nn.Embedding(200, 4))
    reducer = reducer_for(Hylo(min_numel=100, **options))  # 71 of 200 rows
    x = gradient(table, 0, 0).view(200, 4)
    x[5:] = 0
    for index in range(6):
        (update,), _ = reduce_once(reducer, alone(), [table], [x.view(-1)], step_at(index))
        assert update.view(200, 4)[:5].any(1).all()


def test_all_filters_are_sent_dense() -> None:
    compressor = Hylo(min_numel=500, exponent=0.0)
    payload = compressor.encode(gradient(CONV, 0, 0), CONV, step_at(0))
    assert isinstance(payload, Dense)
    assert torch.equal(payload.to_dense(), gradient(CONV, 0, 0))
    assert compressor.expected_nbytes(CONV) == payload.nbytes == 16 + 4 * 576


def test_a_filter_that_waited_long_enough_is_sent() -> None:
    x = gradient(CONV, 0, 0)
    x.view(16, -1)[3] *= 1e-6
    for max_age, expected in ((0, False), (5, True)):
        reducer, sent = reducer_for(Hylo(min_numel=100, max_age=max_age)), torch.zeros(16, 36)
        for index in range(12):
            (update,), _ = reduce_once(reducer, alone(), [CONV], [x], step_at(index))
            sent += update.view(16, -1).abs()
        assert bool(sent[3].any()) is expected


def test_of_filters_that_waited_too_long_the_longest_is_sent() -> None:
    """One of 16 filters per step, and a largest age of five: first the best ones are sent, then the oldest ones."""
    compressor = Hylo(min_numel=1, max_age=5, exponent=4, min_rate=0.01)
    reducer, sent = reducer_for(compressor), torch.zeros(16, 36)
    for index in range(5 + 16):
        (update,), bucket = reduce_once(reducer, alone(), [CONV], [gradient(CONV, 0, 0)], step_at(index))
        assert bucket.encoded[0].num_entries == 36
        sent += update.view(16, -1).abs()
    assert bool(sent.any(1).all())


def test_filters_that_lie_in_each_other_are_refused_where_filters_are_sent() -> None:
    model = nn.Sequential(nn.Conv2d(4, 16, 3), nn.Linear(3, 2))
    compressor = Hylo(min_numel=100)
    compressor.check_compatible(Allgather(), layers_of(model))
    mixed = layers_of(model.to(memory_format=torch.channels_last))
    with pytest.raises(Incompatible, match=r"the filters of 0\.weight are interleaved"):
        compressor.check_compatible(Allgather(), mixed)
    Hylo().check_compatible(Allgather(), mixed)  # it is sent whole


def test_taylor_weighs_by_the_weight() -> None:
    module = nn.Conv2d(4, 16, 3)
    with torch.no_grad():
        module.weight.zero_()
        module.weight[5] = 1.0
    payload = Hylo(min_numel=100, importance="taylor", min_rate=0.05, exponent=4).encode(
        torch.ones(576), layer_of(module), step_at(0)
    )
    assert payload.to_dense().view(16, -1).sum(1).nonzero().view(-1).tolist() == [5]
    with pytest.raises(ValueError, match="needs the weight of layer0"):
        Hylo(min_numel=100, importance="taylor").encode(torch.ones(576), CONV, step_at(0))


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("pow2", [False, True])
def test_fully_connected_layers(gamma: float, pow2: bool) -> None:
    reducer = reducer_for(Hylo(min_numel=100, gamma=gamma, pow2_threshold=pow2, decode="threshold"))
    a = torch.zeros(600)
    for index in range(5):
        g = gradient(LINEAR, index, 0)
        a = g + a
        (sent,), _ = reduce_once(reducer, alone(), [LINEAR], [g], step_at(index))
        kept = reducer.state_dict()["residuals"][0]
        t = float(sent.abs().max())
        mean = gamma * float(a.abs().double().mean())
        assert t == (2.0 ** torch.tensor(mean).log2().floor() if pow2 else pytest.approx(mean, rel=1e-6))
        assert torch.equal(sent, torch.where(a >= t, t, torch.where(a <= -t, -t, 0)))
        if pow2:
            assert torch.equal(sent + kept, a)
        else:
            torch.testing.assert_close(sent + kept, a, rtol=2e-7, atol=0)
        assert bool((kept[sent == 0].abs() < t).all())
        a = kept.clone()


def test_what_would_never_send_is_refused() -> None:
    with pytest.raises(OptionError, match=r"hylo: gamma=1.05"):
        Hylo(gamma=1.05)
    with pytest.raises(OptionError, match="gamma has no effect"):
        Hylo(threshold=0.5, gamma=0.7)
    with pytest.raises(OptionError, match="which shared_threshold=true does not allow"):
        Hylo(shared_threshold=True, decode="mean_selected")


def test_what_a_threshold_sends() -> None:
    x = gradient(LINEAR, 0, 0)
    plain = Hylo(min_numel=1, decode="threshold").encode(x, LINEAR, step_at(0)).to_dense()
    better = Hylo(min_numel=1).encode(x, LINEAR, step_at(0)).to_dense()  # the mean of what is selected
    assert float((x - better).norm()) < float((x - plain).norm())
    assert torch.equal(better != 0, plain != 0)
    assert Hylo(min_numel=1, decode="mean_selected").encode(torch.zeros(600), LINEAR, step_at(0)).nbytes == 24
    fixed = Hylo(min_numel=1, threshold=0.5).encode(x, LINEAR, step_at(0)).to_dense()  # as in MXNet
    assert torch.equal(fixed, torch.where(x >= 0.5, 0.5, torch.where(x <= -0.5, -0.5, 0)))
    for count in (100, 1000):  # the mean of a flat gradient rounds above it
        layer = dataclasses.replace(LINEAR, shape=(count // 10, 10), numel=count)
        flat = torch.full((count,), 0.1)
        assert torch.equal(Hylo(min_numel=1).encode(flat, layer, step_at(0)).to_dense(), flat)


def test_a_heavy_tail_does_not_wait_for_ever() -> None:
    """A threshold at the mean is far below the few large elements, so codes of its size cannot catch up with them."""
    x = torch.zeros(600)
    x[::100] = torch.tensor([1.0, -2.0, 3.0, -1.0, 2.0, -3.0])
    waiting = {}
    for decode in ("auto", "threshold"):
        reducer = reducer_for(Hylo(min_numel=100, decode=decode))
        for index in range(100):
            reduce_once(reducer, alone(), [LINEAR], [x.clone()], step_at(index))
        waiting[decode] = float(reducer.state_dict()["residuals"][0].norm() / x.norm())
    assert waiting["auto"] < 2
    assert waiting["threshold"] > 20


def test_a_shared_threshold_rides_a_ring_with_the_sum_of_what_each_rank_coded() -> None:
    def rank_of(transport: Any, collective: Any) -> tuple[torch.Tensor, torch.Tensor]:
        reducer = reducer_for(Hylo(min_numel=100, shared_threshold=True))
        g = gradient(LINEAR, 0, transport.rank)
        (update,), bucket = reduce_once(reducer, collective, [LINEAR], [g], step_at(0, transport.rank, 3))
        assert (bucket.encoded[0].payload, bucket.encoded[0].nbytes) == ("Dense", 16 + 600)
        return update, reducer.state_dict()["residuals"][0]

    results = on_ranks(3, "ring", rank_of)
    gradients = [gradient(LINEAR, 0, rank) for rank in range(3)]
    t = sum(float(g.abs().mean()) for g in gradients) / 3
    levels = sum(((g >= t).float() - (g <= -t).float()) for g in gradients)
    for update, _ in results:
        torch.testing.assert_close(update, levels * t / 3, rtol=1e-5, atol=1e-6)
        assert torch.equal(update, results[0][0])
    for (_, residual), g in zip(results, gradients, strict=True):
        torch.testing.assert_close(residual, g - ((g >= t).float() - (g <= -t).float()) * t, rtol=1e-5, atol=1e-5)
