"""A transport for one rank by itself, over which nothing is sent: what a compressor costs without any wire."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from collectives.transport.base import Ledger, Pending, Receive, ReduceOp, Send, Transport, TransportError


class Alone(Transport):
    """The only rank there is."""

    @override
    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.device = torch.device("cpu")
        self.timeout_s = 0.0
        self.ledger = Ledger()

    @override
    def name(self, rank: int) -> int:
        return rank

    @override
    def timeout_error(self, rank: int) -> TransportError:
        return TransportError(f"there is no rank {rank}: this one is alone")

    @override
    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        for _, peer in (*sends, *receives):
            raise self.timeout_error(peer)
        return []

    @override
    def all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """A sum of one term is that term."""

    @override
    def view(self, ranks: Sequence[int]) -> Alone:
        return self
