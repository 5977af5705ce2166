"""What a pair would cost: the link as measured, and the model of it."""

from __future__ import annotations

import pytest

from collectives.ring import Ring
from compressors.choice import Pair
from compressors.ddp.choosing.prices import LinkCost, exchange_s, measure_link
from tests.testing.memory_transport import MemoryTransport, run_threads
from tests.unit.compressors.choosing.played import (
    BF16,
    SPARSE,
)


def test_a_link_is_measured_alike_on_all_ranks_and_none_of_it_counts_as_gradient() -> None:
    def rank(transport: MemoryTransport) -> tuple[LinkCost, int]:
        return measure_link(Ring().bind(transport), transport), transport.traffic["gradient"].nbytes

    (cost, nbytes), other = run_threads(rank, 2)
    assert (cost, nbytes) == other
    assert cost.wave_s > 0
    assert nbytes == 0


def test_a_price_grows_with_bytes_waves_and_ranks() -> None:
    link = LinkCost(wave_s=1.0, byte_s=1e-3)
    assert exchange_s(BF16, 2000, 1000, link, 1) == 0
    assert exchange_s(BF16, 2000, 1000, link, 2) == pytest.approx(2 + 2.0)
    assert exchange_s(BF16, 2000, 1000, link, 4) == pytest.approx(6 + 3.0)
    allgather = exchange_s(Pair("qsparse", "allgather"), 100, 1000, link, 4)
    assert allgather == pytest.approx(1 + 0.3)
    merged = exchange_s(SPARSE, 100, 1000, link, 4)
    assert 6 + 0.3 < merged < 6 + 3 * 4.0
