"""ALGC: the density window at every step, the budget of all layers, warm-up, flushing, and layers worth compressing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from collectives.options import MOST, OptionError
from collectives.payloads import Dense, Sparse
from compressors.algc import Algc
from compressors.layer import Layer, Step, layers_of
from gradwire.exchange.reducer import Reducer, reducer_for
from tests.testing.compressor_cases import alone, gradient, layers_of_shapes, reduce_once, step_at

LAYERS = layers_of_shapes((100, 100), (300, 100), (50,))


def make(**options: object) -> Algc:
    return Algc(**{"min_numel": 1000, "value_dtype": "fp32", **options})  # type: ignore[arg-type]


def reducer_of(**options: object) -> Reducer:
    return reducer_for(make(**options))


def wanted_density(reducer: Reducer, layer: Layer, step: Step) -> float | None:
    return reducer.compressor.density_for(layer, dataclasses.replace(step, memory=reducer.memory))


def noise(layer: Layer, index: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * index + layer.id)
    return torch.randn(layer.numel, generator=generator) * scale


@pytest.mark.parametrize("ratio", [0.01, 0.001])
@pytest.mark.parametrize("error_feedback", [True, False])
def test_the_density_never_leaves_its_window(ratio: float, error_feedback: bool) -> None:
    """This includes sudden changes of the gradient's scale by a factor of 100."""
    reducer, collective = reducer_of(ratio=ratio, error_feedback=error_feedback), alone()
    for index in range(120):
        scale = 100.0 if 40 <= index < 80 else 1.0
        wanted = {layer.id: wanted_density(reducer, layer, step_at(index)) for layer in LAYERS[:2]}
        gradients = [noise(layer, index, scale) for layer in LAYERS]
        _, bucket = reduce_once(reducer, collective, LAYERS, gradients, step_at(index))
        for encoded in bucket.encoded:
            if encoded.payload == "Sparse":
                density = encoded.num_entries / encoded.layer.numel
                assert wanted[encoded.layer.id] / 2 <= density <= 2 * wanted[encoded.layer.id]
        for control in reducer.state_dict()["memory"]["control"].values():
            assert 0 < float(control[0]) < float("inf")


def test_attention_and_embeddings_count_by_their_size() -> None:
    model = nn.ModuleDict({
        "table": nn.Embedding(90, 16), "small table": nn.Embedding(9, 16), "attention": nn.MultiheadAttention(16, 2),
    })  # fmt: skip
    layers = layers_of(model)
    assert {layer.name for layer in layers if not make(min_numel=500).leaves_dense(layer)} == {
        "table.weight", "attention.in_proj_weight",
    }  # fmt: skip


def test_of_rows_that_are_not_zero_all_are_sent_if_they_are_fewer_than_the_density() -> None:
    (table,) = layers_of(nn.Embedding(1000, 16))
    reducer = reducer_of(ratio=0.01)
    for index in range(3):
        x = torch.zeros(1000, 16)
        x[7 * index] = 1 + torch.arange(16)
        (update,), bucket = reduce_once(reducer, alone(), [table], [x.view(-1)], step_at(index))
        assert torch.equal(update.view(1000, 16), x)
        assert bucket.encoded[0].num_entries == 16


def test_a_steady_stream_is_tracked_without_the_exact_threshold() -> None:
    """The exact threshold would send exactly one percent of the entries in every step."""
    layer = layers_of_shapes((400, 100))[0]
    reducer, collective, sent = reducer_of(refresh=10**6), alone(), []
    for index in range(160):
        _, bucket = reduce_once(reducer, collective, [layer], [noise(layer, index)], step_at(index))
        sent.append(bucket.encoded[0].num_entries)
    assert sent[0] == 400
    assert sent.count(400) < 40
    assert sum(sent[-60:]) / 60 == pytest.approx(400, rel=0.1)


def test_the_budget_is_shared_by_root_mean_square() -> None:
    reducer, collective = reducer_of(ratio=0.02), alone()
    for index in range(6):
        gradients = [noise(LAYERS[0], index, 3.0), noise(LAYERS[1], index), noise(LAYERS[2], index)]
        reduce_once(reducer, collective, LAYERS, gradients, step_at(index))
    densities = [wanted_density(reducer, layer, step_at(6)) for layer in LAYERS[:2]]
    numels = [layer.numel for layer in LAYERS[:2]]
    assert densities[0] > densities[1]
    assert sum(d * n for d, n in zip(densities, numels, strict=True)) == pytest.approx(0.02 * sum(numels))


def test_densities_stay_between_their_bounds() -> None:
    reducer, collective = reducer_of(ratio=0.01, min_ratio=0.005, max_ratio=0.012), alone()
    gradients = [noise(LAYERS[0], 0, 100.0), noise(LAYERS[1], 0), noise(LAYERS[2], 0)]
    reduce_once(reducer, collective, LAYERS, gradients, step_at(0))
    assert wanted_density(reducer, LAYERS[0], step_at(1)) == 0.012
    assert wanted_density(reducer, LAYERS[1], step_at(1)) == 0.005
    warming = dataclasses.replace(step_at(1), epoch=0)
    assert wanted_density(reducer, LAYERS[0], warming) == 0.25
    assert wanted_density(reducer, LAYERS[1], warming) < 0.25


def test_small_layers_travel_as_they_are() -> None:
    reducer = reducer_of()
    gradients = [noise(layer, 0) for layer in LAYERS]
    updates, bucket = reduce_once(reducer, alone(), LAYERS, gradients, step_at(0))
    assert {encoded.layer.id: encoded.payload for encoded in bucket.encoded} == {0: "Sparse", 1: "Sparse", 2: "Dense"}
    assert torch.equal(updates[2], gradients[2])
    assert reducer.compressor.traits.emits == {Sparse, Dense}
    for options in ({"min_numel": 10**9}, {"ratio": 1.0, "min_ratio": 1.0, "max_ratio": 1.0}):
        updates, _ = reduce_once(reducer_of(**options), alone(), LAYERS, gradients, step_at(0))
        assert all(torch.equal(update, g) for update, g in zip(updates, gradients, strict=True))


def test_a_size_of_its_own_for_some_layers() -> None:
    layers = [dataclasses.replace(LAYERS[0], name=name) for name in ("conv1.weight", "conv10.weight", "fc.weight")]
    numel = layers[0].numel
    algc = make(min_numel=numel, min_numel_of=f"conv1:0+conv10:{numel}")
    assert [algc.leaves_dense(layer) for layer in layers] == [False, True, True]
    assert algc.option_texts()["min_numel_of"] == f"conv1:0+conv10:{numel}"
    assert Dense in make(min_numel=0, min_numel_of="fc:10").traits.emits
    for wrong in ("conv1", "conv1:x", ":5", "conv1:-1"):
        with pytest.raises(OptionError, match="write the prefix of a name and a size"):
            make(min_numel_of=wrong)


def test_mostly_zeros_ties_and_single_entries() -> None:
    layer = LAYERS[0]
    sparse = torch.zeros(layer.numel)
    sparse[[5, 70, 9000]] = torch.tensor([1.0, -2.0, 0.5])
    assert make().encode(sparse, layer, step_at(0)).num_entries == 3
    flat = make().encode(torch.full((layer.numel,), 0.1), layer, step_at(0))
    assert flat.num_entries == 2 * 100 + 1  # the upper end of the window
    lone = torch.zeros(layer.numel)
    lone[3] = 1e-30
    assert make().encode(lone, layer, step_at(0)).num_entries == 1


def test_zeros_leave_the_controller_alone() -> None:
    reducer, collective = reducer_of(), alone()
    reduce_once(reducer, collective, LAYERS, [noise(layer, 0) for layer in LAYERS], step_at(0))
    before = reducer.state_dict()["memory"]["control"]
    fresh = reducer_of(error_feedback=False)
    fresh.load_state_dict({**reducer.state_dict(), "residuals": {}})
    reduce_once(fresh, collective, LAYERS, [torch.zeros(layer.numel) for layer in LAYERS], step_at(1))
    after = fresh.state_dict()["memory"]["control"]
    assert all(torch.equal(before[i], after[i]) for i in before)


def test_a_flush_sends_what_waited() -> None:
    reducer, collective = reducer_of(flush_every=4), alone()
    given = torch.zeros(LAYERS[0].numel, dtype=torch.float64)
    sent = given.clone()
    for index in range(8):
        g = gradient(LAYERS[0], index, 0)
        (update,), bucket = reduce_once(reducer, collective, LAYERS[:1], [g], step_at(index))
        given, sent = given + g, sent + update
        assert bucket.encoded[0].payload == ("Dense" if index in (3, 7) else "Sparse")
        if index in (3, 7):
            assert not reducer.state_dict()["residuals"][0].any()
            torch.testing.assert_close(sent, given, rtol=0, atol=1e-4)


def test_the_size_that_is_worth_compressing_follows_from_the_link() -> None:
    slow, fast = Algc(link_bps=100e6), Algc(link_bps=10e9)
    # 1e8 bit/s: 4 - 0.01 * 6 bytes saved at 12.5 MB/s, less 1 / 3e8 s per element
    assert slow.min_numel == pytest.approx(3e-4 / ((4 - 0.06) / 12.5e6 - 1 / 3e8), abs=1)
    assert fast.min_numel == MOST
    assert Algc().min_numel == 8192
    for given in (slow, fast):
        assert Algc.from_text(given.option_texts()).min_numel == given.min_numel
    with pytest.raises(OptionError, match="link_bps chooses min_numel itself"):
        Algc(link_bps=100e6, min_numel=5)


def test_a_least_density_above_the_one_asked_for_is_pointed_out() -> None:
    (sentence,) = Algc(ratio=1e-4).warnings()
    assert "at least min_ratio=0.001 of every layer" in sentence
    assert Algc().warnings() == []
    with pytest.raises(OptionError, match="min_ratio must be at most max_ratio"):
        Algc(min_ratio=0.5, max_ratio=0.01)
