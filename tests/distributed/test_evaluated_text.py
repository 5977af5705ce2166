"""Every byte of a held-out text counts once, whatever the number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from bench.core import spec
from bench.datasets.base import Samples
from bench.rank.data import evaluate
from tests.testing.engines import assert_same_on_all_ranks

WINDOWS, CONTEXT = 101, 64  # two batches and a part of one for a single rank


def text() -> Samples:
    whole = torch.randint(256, (WINDOWS * CONTEXT + 1,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return Samples(inputs=whole[:-1].view(WINDOWS, CONTEXT), targets=whole[1:].view(WINDOWS, CONTEXT))


def network() -> nn.Module:
    torch.manual_seed(1)
    model: nn.Module = spec.build("models", f"gpt:layers=1,width=16,heads=2,context={CONTEXT}").build(256)
    return model.apply(lambda module: [nn.init.normal_(p, std=0.3) for p in module.parameters(recurse=False)])


@pytest.mark.parametrize("world_size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2, 3)])
def test_any_number_of_ranks_finds_the_same(rank: int, world_size: int) -> None:
    model, part, dataset = network(), text(), spec.build("datasets", f"stdlib:context={CONTEXT}")
    with torch.no_grad():
        logits = model(part.inputs[:].long()).flatten(0, 1)
    found, targets = evaluate(network(), [part], dataset, torch.device("cpu"))[0], part.targets.flatten().long()
    assert_same_on_all_ranks(torch.tensor([found.loss, found.accuracy], dtype=torch.float64))
    assert found.loss == pytest.approx(float(functional.cross_entropy(logits.double(), targets)), rel=1e-6)
    assert found.accuracy == float((logits.argmax(1) == targets).double().mean())
