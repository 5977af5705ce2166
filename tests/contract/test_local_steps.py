"""Every compressor exchanges differences of parameters, with several options of local steps."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
import torch
from torch import nn

from bench.core import registry, spec
from collectives.base import Collective
from collectives.options import incompatibility
from collectives.refusals import refuse
from compressors.base import Compressor
from gradwire.local.options import LocalOptions
from tests.testing.local_steps import Rank, run_local
from tests.testing.thinned import every_second

STEPS, RANKS = 24, 3
OPTIONS: list[dict[str, Any]] = [
    {"steps": 2},
    {"steps": 6, "fragments": 2, "delay": 2, "alpha": 0.5, "outer_momentum": 0.5, "outer_lr": 0.5, "nesterov": True},
    {"steps": 3, "start_after": 4, "decay": 0.9},
    {"steps": 3, "average": "senders", "clip": "median"},
]


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    """Return every compressor with all options that go with it, and the first collective that goes with both."""
    found = []
    for name, options in itertools.product(registry.entries("compressors"), OPTIONS):
        compressor = cast(Compressor, spec.build("compressors", name))
        for collective in ("ring", "allgather"):
            bound = cast(Collective, spec.build("collectives", collective))
            if not (
                incompatibility(compressor.check_compatible, bound)
                or incompatibility(refuse, LocalOptions(**options).pair_refusals, compressor, bound)
            ):
                found.append((name, collective, options))
                break
    return found


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 12), nn.BatchNorm1d(12), nn.Linear(12, 4))


def train(rank: Rank) -> list[Any]:
    generator = torch.Generator().manual_seed(rank.transport.rank)
    optimizer = torch.optim.SGD(rank.model.parameters(), lr=0.1, momentum=0.9)
    x, truth = torch.randn(64, 20, generator=generator), torch.arange(80.0).sin().view(20, 4)
    found: list[Any] = []
    for index in range(STEPS):
        rank.local.start_step(rank.local.step_of(index, 99, 7))
        loss = nn.functional.cross_entropy(rank.model(x), (x @ truth).argmax(1))
        loss.backward()
        assert rank.local.prepare_gradients_()
        optimizer.step()
        optimizer.zero_grad()
        rank.local.after_update()
        report = rank.local.finish_step()
        found += [float(loss.detach()), report.exchange_s, rank.outer()]
    return found


@pytest.mark.parametrize(("compressor", "collective", "options"), every_second(cases()), ids=str)
def test_ranks_learn_and_have_one_outer_copy(compressor: str, collective: str, options: dict[str, Any]) -> None:
    ranks = run_local(network, train, ranks=RANKS, compressor=compressor, collective=collective, **options)
    for step in range(STEPS):
        copies = [rank[3 * step + 2] for rank in ranks]
        assert torch.equal(copies[0], copies[1])
        assert torch.equal(copies[0], copies[2])
    assert torch.isfinite(ranks[0][-1]).all()
    assert sum(rank[-3] for rank in ranks) < 0.8 * sum(rank[0] for rank in ranks)
