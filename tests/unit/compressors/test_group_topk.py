"""Group-TopK: the entries that each group keeps, the presets, and bytes computed by hand."""

from __future__ import annotations

import pytest
import torch

from bench.core.spec import build, full_text
from collectives.base import BoundCollective
from collectives.options import OptionError
from collectives.payloads import GroupSparse
from compressors.group_topk import GroupTopK
from compressors.layer import Layer
from gradwire.exchange.reducer import reducer_for
from tests.testing.compressor_cases import LAYERS, alone, gradient, layers_of_shapes, on_ranks, reduce_once, step_at
from tests.testing.memory_transport import MemoryTransport


def flat_layer(numel: int) -> Layer:
    return layers_of_shapes((numel,))[0]


def encode(compressor: GroupTopK, x: torch.Tensor) -> GroupSparse:
    payload = compressor.encode(x, flat_layer(x.numel()), step_at(0))
    assert isinstance(payload, GroupSparse)
    return payload


@pytest.mark.parametrize("numel", [1, 50, 256, 300, 1024, 1025, 5000])
@pytest.mark.parametrize(("group_size", "ratio"), [(256, 0.01), (1024, 0.01), (100, 0.07), (1, 0.01), (64, 0.5)])
def test_every_group_keeps_its_largest(numel: int, group_size: int, ratio: float) -> None:
    x = gradient(flat_layer(numel), 0, 0)
    sent = encode(GroupTopK(group_size=group_size, ratio=ratio, value_dtype="fp32"), x).to_dense()
    for start in range(0, numel, group_size):
        group, kept = x[start : start + group_size], sent[start : start + group_size]
        k = max(1, min(group.numel(), int(ratio * group.numel() + 0.5)))
        assert int((kept != 0).sum()) == k
        assert torch.equal(kept[kept != 0], group[kept != 0])
        assert float(kept.abs().sum()) == pytest.approx(float(group.abs().topk(k).values.sum()), rel=1e-6)


def test_kept_zeros_are_sent_but_a_gradient_of_zeros_is_a_header() -> None:
    x = torch.zeros(2048)
    assert GroupTopK().encode(x, flat_layer(2048), step_at(0)).nbytes == 24
    x[5] = 1.0
    payload = encode(GroupTopK(values="floats", group_size=1024), x)
    assert payload.num_entries == 20
    assert payload.nbytes == 24 + 20 * 2 + 25  # 20 indices of 10 bits


@pytest.mark.parametrize("world_size", [2, 4])
def test_around_a_ring_two_bits_take_no_more_bytes_than_floats(world_size: int) -> None:
    layer = flat_layer(20_000)

    def sent(values: str) -> int:
        def rank(transport: MemoryTransport, collective: BoundCollective) -> int:
            reducer = reducer_for(build("compressors", f"group_topk:values={values}"))
            x = gradient(layer, 0, transport.rank)
            reduce_once(reducer, collective, [layer], [x], step_at(0, transport.rank, world_size))
            return transport.traffic["gradient"].nbytes

        return sum(on_ranks(world_size, "ring", rank))

    assert sent("two_magnitudes") <= sent("floats")


def test_patent_preset() -> None:
    compressor = GroupTopK(preset="patent")
    reducer = reducer_for(compressor)
    assert (compressor.error_feedback, compressor.group_size, compressor.value_dtype) == (False, 256, "fp32")
    assert compressor.warmup_epochs == 0
    assert compressor.traits.one_bucket
    assert not GroupTopK().traits.one_bucket
    assert any("one bucket" in sentence for sentence in compressor.warnings())
    assert (compressor.traits.default_collectives, compressor.traits.default_lr_scaling) == (("ring",), "linear")
    gradients = [gradient(layer, 0, 0) for layer in LAYERS]
    updates, _ = reduce_once(reducer, alone(), LAYERS, gradients, step_at(0))
    assert reducer.residual_norms() == {}
    # it groups the flat gradient in model order
    assert torch.equal(torch.cat(updates), encode(reducer.compressor, torch.cat(gradients)).to_dense())


def test_what_is_given_wins_over_the_preset() -> None:
    with pytest.raises(OptionError, match="momentum_correction"):  # it needs a residual, which the patent does not have
        GroupTopK(preset="patent", momentum_correction=True)
    assert GroupTopK(preset="patent", momentum_correction=True, error_feedback=True).traits.owns_momentum
    chosen = GroupTopK.from_text({"preset": "patent", "group_size": "1024", "scope": "bucket"})
    assert not chosen.traits.one_bucket
    assert (chosen.group_size, chosen.scope, chosen.value_dtype) == (1024, "bucket", "fp32")
    assert GroupTopK(scope="model", group_size=512).traits.one_bucket
    with pytest.raises(OptionError, match="preset=fast is not possible"):
        GroupTopK.from_text({"preset": "fast"})


@pytest.mark.parametrize(
    ("given", "short"),
    [
        ("group_topk", "group_topk"),
        ("group_topk:preset=patent", "group_topk:preset=patent"),
        ("group_topk:preset=patent,group_size=256,ratio=0.05", "group_topk:preset=patent,ratio=0.05"),
        ("group_topk:preset=patent,group_size=1024", "group_topk:group_size=1024,preset=patent"),
        ("group_topk:preset=recommended,scope=model", "group_topk:preset=recommended,scope=model"),
        ("group_topk:scope=model,group_size=512", "group_topk:group_size=512,scope=model"),
        ("group_topk:preset=patent,values=int8", "group_topk:preset=patent,value_dtype=fp16,values=int8"),
        ("group_topk:value_dtype=bf16,preset=none", "group_topk:value_dtype=bf16,values=floats"),
    ],
)
def test_options_survive_being_written_out(given: str, short: str) -> None:
    compressor = build("compressors", given)
    assert str(compressor) == short
    for text in (short, full_text(compressor)):
        assert full_text(build("compressors", text)) == full_text(compressor)


def test_values_are_floats_with_a_preset_or_dtype_of_floats() -> None:
    recommended, plain = GroupTopK(preset="recommended"), GroupTopK()
    assert recommended.option_texts() == {**plain.option_texts(), "preset": "recommended"}
    assert recommended.values == plain.values == "two_magnitudes"
    assert GroupTopK(value_dtype="fp16").values == GroupTopK(preset="patent").values == "floats"
    assert GroupTopK(value_dtype="fp16", preset="recommended").values == "floats"
    coded = GroupTopK(preset="patent", values="int8")
    assert (coded.values, coded.group_size) == ("int8", 256)
    with pytest.raises(OptionError, match="value_dtype=bf16 has no use"):
        GroupTopK(value_dtype="bf16", values="two_magnitudes")


def test_a_ratio_below_one_entry_per_group_is_pointed_out() -> None:
    (sentence,) = GroupTopK(ratio=0.0001).warnings()
    assert "use group_size=10000 or more" in sentence
    assert GroupTopK().warnings() == []
    assert encode(GroupTopK(ratio=0.0001, values="floats"), torch.ones(9000)).num_entries == 3
