"""Every byte of a held-out text counts once, whatever the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from bench.core import spec
from bench.datasets.base import Samples
from bench.train.data import Evaluation, evaluate
from tests.testing.ranks import run_ranks

WINDOWS, CONTEXT = 101, 64  # two batches and a part of one for a single rank


def text() -> Samples:
    whole = torch.randint(256, (WINDOWS * CONTEXT + 1,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return Samples(inputs=whole[:-1].view(WINDOWS, CONTEXT), targets=whole[1:].view(WINDOWS, CONTEXT))


def network() -> nn.Module:
    torch.manual_seed(1)
    model: nn.Module = spec.build("models", f"gpt:layers=1,width=16,heads=2,context={CONTEXT}").build(256)
    return model.apply(lambda module: [nn.init.normal_(p, std=0.3) for p in module.parameters(recurse=False)])


def quality(rank: int) -> Evaluation:
    dataset = spec.build("datasets", f"stdlib:context={CONTEXT}")
    return evaluate(network(), [text()], dataset, torch.device("cpu"))[0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_ranks_finds_the_same(world_size: int, tmp_path: Path) -> None:
    model, part = network(), text()
    with torch.no_grad():
        logits = model(part.inputs[:].long()).flatten(0, 1)
    found = run_ranks(quality, world_size, tmp_path)
    assert found == [found[0]] * world_size
    targets = part.targets.flatten().long()
    assert found[0].loss == pytest.approx(float(functional.cross_entropy(logits.double(), targets)), rel=1e-6)
    assert found[0].accuracy == float((logits.argmax(1) == targets).double().mean())
