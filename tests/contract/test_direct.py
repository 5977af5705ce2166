"""Direct sums whose shares follow the links: the shares, the bytes, the bits, and the rates that ranks measure."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest
import torch

from bench.hosts.cluster import Cluster, HostLink
from bench.rank.process import link_rates
from collectives import direct
from collectives.allreduce import Ring
from collectives.direct import Direct, best_shares, measured_rates, on_links
from collectives.options import Incompatible, OptionError
from collectives.payloads.base import Payload
from collectives.refusals import refuse
from collectives.transport.base import Pending, Receive, Send
from tests.testing.collectives import clone
from tests.testing.configs import make_config
from tests.testing.memory_transport import MemoryTransport, run_threads
from tests.testing.payloads import make

ONE_SLOW = (100.0, 100.0, 100.0, 20.0)
RATES = [ONE_SLOW, (1.0, 1.0, 1.0, 1.0), (20.0, 100.0, 90.0, 80.0), (1.0, 1000.0, 1.0, 1.0), (7.0, 11.0, 13.0, 0.1)]


def slowest(rates: Sequence[float], shares: Sequence[float]) -> float:
    """Return the time of the last rank: rank j sends and receives 1 + (n-2) s_j payloads."""
    return max((1 + (len(rates) - 2) * share) / rate for rate, share in zip(rates, shares, strict=True))


def test_a_rank_with_a_fifth_of_the_rate_owns_nothing() -> None:
    assert best_shares(ONE_SLOW) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    ring_of_equals = 2 * 3 / 4 / 100
    assert slowest(ONE_SLOW, best_shares(ONE_SLOW)) / ring_of_equals == pytest.approx(10 / 3)


@pytest.mark.parametrize("rates", [*RATES, (3.0, 5.0), (1.0, 2.0, 3.0), (5.0,) * 9])
def test_no_other_shares_are_faster(rates: tuple[float, ...]) -> None:
    best = best_shares(rates)
    assert sum(best) == pytest.approx(1)
    assert min(best) >= 0
    numbers = random.Random(1)
    for _ in range(300):
        weights = [numbers.random() ** 4 for _ in rates]
        assert slowest(rates, best) <= slowest(rates, [weight / sum(weights) for weight in weights]) * (1 + 1e-9)


def sums(payloads: Sequence[Payload], collective: Direct) -> list[tuple[torch.Tensor, int]]:
    def rank(transport: MemoryTransport) -> tuple[torch.Tensor, int]:
        total = collective.bind(transport).sum(clone(payloads[transport.rank]), (0,))
        return total.to_dense(), transport.traffic["gradient"].nbytes

    return run_threads(rank, len(payloads))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("dense", torch.float32), ("dense", torch.bfloat16), ("sparse", torch.float16), ("group_sparse", torch.float32)],
)
@pytest.mark.parametrize("numel", [1, 6, 10_007])
def test_the_result_does_not_depend_on_the_shares(kind: str, dtype: torch.dtype, numel: int) -> None:
    payloads = [make(kind, numel, dtype, rank).payload for rank in range(4)]
    first = sums(payloads, Direct())[0][0]
    for rates in RATES:
        for segment_bytes in (100, 5000):
            collective = Direct(shares="bandwidth", rates=rates, segment_bytes=segment_bytes)
            assert all(torch.equal(total, first) for total, _ in sums(payloads, collective))


@pytest.mark.parametrize("segment_bytes", [1000, 65_536])
@pytest.mark.parametrize("rates", RATES)
def test_bytes_of_each_rank(rates: tuple[float, ...], segment_bytes: int) -> None:
    numel = 30_000
    payloads = [make("dense", numel, torch.float32, rank).payload for rank in range(4)]
    collective = Direct(shares="bandwidth", rates=rates, segment_bytes=segment_bytes)
    for rank, (_, sent) in enumerate(sums(payloads, collective)):
        share = best_shares(rates)[rank]
        assert sent == collective.expected_bytes(4 * numel, 4, rank)
        assert sent == pytest.approx(4 * numel * (1 + 2 * share), abs=4 * 2 * 32)  # parts are whole elements
        assert share or sent == 4 * numel


class TimedTransport(MemoryTransport):
    """A transport on which a message takes its bytes / the lower rate of the sender's uplink and the own downlink."""

    uplinks: Sequence[float] = ()
    downlinks: Sequence[float] = ()
    clock = threading.local()

    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        pendings = super().post(sends, receives)
        for tensor, source in receives:
            seconds = tensor.nbytes / min(self.uplinks[source], self.downlinks[self.rank])
            self.clock.now = getattr(self.clock, "now", 0.0) + seconds
        return pendings


def test_ranks_measure_the_rates_of_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return getattr(TimedTransport.clock, "now", 0.0)

    monkeypatch.setattr(direct, "time", Clock)

    def rank(transport: MemoryTransport) -> tuple[tuple[float, ...], int, int]:
        timed = TimedTransport(transport.wires, transport.rank, list(range(4)), transport.ledger)
        timed.uplinks, timed.downlinks = (1e6, 3e5, 1e6, 1e6), (1e6, 1e6, 1e6, 2e5)
        return measured_rates(timed), timed.traffic["gradient"].nbytes, timed.traffic["control"].nbytes

    for measured, gradient, control in run_threads(rank, 4):
        assert measured == pytest.approx((1e6, 3e5, 1e6, 2e5))
        assert gradient == 0
        assert control > 3 * 2**18


def test_links_that_are_known_are_not_measured() -> None:
    asked = Direct(shares="bandwidth")
    assert asked.rounds(4, 0, direct.Layout.dense(10)) is None
    assert asked.expected_bytes(40, 4, 0) is None
    assert on_links(asked, ONE_SLOW).option_texts()["rates"] == "100+100+100+20"
    for unchanged in (Direct(shares="bandwidth", rates=(1, 2)), Direct(), Ring()):
        assert on_links(unchanged, ONE_SLOW) is unchanged


def test_bad_rates_are_refused() -> None:
    with pytest.raises(OptionError, match="rates without shares=bandwidth have no effect; add shares=bandwidth"):
        Direct(rates=(1, 2))
    with pytest.raises(Incompatible, match="2 rates do not suit 4 ranks"):
        refuse(Direct(shares="bandwidth", rates=(1, 2)).rank_refusals, 4)
    with pytest.raises(OptionError, match="rates="):
        Direct.from_text({"shares": "bandwidth", "rates": "1+0"})
    assert Direct.from_text({"shares": "bandwidth", "rates": "100+20"}).rates == (100, 20)


def test_ranks_share_the_rate_of_their_host() -> None:
    hosts = (HostLink(name="a", uplink_bps=8e6, downlink_bps=4e6), HostLink(name="b", uplink_bps=2e6))
    cluster = Cluster(hosts=hosts, ranks_per_host=2)
    config = make_config(cluster=cluster.to_dict(), ranks_per_host=2)
    assert link_rates(config) == (2e6, 2e6, 1e6, 1e6)
    assert link_rates(make_config(cluster=Cluster.uniform(2).to_dict(), ranks_per_host=1)) == ()
    assert link_rates(make_config()) == ()
