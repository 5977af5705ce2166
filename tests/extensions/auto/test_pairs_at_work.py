"""Layers change between pairs, and no residual is lost."""

from __future__ import annotations

import pytest
import torch

from collectives.allreduce import Ring
from collectives.options import Incompatible
from collectives.server import Server
from compressors.auto.choice import pairs_on
from compressors.auto.compressor import Auto
from tests.extensions.auto.played import (
    WAYS,
    Rank,
    gradients,
)
from tests.testing.memory_transport import MemoryTransport, run_threads


def test_what_waits_goes_with_its_layer_from_pair_to_pair_and_is_sent_by_a_dense_one() -> None:
    def rank(transport: MemoryTransport) -> tuple[list[torch.Tensor], dict[int, float]]:
        one = Rank(transport)
        return one.steps(0, 9), one.reducer.residual_norms()

    (totals, norms), (others, _) = run_threads(rank, 2)
    assert norms == {}
    for layer_id, (total, other) in enumerate(zip(totals, others, strict=True)):
        assert torch.equal(total, other)
        given = torch.stack([gradients(rank, step)[layer_id] for rank in range(2) for step in range(9)]).sum(0)
        torch.testing.assert_close(total, given, rtol=1e-4, atol=1e-4)


def test_a_step_that_is_dropped_right_after_a_change_takes_nothing_away() -> None:
    def rank(transport: MemoryTransport) -> tuple[bool, float]:
        one = Rank(transport)
        one.steps(0, 3)
        one.reducer.switch(WAYS[3])
        first = one.exchange(one.at(3), gradients(transport.rank, 3))
        one.reducer.drop()
        again = one.exchange(one.at(3), gradients(transport.rank, 3))
        one.reducer.commit()
        third = one.exchange(one.at(4), gradients(transport.rank, 3))
        return all(map(torch.equal, first, again)), float((third[0] - again[0]).norm())

    for same, sent_before in run_threads(rank, 2):
        assert same
        assert sent_before > 1  # and only once


def test_state_that_is_saved_between_two_pairs_goes_on_bit_for_bit() -> None:
    def rank(transport: MemoryTransport) -> bool:
        whole = Rank(transport)
        whole.steps(0, 5)
        whole.reducer.switch(WAYS[2])
        other = Rank(transport)
        other.reducer.load_state_dict(whole.reducer.state_dict())
        return all(map(torch.equal, whole.steps(6, 9), other.steps(6, 9)))

    assert run_threads(rank, 2) == [True, True]


def test_pairs_ride_on_the_collective_that_was_asked_for_or_on_allgather() -> None:
    assert {pair.collective for pair in pairs_on(Ring())} == {"ring", "allgather"}
    Auto().check_compatible(Ring())
    with pytest.raises(Incompatible, match="use collective ring"):
        Auto().check_compatible(Server())
