"""An in-memory transport for contract tests: ranks are threads of one process.

It is as strict as the real one: a message is read only when the receiver has posted its buffer, so a sender that
changes a tensor too early sends wrong data, and a send without a receive never completes.
"""

from __future__ import annotations

import collections
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from typing_extensions import override

from collectives.transport.base import Ledger, Pending, Receive, ReduceOp, Send, Transport, TransportError, wait_all
from collectives.transport.messages import combine_
from tests.testing.limits import LIMIT_S

T = TypeVar("T")


class MemoryWires:
    """The connections of the ranks: one queue per ordered pair."""

    def __init__(self, world_size: int, timeout_s: float = LIMIT_S) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.lost_rank: int | None = None
        self._sends: dict[tuple[int, int], collections.deque[_Message]] = collections.defaultdict(collections.deque)
        self._receives: dict[tuple[int, int], collections.deque[_Message]] = collections.defaultdict(collections.deque)

    def transport(self, rank: int) -> MemoryTransport:
        """Return the transport of one rank; call it once per rank."""
        return MemoryTransport(self, rank, list(range(self.world_size)), Ledger())

    def lose(self, rank: int) -> None:
        """Mark a rank as ended: all waiting ranks are notified at once, whichever rank they wait for."""
        with self.changed:
            self.lost_rank = rank if self.lost_rank is None else self.lost_rank
            self.changed.notify_all()

    def add_send(self, source: int, to: int, message: _Message) -> None:
        """Queue a message, or deliver it if the receiver already waits."""
        with self.changed:
            self._sends[source, to].append(message)
            self._deliver(source, to)

    def add_receive(self, source: int, to: int, message: _Message) -> None:
        """Queue a buffer, or fill it if the message has already been sent."""
        with self.changed:
            self._receives[source, to].append(message)
            self._deliver(source, to)

    def _deliver(self, source: int, to: int) -> None:
        sends, receives = self._sends[source, to], self._receives[source, to]
        while sends and receives:
            sent, received = sends.popleft(), receives.popleft()
            if received.raw.numel() < sent.raw.numel():
                raise TransportError(
                    f"rank {to} posted {received.raw.numel()} bytes for a message of {sent.raw.numel()} bytes "
                    f"from rank {source}"
                )
            received.raw[: sent.raw.numel()].copy_(sent.raw)
            sent.done = received.done = True
            self.changed.notify_all()


class MemoryTransport(Transport):
    """Messages between threads."""

    @override
    def __init__(self, wires: MemoryWires, rank: int, members: list[int], ledger: Ledger) -> None:
        self.wires = wires
        self.names = members
        self.rank = rank
        self.world_size = len(members)
        self.device = torch.device("cpu")
        self.timeout_s = wires.timeout_s
        self.ledger = ledger

    @override
    def timeout_error(self, rank: int) -> TransportError:
        """Return an error that names the rank waited for."""
        me, peer = self.names[self.rank], self.names[rank]
        message = f"rank {me} waited for rank {peer}, which did not answer within {self.timeout_s:g} s"
        return TransportError(message, lost_rank=peer)

    @override
    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        for tensor, _ in sends:
            self.ledger.book(tensor.numel() * tensor.element_size())
        return self._start(sends, receives)

    @override
    def start_all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        if self.world_size == 1:
            return Pending()
        nbytes = tensor.numel() * tensor.element_size()
        self.ledger.book(round(2 * (self.world_size - 1) / self.world_size * nbytes), from_formula=True)
        if not nbytes:
            return Pending()
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        rows = [tensor.clone() if rank == self.rank else torch.empty_like(tensor) for rank in range(self.world_size)]
        wait_all(self._start([(rows[self.rank], rank) for rank in others], [(rows[rank], rank) for rank in others]))
        for row in rows[1:]:
            combine_(rows[0], row, op)
        tensor.copy_(rows[0])
        return Pending()

    @override
    def view(self, ranks: Sequence[int]) -> MemoryTransport:
        return MemoryTransport(
            self.wires, list(ranks).index(self.rank), [self.names[rank] for rank in ranks], self.ledger
        )

    def _start(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        me = self.names[self.rank]
        pendings: list[Pending] = []
        for tensor, source in receives:
            message = _Message(self, tensor, source)
            self.wires.add_receive(self.names[source], me, message)
            pendings.append(message)
        for tensor, to in sends:
            message = _Message(self, tensor, to)
            self.wires.add_send(me, self.names[to], message)
            pendings.append(message)
        return pendings


class _Message(Pending):
    """One side of a message."""

    def __init__(self, transport: MemoryTransport, tensor: torch.Tensor, peer: int) -> None:
        self.raw = tensor.view(-1).view(torch.uint8)
        self.done = False
        self._transport = transport
        self._peer = peer

    def wait(self) -> None:
        wires, ledger = self._transport.wires, self._transport.ledger
        with ledger.timed(), wires.changed:
            wires.changed.wait_for(lambda: self.done or wires.lost_rank is not None, wires.timeout_s)
            if self.done:
                return
            if wires.lost_rank is None:
                raise self._transport.timeout_error(self._peer)
            me = self._transport.names[self._transport.rank]
            raise TransportError(f"rank {me} lost rank {wires.lost_rank}", lost_rank=wires.lost_rank)


def run_threads(fn: Callable[[MemoryTransport], T], world_size: int, timeout_s: float = LIMIT_S) -> list[T]:
    """Run `fn(transport)` on every rank in a thread, and return the results in rank order.

    Raises:
        RuntimeError: a rank failed; the text is the traceback of the first rank that failed.
    """
    wires = MemoryWires(world_size, timeout_s)
    results: dict[int, T] = {}
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = fn(wires.transport(rank))
        except BaseException as error:  # noqa: BLE001 - carried over to the caller's thread
            failures.append((rank, error))
            wires.lose(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        rank, error = failures[0]
        raise RuntimeError(f"rank {rank}:\n{''.join(traceback.format_exception(error))}") from error
    return [results[rank] for rank in range(world_size)]
