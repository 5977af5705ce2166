"""The transport over TCP sockets of its own, between ranks on CPUs; the backend's own collectives stay the backend's.

gloo's thread wakes up for every packet; here one thread does everything, and the kernel wakes it when a message is
there. A message moves while its rank posts or waits, and whoever waits for one moves all that are under way, so that a
circle of ranks that send each other long messages goes round. What the kernel's buffer takes leaves at once.

A connection that fails takes all of this rank's connections with it, so that those who wait for this rank fail too and
all find out together who is lost.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import select
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from typing_extensions import override

from collectives.transport import base
from collectives.transport.base import Ledger, Pending, Receive, ReduceOp, Send, Transport, TransportError, wait_all
from collectives.transport.bell import Bell
from collectives.transport.connection import Connection, Incoming, Outgoing
from collectives.transport.failure_detector import failure_detector
from collectives.transport.meeting import MeetingError, interface_host, meet
from collectives.transport.process_group import ProcessGroupTransport
from collectives.transport.under_way import UnderWay

_LOOK_ANYWAY_S = 1.0
"""a kernel short of memory for what it is to collect may call a socket readable too late"""

_num_opened: collections.Counter[str] = collections.Counter()


def open_transport(
    group: dist.ProcessGroup | None = None, device: torch.device | None = None, timeout_s: float = 60.0
) -> Transport:
    """Messages among the ranks of a process group: over sockets between CPUs, else the backend's own; all must call.

    Args:
        group: the process group, which no other thread may use, and which the transport destroys when it is closed; the
            default group, which it does not destroy, where None.
        device: where tensors lie; the CPU for gloo and the current GPU for NCCL where None.
        timeout_s: longest wait for any one message.

    Raises:
        TransportError: a rank is lost, or did not come in time.
    """
    backend = ProcessGroupTransport(group, device, timeout_s)
    if backend.in_step or backend.device.type != "cpu" or backend.world_size == 1:
        return backend
    return SocketTransport.open(backend)


class SocketTransport(Transport):
    """Messages over one connection per pair of ranks, used from one thread; `open` makes one."""

    @override
    def __init__(self, connections: Connections, backend: Transport, members: Sequence[int]) -> None:
        self._connections = connections
        self._backend = backend
        self._members = list(members)
        self.rank = backend.rank
        self.world_size = backend.world_size
        self.device = backend.device
        self.timeout_s = backend.timeout_s

    @property
    def ledger(self) -> Ledger:
        """One for the messages here and the backend's own collectives."""
        return self._backend.ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self._backend.ledger = ledger

    @classmethod
    def open(cls, backend: ProcessGroupTransport) -> SocketTransport:
        """Return one among the ranks of a process group, which finds out who is lost; all of them must call.

        Raises:
            TransportError: a rank is lost, or did not come in time.
        """
        _num_opened[backend.group_name] += 1
        place = f"gradwire/sockets/{backend.group_name}/{_num_opened[backend.group_name]}"
        store = PrefixStore(place, _get_default_store())
        host = interface_host(otherwise=failure_detector().host)
        try:
            sockets = meet(store, backend.rank, backend.world_size, host, backend.timeout_s)
        except MeetingError as error:
            raise backend.timeout_error(error.rank) from error
        connections = {peer: Connection(sock) for peer, sock in sockets.items()}
        return cls(Connections(backend, connections), backend, range(backend.world_size))

    @override
    def name(self, rank: int) -> int:
        return self._backend.name(rank)

    @override
    def timeout_error(self, rank: int) -> TransportError:
        return self._connections.failure(self._members[rank])

    @override
    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        return self._post(sends, [(Incoming(tensor.nbytes, tensor), source) for tensor, source in receives])

    @override
    def send_receive(self, sends: Sequence[Send], receives: Sequence[tuple[int, int]]) -> base.Incoming:
        """Each buffer is made when its length is known, and no longer than that."""
        messages = [(Incoming(bound), source) for bound, source in receives]
        pendings = self._post(sends, messages)
        return _Arriving([], pendings, [message for message, _ in messages])

    @override
    def all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        self.start_all_reduce_(tensor, op).wait()

    @override
    def start_all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """While a rank waits for the backend nothing moves here, so what is under way either way arrives first."""
        with self.ledger.timed():
            self._connections.flush()
        return self._backend.start_all_reduce_(tensor, op)

    @override
    @contextlib.contextmanager
    def interrupted_by(self, bell: Bell) -> Iterator[None]:
        self._connections.bell = bell
        try:
            yield
        finally:
            self._connections.bell = None

    @override
    def view(self, ranks: Sequence[int]) -> SocketTransport:
        return SocketTransport(self._connections, self._backend.view(ranks), [self._members[rank] for rank in ranks])

    @override
    def close(self) -> None:
        self._connections.close()
        self._backend.close()

    def _post(self, sends: Sequence[Send], receives: Sequence[tuple[Incoming, int]]) -> list[Pending]:
        with self.ledger.timed():
            pendings: list[Pending] = []
            for incoming, source in receives:
                self._connections.by_rank[self._members[source]].receive(incoming)
                pendings.append(UnderWay(incoming, self._members[source], self._wait))
            for tensor, to in sends:
                self.ledger.book(tensor.nbytes)
                outgoing = Outgoing(tensor)
                self._connections.send(outgoing, self._members[to])
                pendings.append(UnderWay(outgoing, self._members[to], self._wait))
            return pendings

    def _wait(self, message: Incoming | Outgoing, peer: int) -> None:
        with self.ledger.timed():
            self._connections.wait(message, peer)


class Connections:
    """One rank's connections to all others; shared by all views of a transport.

    Args:
        opener: the transport whose ranks they connect, numbered as there.
        by_rank: to each other rank.

    Attributes:
        bell: ends a wait early while it rings.
    """

    def __init__(self, opener: Transport, by_rank: Mapping[int, Connection]) -> None:
        self.by_rank = by_rank
        self._opener = opener
        self._is_closed = False
        self.bell: Bell | None = None

    def send(self, message: Outgoing, peer: int) -> None:
        """Queue a message, and let leave what the kernel takes."""
        try:
            self.by_rank[peer].send(message)
        except OSError as error:
            raise self.failure(peer) from error

    def wait(self, message: Incoming | Outgoing, peer: int) -> None:
        """Move all that is under way until a message from or to `peer` has gone through, or the bell rings."""
        deadline = time.monotonic() + self._opener.timeout_s
        while not message.is_done and not self._is_interrupted:
            seconds = deadline - time.monotonic()
            if self._is_closed or seconds <= 0:
                raise self.failure(peer)
            self._advance(min(seconds, _LOOK_ANYWAY_S))

    @property
    def _is_interrupted(self) -> bool:
        return self.bell is not None and self.bell.is_ringing

    def flush(self) -> None:
        """Wait until all that is under way, either way, has gone through."""
        for peer, connection in self.by_rank.items():
            for message in connection.under_way():
                self.wait(message, peer)

    def failure(self, peer: int) -> TransportError:
        """Why a wait for `peer` failed, found out from the others after hanging up on all of them."""
        self.close()
        return self._opener.timeout_error(peer)

    def close(self) -> None:
        """Give the sockets back; the kernel still delivers what it has taken."""
        self._is_closed = True
        for connection in self.by_rank.values():
            connection.close()

    def _advance(self, within_s: float) -> None:
        """Wait until something can pass, and let it; look at all in the end, whatever the low-water marks say."""
        poll = select.poll()
        busy = {}
        for rank, connection in self.by_rank.items():
            if events := connection.events():
                busy[connection.fileno()] = rank, events
                poll.register(connection, events)
        if self.bell is not None:
            poll.register(self.bell, select.POLLIN)
        ready = poll.poll(math.ceil(1e3 * within_s)) or [
            (descriptor, events) for descriptor, (_, events) in busy.items()
        ]
        for descriptor, events in ready:
            if descriptor not in busy:  # the bell
                continue
            rank, _ = busy[descriptor]
            try:
                self.by_rank[rank].move(events)
            except OverflowError as error:
                self.close()
                raise TransportError(
                    f"rank {self._opener.name(rank)} sent {error}; all ranks must sum payloads of one kind and length"
                ) from error
            except OSError as error:
                raise self.failure(rank) from error


@dataclasses.dataclass(frozen=True)
class _Arriving(base.Incoming):
    """Messages whose buffers are made when they come."""

    messages: list[Incoming]

    @override
    def wait(self) -> list[torch.Tensor]:
        wait_all(self.pendings)
        return [message.tensor for message in self.messages]
