"""Networks of a user's function: lazy modules, what belongs to a seed, and what cannot be trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.launch.plan import plan
from bench.models.base import seeded_network
from gradwire.exchange.packed_state import bits_hash

FILE = """
import random

import numpy as np
import torch
from torch import nn

LAYER = nn.Linear(8, 3)


def load():
    return [(torch.ones(48, 8), torch.arange(48) % 3)] * 2


class Reads(nn.Module):
    def forward(self, x):
        return x if float(x.sum()) < 1e9 else -x


def lazy(num_classes):
    return nn.Sequential(
        nn.LazyLinear(6), nn.LazyBatchNorm1d(), Reads(), nn.Dropout(0.5), nn.LazyLinear(num_classes, bias=False)
    )


def drawn(num_classes):
    network = nn.Linear(8, num_classes)
    network.register_buffer("shift", torch.tensor(np.random.rand(3)))
    with torch.no_grad():
        network.weight += torch.tensor(np.random.rand(num_classes, 8)) + random.random()
    return network


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 4), None

    def forward(self, x):
        self.last = self.last or nn.Linear(4, 3)
        return self.last(self.first(x))


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = None

    def forward(self, x):
        self.only = self.only or nn.Linear(8, 3)
        return self.only(x)


class Unused(nn.Linear):
    def __init__(self):
        super().__init__(8, 3)
        self.other = nn.LazyLinear(2)


def late():
    return Late()


def by_hand():
    return ByHand()


def without_any():
    return nn.Flatten()


def unused():
    return Unused()


def frozen():
    return nn.Linear(8, 3).requires_grad_(False)


def same():
    return nn.Sequential(LAYER, nn.ReLU())


def logits_in_a_dict():
    class Named(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x)}

    return Named(8, 3)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def test_lazy_modules_get_their_shapes_from_the_data() -> None:
    config = plan(RunConfig(model="own.py:lazy", dataset="own.py:load", world_size=1))
    network = seeded_network(config.filled["model"], spec.build("datasets", config.filled["dataset"]), 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items() if tensor.dim()}
    assert (shapes["0.weight"], shapes["1.running_mean"], shapes["4.weight"]) == ((6, 8), (6,), (3, 6))
    assert float(network.state_dict()["1.running_mean"].abs().sum()) == 0  # the batch that gave the shapes is no step
    assert all(module.training for module in network.modules())


@pytest.mark.parametrize("function", ["lazy", "drawn"])
def test_weights_belong_to_the_seed_and_later_draws_to_the_rank_too(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = spec.build("datasets", "own.py:load")
    found, drawn = [], []
    for rank, seed in ((0, 1), (1, 1), (0, 2)):
        monkeypatch.setenv("RANK", str(rank))
        network = seeded_network(f"own.py:{function}", data, seed)
        found.append(bits_hash((*network.parameters(), *network.buffers())))
        drawn.append((float(torch.rand(1)), np.random.rand()))
    assert found[0] == found[1] != found[2]
    assert drawn[0][0] == drawn[1][0]  # as before, ranks draw the same from torch
    assert len({each for _, each in drawn}) == 3


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("late", "own.py:late makes last.bias, last.weight in its first forward pass"),
        ("by_hand", "own.py:by_hand makes only.bias, only.weight in its first forward pass"),
        ("without_any", "own.py:without_any has no parameters to train"),
        ("unused", r"own.py:unused has parameters without a shape .* \(other.weight, other.bias\)"),
        ("frozen", "own.py:frozen has no parameters to train"),
        ("same", "own.py:same returned the same layers twice; build new ones in each call"),
        ("logits_in_a_dict", "own.py:logits_in_a_dict returns dict instead of a tensor of logits"),
    ],
)
def test_a_network_that_cannot_be_trained_is_refused(function: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        plan(RunConfig(model=f"own.py:{function}", dataset="own.py:load", world_size=1))
