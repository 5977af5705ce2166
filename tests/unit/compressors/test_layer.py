"""The description of a model for compressors: one layer per parameter, classified by its module."""

from __future__ import annotations

import torch
from torch import nn

from compressors.layer import layers_of


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
    layers = layers_of(model)
    assert [layer.kind for layer in layers] == [
        *("conv", "bias", "norm", "norm", "conv", "bias", "norm", "norm", "linear", "bias"),
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
    assert [layer.kind for layer in layers] == ["other", "other", "other", "bias", "bias", "bias"]
    assert layers[0].position == 0
    assert layers[-1].position == 1


def test_a_model_of_one_module_lies_at_the_input() -> None:
    assert [layer.position for layer in layers_of(nn.Linear(2, 2))] == [0, 0]
    assert layers_of(nn.Identity()) == []
    assert torch.is_tensor(layers_of(nn.Linear(2, 2))[0].weight)
