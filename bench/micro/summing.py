"""One collective with one payload: timed rounds of sums, what they sent, and whether they were right."""

from __future__ import annotations

import statistics
from typing import Any, cast

import torch

from bench.core import spec
from bench.core.config.measurements import CollectivesConfig
from bench.micro.link import Link
from bench.micro.synthetic_payloads import SyntheticPayloads
from bench.train.clock import device_time
from collectives.base import Collective
from collectives.payloads.base import Payload
from collectives.payloads.dense import Dense
from collectives.serial import error_bound, serial_sum
from collectives.transport.base import Ledger, Traffic, Transport

KEY = (0,)


class Expected:
    """What a collective must make of all ranks' payloads: the serial sum bit for bit, where its order is known."""

    def __init__(self, collective: Collective, payloads: list[Payload]) -> None:
        serial = serial_sum(collective, payloads)
        self._expected, self._bound = (serial, torch.zeros(())) if serial is not None else error_bound(payloads)

    def num_wrong(self, values: torch.Tensor) -> int:
        """Elements of a dense sum [numel] that are not as expected; NaN never is."""
        off = (values.to(self._expected.dtype) - self._expected).abs()
        return int((off > self._bound).logical_or(off.isnan()).sum())


class Summing:
    """A pair at one size; every rank must call each method.

    Args:
        config: of the sweep.
        collective: spec text.
        compressor: spec text, the maker of the offer.
        size_bytes: of the tensor that the payloads stand for.
        offer: what to sum.
        transport: the ranks; used here under a ledger of its own.
    """

    def __init__(
        self,
        config: CollectivesConfig,
        *,
        collective: str,
        compressor: str,
        size_bytes: int,
        offer: SyntheticPayloads,
        transport: Transport,
    ) -> None:
        self.collective = collective
        self.compressor = compressor
        self._config = config
        self._size_bytes = size_bytes
        self._offer = offer
        self._transport = transport.view(range(transport.world_size))
        self._transport.ledger = Ledger()
        component = cast(Collective, spec.build("collectives", collective))
        self._expected = Expected(component, offer.of_all)
        self._bound = component.bind(self._transport)
        self._p50s: list[float] = []
        self._p95s: list[float] = []
        self._num_wrong = 0
        self._sent = _sent(self._transport)
        self._link = Link.of(config, transport.rank)

    def take_turn(self) -> None:
        """`warmup` untimed sums, then `iters` timed ones, of which the last is checked."""
        for _ in range(self._config.warmup):
            self._sum()
        durations = []
        with self._link.counting(self._transport, self._config.iters):
            for _ in range(self._config.iters):
                seconds, values = self._sum()
                durations.append(seconds)
        slowest = torch.tensor(self._transport.all_reduce_scalars(durations, "max"), dtype=torch.float64)
        self._p50s.append(float(slowest.quantile(0.5)))
        self._p95s.append(float(slowest.quantile(0.95)))
        self._num_wrong += int(self._transport.all_reduce_scalars([self._expected.num_wrong(values)], "sum")[0])

    def row(self) -> dict[str, Any]:
        """This pair's columns of `COLLECTIVES`, over all turns so far."""
        n = self._config.world_size
        messages, nbytes = self._transport.all_reduce_scalars([self._sent.messages / n, self._sent.nbytes / n], "sum")
        time_s = statistics.median(self._p50s)
        algbw = algorithm_bandwidth(self._size_bytes, time_s)
        link = self._link.columns(self._transport, time_s)
        return {
            "collective": self.collective,
            "payload": self.compressor,
            "size_bytes": self._size_bytes,
            "count": self._offer.own.numel,
            "time_p50_s": time_s,
            "time_p95_s": statistics.median(self._p95s),
            "algbw_Bps": algbw,
            "busbw_Bps": bus_bandwidth(algbw, n),
            "num_wrong": self._num_wrong,
            "messages": None if self._sent.from_formula else messages,
            "bytes_sent": nbytes,
        } | link

    def extras(self) -> dict[str, Any]:
        """What only people are shown: overlap of the ranks' index sets, and what the busiest rank sent."""
        (busiest,) = self._transport.all_reduce_scalars([self._sent.nbytes], "max")
        return {"overlap": self._offer.overlap, "bytes_sent_max": busiest}

    def close(self) -> None:
        """Release what the collective holds."""
        self._bound.close()

    def _sum(self) -> tuple[float, torch.Tensor]:
        """(seconds that one sum took this rank, the sum as a dense tensor)."""
        payload = self._offer.fresh()
        self._transport.barrier()  # nobody starts before all have their payload
        before = _sent(self._transport)
        started = device_time(self._transport.device)
        values = _dense(self._bound.sum(payload, KEY))
        seconds = device_time(self._transport.device) - started
        self._sent = _sent(self._transport).since(before)
        return seconds, values


def _sent(transport: Transport) -> Traffic:
    """What this rank has sent for all purposes; the backend's own collectives hide their messages."""
    return sum(transport.traffic.values(), Traffic())


def _dense(total: Payload) -> torch.Tensor:
    """The sum as it is needed: an all-gather, for one, has only brought the terms together by now."""
    return total.values if isinstance(total, Dense) else total.to_dense()


def algorithm_bandwidth(size_bytes: int, time_s: float) -> float:
    """Return the tensor's bytes summed per second; `time_s` > 0.

    For a compressed payload this uses the size of the dense tensor, so it may exceed the link's rate.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return size_bytes / time_s


def bus_bandwidth(algbw: float, world_size: int) -> float:
    """Return the least bytes per second that each of `world_size` >= 1 ranks must have sent.

    In any all-reduce each of n ranks must send at least 2(n-1)/n of the tensor: all but its own share, once to gather
    the terms and once to distribute the total. So this can be compared with the rate of a link for every n.
    """
    return algbw * 2 * (world_size - 1) / world_size
