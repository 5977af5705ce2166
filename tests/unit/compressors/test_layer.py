"""The description of a model for compressors: one layer per parameter, classified by its module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compressors.layer import layers_of, sparse_gradients


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.rnn = nn.LSTM(5, 5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embedding.weight


def test_kinds_axes_and_positions() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose1d(8, 4, 3), nn.LayerNorm(4), nn.Linear(4, 2)
    )
    assert layers_of(nn.RMSNorm(4))[0].kind == "norm"
    assert layers_of(nn.EmbeddingBag(7, 5))[0].kind == "embedding"
    assert [layer.position for layer in layers_of(nn.Linear(2, 2))] == [0, 0]  # one module lies at the input
    assert layers_of(nn.Identity()) == []
    layers = layers_of(model)
    assert [layer.kind for layer in layers] == [
        *("conv", "bias", "norm", "norm", "conv", "bias", "norm", "norm", "linear", "bias")
    ]
    assert [layer.filter_axis for layer in layers] == [0, None, None, None, 1, None, None, None, None, None]
    assert [layer.id for layer in layers] == list(range(10))
    assert [layer.position for layer in layers] == [0, 0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1, 1]
    assert layers[0].shape == (8, 3, 3, 3)
    assert layers[0].numel == 216
    assert layers[0].weight is model[0].weight


def test_shared_parameters_count_once_and_frozen_ones_not_at_all() -> None:
    layers = layers_of(Tied())
    names = [layer.name for layer in layers]
    assert names == [
        "embedding.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.bias_ih_l0", "rnn.bias_hh_l0", "head.bias",
    ]  # fmt: skip
    assert [layer.kind for layer in layers] == ["embedding", "other", "other", "bias", "bias", "bias"]
    assert [layer.filter_axis for layer in layers] == [0, None, None, None, None, None]
    assert layers[0].position == 0
    assert layers[-1].position == 1


class LlamaAttention(nn.Module):
    """Stands for another library's attention: a matrix of its own, a projection, a norm, a table, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Parameter(torch.zeros(4, 4))
        self.scale = nn.Parameter(torch.zeros(4))
        self.parts = nn.ModuleDict({"out": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
        self.distances = nn.Embedding(9, 2)
        self.local = nn.Conv2d(4, 4, 3, bias=False)


class LlamaFlashAttention2(LlamaAttention): ...


@pytest.mark.parametrize("attention", [LlamaAttention, LlamaFlashAttention2])
def test_matrices_in_attention_are_attention(attention: type[nn.Module]) -> None:
    model = nn.ModuleDict({"own": attention(), "mlp": nn.Linear(4, 4)})
    assert {layer.name: layer.kind for layer in layers_of(model)} == {
        "own.mixed": "attention", "own.scale": "other", "own.parts.out.weight": "attention",
        "own.parts.out.bias": "bias", "own.parts.norm.weight": "norm", "own.parts.norm.bias": "norm",
        "own.distances.weight": "embedding", "own.local.weight": "conv", "mlp.weight": "linear", "mlp.bias": "bias",
    }  # fmt: skip


def test_a_transformer_of_torch() -> None:
    model = nn.TransformerDecoderLayer(8, 2, 16)
    kinds = {layer.name: layer.kind for layer in layers_of(model)}
    for name, kind in kinds.items():
        module, field = name.rsplit(".", 1)
        assert kind == (
            "norm" if "norm" in module
            else "bias" if "bias" in field
            else "attention" if "attn" in module
            else "linear"
        )  # fmt: skip
    assert sum(kind == "attention" for kind in kinds.values()) == 4
    apart = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True)
    assert [layer.kind for layer in layers_of(apart)] == ["attention"] * 3 + ["bias"] * 3 + ["attention", "bias"]


def test_sparse_gradients_are_found_where_they_are_trained() -> None:
    model = nn.ModuleDict({"dense": nn.Embedding(3, 2), "bag": nn.EmbeddingBag(3, 2, sparse=True)})
    assert sparse_gradients(model) == (
        "Embedding bag makes sparse gradients, which do not fit in buckets; give it sparse=False, and use "
        "compressor row_sparse to send the rows that are not zero"
    )
    model["bag"].requires_grad_(False)
    assert sparse_gradients(model) is None
