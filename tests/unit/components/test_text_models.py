"""Models of text: a plain reference, no look at later bytes, sizes, presets, and the rows that have a gradient."""

from __future__ import annotations

import math
from typing import cast

import pytest
import torch
from torch import nn
from torch.nn import functional

from bench.core import spec
from bench.models.base import TextModel
from bench.models.gpt import Transformer
from bench.models.ngram_embedding import Ngrams
from collectives.options import Incompatible

SMALL = ("gpt:layers=2,width=12,heads=3,context=9", "ngram_embedding:order=3,rows=500,width=4,hidden=8")


def build(text: str, num_classes: int = 256) -> nn.Module:
    return cast(TextModel, spec.build("models", text)).build(num_classes)


def some_bytes(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


def plain_gpt(of: Transformer, x: torch.Tensor, layers: int, heads: int) -> torch.Tensor:
    """The decoder of GPT-2 in the words of its definition, for one text: bytes [t] to logits [t, 256]."""
    w = dict(of.named_parameters())

    def norm(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (h - h.mean(1, keepdim=True)) / (h.var(1, correction=0, keepdim=True) + 1e-5).sqrt() * weight

    h = w["token.weight"][x] + w["position.weight"][: len(x)]
    width = h.shape[1] // heads
    mask = torch.full((len(x), len(x)), -math.inf, dtype=h.dtype).triu(1)
    for block in (f"blocks.{layer}." for layer in range(layers)):
        q, k, v = (norm(h, w[block + "attention_norm.weight"]) @ w[block + "attention.qkv.weight"].T).chunk(3, 1)
        spans = [slice(head * width, (head + 1) * width) for head in range(heads)]
        parts = [(q[:, s] @ k[:, s].T / math.sqrt(width) + mask).softmax(1) @ v[:, s] for s in spans]
        h = h + torch.cat(parts, 1) @ w[block + "attention.out.weight"].T
        inner = norm(h, w[block + "mlp_norm.weight"]) @ w[block + "hidden.weight"].T
        h = h + inner * (1 + (inner / math.sqrt(2)).erf()) / 2 @ w[block + "out.weight"].T
    return norm(h, w["norm.weight"]) @ w["token.weight"].T


def gradients(network: nn.Module, logits: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    return list(torch.autograd.grad(loss, list(network.parameters())))


@pytest.mark.parametrize("length", [9, 5])
def test_gpt_computes_what_its_definition_says(length: int) -> None:
    torch.manual_seed(3)
    network = cast(Transformer, build(SMALL[0]).double())
    for parameter in network.parameters():  # larger weights, so that no part of the sum is lost
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.5)
    x, y = some_bytes(4, length), some_bytes(4, length, seed=2)
    expected = torch.stack([plain_gpt(network, text, layers=2, heads=3) for text in x])
    torch.testing.assert_close(network(x), expected, rtol=1e-9, atol=1e-9)
    for found, plain in zip(gradients(network, network(x), y), gradients(network, expected, y), strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-8, atol=1e-9)


def test_ngram_embedding_sums_a_row_for_each_length() -> None:
    torch.manual_seed(3)
    network = cast(Ngrams, build("ngram_embedding:order=3,rows=70000,width=4,hidden=8").double())
    x = some_bytes(2, 11)
    with torch.no_grad():
        logits = network(x)
        for text, row in zip(x.tolist(), logits, strict=True):
            for place in range(11):
                last, before, first = (text[place - back] if place >= back else 0 for back in range(3))
                key = last + 256 * before + 65536 * first
                mixed = (key * 0x9E3779B97F4A7C15) % 2**64
                hashed = ((mixed - 2**64 if mixed >= 2**63 else mixed) >> 20) % 70_000
                tables = [cast(nn.Embedding, table).weight for table in network.tables]
                total = tables[0][last] + tables[1][last + 256 * before] + tables[2][hashed]
                torch.testing.assert_close(row[place], network.out(functional.gelu(network.hidden(total))))


@pytest.mark.parametrize("text", SMALL)
def test_no_position_sees_a_later_byte(text: str) -> None:
    torch.manual_seed(3)
    network = build(text)
    x = some_bytes(3, 9)
    logits = network(x)
    for place in range(1, 9):
        changed = x.clone()
        changed[:, place:] = (changed[:, place:] + 1 + some_bytes(3, 9 - place, seed=place) % 255) % 256
        again = network(changed)
        torch.testing.assert_close(again[:, :place], logits[:, :place], rtol=0, atol=1e-6)
        assert not torch.allclose(again[:, place], logits[:, place], rtol=0, atol=1e-6)


def test_only_rows_of_ngrams_in_the_batch_have_a_gradient() -> None:
    network = cast(Ngrams, build("ngram_embedding"))
    x = some_bytes(4, 32) % 64 + 32
    functional.cross_entropy(network(x).flatten(0, 1), x.flatten()).backward()
    for length, table in enumerate(network.tables, start=1):
        gradient = cast(torch.Tensor, cast(nn.Embedding, table).weight.grad)
        padded = functional.pad(x, (length - 1, 0)).tolist()
        ngrams = {tuple(text[i : i + length]) for text in padded for i in range(32)}
        touched = int(gradient.any(1).sum())
        assert gradient.layout == torch.strided
        assert 0.97 * len(ngrams) <= touched <= len(ngrams)


def test_weights_are_drawn_as_for_gpt_2() -> None:
    torch.manual_seed(1)
    network = build("gpt:layers=8,width=64,heads=4")
    for name, parameter in network.named_parameters():
        if "norm" in name:
            assert parameter.unique().tolist() == [1.0]
        else:
            expected = 0.02 / 4 if name.endswith("out.weight") else 0.02
            assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.05)


def test_presets_change_defaults_and_nothing_that_is_given() -> None:
    nano = spec.build("models", "gpt:preset=nanogpt")
    assert (nano.layers, nano.width, nano.heads, nano.context) == (6, 384, 6, 256)
    assert str(nano) == "gpt:preset=nanogpt"
    other = spec.build("models", "gpt:preset=nanogpt,context=64")
    assert (other.layers, other.context) == (6, 64)
    assert str(other) == "gpt:context=64,preset=nanogpt"
    for model in (nano, other):
        assert spec.full_text(spec.build("models", spec.full_text(model))) == spec.full_text(model)
    with torch.device("meta"):
        network = nano.build(256)
    positions = 256 * 384
    assert round((sum(p.numel() for p in network.parameters()) - positions) / 1e6, 1) == 10.7


def test_dropout_is_for_training_only() -> None:
    torch.manual_seed(3)
    network = build("gpt:layers=1,width=12,heads=3,context=9,dropout=0.5")
    x = some_bytes(2, 9)
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            torch.zeros(2, 10, dtype=torch.int64),
            "^gpt has context=9, and the data set's context=10 is longer; give gpt:context=10, or give the data set "
            "context=9$",
        ),
        (torch.zeros(2, 3, 32, 32), "^gpt predicts the bytes of a text, which this data set is not; use --dataset std"),
    ],
)
def test_data_that_do_not_fit_are_refused(inputs: torch.Tensor, message: str) -> None:
    model = spec.build("models", SMALL[0])
    model.check_inputs(torch.zeros(2, 9, dtype=torch.int64))
    with pytest.raises(Incompatible, match=message):
        model.check_inputs(inputs)
