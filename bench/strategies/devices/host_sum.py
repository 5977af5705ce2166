"""Sums at the host: every device sends it what it has; the host adds in the order of the devices and answers.

Source: the patent on a heterogeneous training system (2022-11), paragraph 57.

Bytes: up, the packed payload per device; down, the packed sum per device, which the host sends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import torch
from typing_extensions import override

from bench.strategies.devices.commands import HOST_RANK, hear, tell
from collectives.base import BoundCollective, Collective, Downlink
from collectives.payloads.base import Payload, unpack
from collectives.rounds.layout import Layout
from collectives.server import added
from collectives.transport.base import ReduceOp, Transport, wait_all


@dataclasses.dataclass(kw_only=True)
class HostSum(Collective):
    """What devices use in a collective's place.

    Attributes:
        to_host: the transport of all processes, with the host.
    """

    to_host: Transport = dataclasses.field(init=False)  # no option

    @classmethod
    def over(cls, transport: Transport) -> Self:
        """For the processes of this transport."""
        collective = cls()
        collective.to_host = transport
        return collective

    @override
    def bind(self, transport: Transport, downlink: Downlink | None = None) -> BoundHostSum:
        return BoundHostSum(self, transport)

    @override
    @classmethod
    def refuses(cls, kind: type[Payload]) -> str | None:
        return None

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> None:
        """The host is none of the ranks that sum."""


class BoundHostSum(BoundCollective):
    """One device's side; the host's is `serve_sum`."""

    options: HostSum

    @override
    def sum_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> Payload:
        to_host, packed = self.options.to_host, payload.pack().cpu()
        tell(to_host, HOST_RANK, {"sum": op, "nbytes": packed.numel()})
        to_host.send(packed, HOST_RANK).wait()
        answer = torch.empty(hear(to_host, HOST_RANK)["nbytes"], dtype=torch.uint8)
        to_host.receive_into(answer, HOST_RANK).wait()
        return unpack(answer.to(packed.device))


def serve_sum(transport: Transport, ranks: Sequence[int], asked: Sequence[dict[str, Any]]) -> None:
    """Add what some devices asked to have added, and answer them.

    Args:
        transport: of all processes.
        ranks: the devices.
        asked: what each of them told.
    """
    terms = []
    for rank, request in zip(ranks, asked, strict=True):
        packed = torch.empty(request["nbytes"], dtype=torch.uint8)
        transport.receive_into(packed, rank).wait()
        terms.append(unpack(packed))
    answer = added(terms, asked[0]["sum"]).pack()
    for rank in ranks:
        tell(transport, rank, {"nbytes": answer.numel()})
    wait_all([transport.send(answer, rank) for rank in ranks])
