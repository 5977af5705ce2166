"""The price of a pair: the measured link, and the model of it."""

from __future__ import annotations

import pytest
import torch

from collectives.allreduce import Ring
from compressors.auto.candidates import MessageCost, exchange_s, look, measure_link
from compressors.auto.choice import FIRST, Choice, Pair, dense_pair
from compressors.auto.compressor import Auto
from compressors.auto.ranking import StepSeconds
from compressors.layer import Step
from compressors.topk import TopK
from tests.extensions.auto.played import (
    BF16,
    LAYERS,
    SPARSE,
    Rank,
    chooser_of,
    gradients,
)
from tests.testing.memory_transport import MemoryTransport, run_threads


def test_a_link_is_measured_alike_on_all_ranks_and_none_of_it_counts_as_gradient() -> None:
    def rank(transport: MemoryTransport) -> tuple[MessageCost, int]:
        return measure_link(Ring().bind(transport), transport), transport.traffic["gradient"].nbytes

    (cost, nbytes), other = run_threads(rank, 2)
    assert (cost, nbytes) == other
    assert cost.wave_s > 0
    assert nbytes == 0


def test_a_layer_without_a_gradient_is_one_of_which_nothing_is_known() -> None:
    step = Step(index=0, epoch=0, rank=0, world_size=2, seed=1)
    nothing, something = (look(TopK(ratio=0.05), LAYERS[0], x, step) for x in (torch.zeros(6000), torch.ones(6000)))
    assert nothing.error == 1
    assert 0 < something.error < 1


def test_gradients_of_a_step_that_is_left_out_are_looked_at_again() -> None:
    def rank(transport: MemoryTransport) -> tuple[list[bool], float]:
        one = Rank(transport, Choice.of_all(0, dense_pair(Ring()), LAYERS, FIRST))
        chooser = chooser_of(Auto(), one.reducer, transport)
        decisions = chooser.decisions()
        next(decisions)
        looking = []
        for step, was_skipped in enumerate((True, True, False)):
            looking.append(one.reducer.look is not None)
            one.exchange(one.at(step), [g * (not was_skipped) for g in gradients(transport.rank, step)])
            chooser.step, chooser.was_skipped = one.at(step), was_skipped
            decisions.send(StepSeconds(0.1, 0.1, 0.0))
        looking.append(one.reducer.look is not None)
        return looking, chooser._candidates._seen[SPARSE][0].error

    for looking, error in run_threads(rank, 2):
        assert looking == [True, True, True, False]
        assert 0 < error < 1


def test_a_price_grows_with_bytes_waves_and_ranks() -> None:
    link = MessageCost(wave_s=1.0, per_byte_s=1e-3)
    assert exchange_s(BF16, 2000, 1000, link, 1) == 0
    assert exchange_s(BF16, 2000, 1000, link, 2) == pytest.approx(2 + 2.0)
    assert exchange_s(BF16, 2000, 1000, link, 4) == pytest.approx(6 + 3.0)
    allgather = exchange_s(Pair("qsparse", "allgather"), 100, 1000, link, 4)
    assert allgather == pytest.approx(1 + 0.3)
    merged = exchange_s(Pair("group_topk:values=floats", "ring"), 100, 1000, link, 4)
    assert 6 + 0.3 < merged < 6 + 3 * 4.0
