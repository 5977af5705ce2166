"""Series of datagrams: enough to measure losses, at a rate that links and CPUs can carry."""

from __future__ import annotations

import pytest

from bench.hosts.probe import DatagramSeries


@pytest.mark.parametrize(
    ("rate_bps", "row"),
    [
        (100e3, DatagramSeries(2000, 60, 100e3)),
        (10e6, DatagramSeries(2003, 312, 10e6)),
        (100e6, DatagramSeries(4128, 1514, 100e6)),
        (None, DatagramSeries(4128, 1514, 100e6)),
    ],
)
def test_frames_are_as_large_as_their_number_allows(rate_bps: float | None, row: DatagramSeries) -> None:
    assert DatagramSeries.at(rate_bps) == row
