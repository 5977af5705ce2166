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
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from typing_extensions import override

from collectives.transport import base
from collectives.transport.base import (
    Ledger,
    Pending,
    PendingMessage,
    Receive,
    ReduceOp,
    Send,
    Transport,
    TransportError,
    WakeupEvent,
    wait_all,
)
from collectives.transport.failure_detector import failure_detector
from collectives.transport.process_group import ProcessGroupTransport
from collectives.transport.rendezvous import MeetingError, connect_all, interface_host

_LENGTH = struct.Struct("<Q")
_LONG_BYTES, _PART_BYTES = 1 << 20, 1 << 16
_NOTHING = np.empty(0, dtype=np.uint8)


class Outgoing:
    """A message that leaves; holds its tensor until the kernel has all of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        body = _bytes_of(tensor)
        self._left = [memoryview(_LENGTH.pack(len(body))), body]

    @property
    def is_done(self) -> bool:
        """Whether the kernel has all of it."""
        return not self._left

    def move(self, sock: socket.socket) -> bool:
        """Hand over what the kernel takes; returns whether it has all of it now. Raises as a socket does."""
        sent = sock.sendmsg(self._left)
        while self._left and sent >= len(self._left[0]):
            sent -= len(self._left.pop(0))
        if self._left:
            self._left[0] = self._left[0][sent:]
        return self.is_done


class Incoming:
    """A message that arrives.

    Args:
        room: longest message that may come, in bytes.
        tensor: what it fills from the front; memory of just its length where None.
    """

    def __init__(self, room: int, tensor: torch.Tensor | None = None) -> None:
        self._tensor = tensor
        self._memory = _NOTHING
        self._room = room
        self._length = bytearray(_LENGTH.size)
        self._left = memoryview(self._length)
        self._has_length = False

    @property
    def tensor(self) -> torch.Tensor:
        """As given; else uint8 1-D, empty until the length is known."""
        return torch.from_numpy(self._memory) if self._tensor is None else self._tensor

    @property
    def is_done(self) -> bool:
        """Whether all of it is there."""
        return self._has_length and not self._left

    @property
    def num_missing(self) -> int:
        """Bytes of what is being read, the length or the body, that have not come."""
        return len(self._left)

    def move(self, sock: socket.socket) -> bool:
        """Take what the kernel has; returns whether all of it is there now.

        Raises:
            BlockingIOError: the kernel has nothing.
            ConnectionError: the peer has closed the connection.
            OverflowError: the message is longer than the room for it.
        """
        while self._left:
            count = sock.recv_into(self._left)
            if not count:
                raise ConnectionResetError("the peer has closed the connection")
            self._left = self._left[count:]
            if self._left:  # the kernel gave all that it had: asked again, it would say so
                break
            if not self._has_length:
                self._has_length = True
                self._left = self._body()
        return self.is_done

    def _body(self) -> memoryview:
        (length,) = _LENGTH.unpack(self._length)
        if length > self._room:
            raise OverflowError(f"{length} bytes where this rank has room for {self._room}")
        if self._tensor is not None:
            return _bytes_of(self._tensor)[:length]
        # By numpy: right after a wake-up torch, of which no cache holds anything, takes thirty times as long as usual.
        self._memory = np.empty(length, dtype=np.uint8)
        return self._memory.data


class Connection:
    """One rank's end of a connected socket, and the messages under way on it, each way in their order."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._outgoing: collections.deque[Outgoing] = collections.deque()
        self._incoming: collections.deque[Incoming] = collections.deque()
        self._low_water = 1

    def fileno(self) -> int:
        """The socket's descriptor; -1 once it is closed."""
        return self._socket.fileno()

    def send(self, message: Outgoing) -> None:
        """Queue a message, and let leave what can; raises as `move` does."""
        self._outgoing.append(message)
        self._move_out()

    def receive(self, message: Incoming) -> None:
        """Expect a message after those expected before."""
        self._incoming.append(message)

    def under_way(self) -> list[Outgoing | Incoming]:
        """What has not left, and what has not come."""
        return [*self._outgoing, *self._incoming]

    def events(self) -> int:
        """What to poll the socket for, which becomes readable no sooner than what is being read is there."""
        if self._incoming:
            missing = self._incoming[0].num_missing
            low_water = missing if missing <= _LONG_BYTES else _PART_BYTES
            if low_water != self._low_water:
                self._low_water = low_water
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
        return (select.POLLIN if self._incoming else 0) | (select.POLLOUT if self._outgoing else 0)

    def move(self, events: int) -> None:
        """Move what the poll said can be moved.

        Raises:
            OSError: the connection is broken, or the peer has closed it.
            OverflowError: a message is longer than the room for it.
        """
        if events & ~select.POLLOUT:
            self._move_in()
        if events & ~select.POLLIN:
            self._move_out()

    def close(self) -> None:
        """Give the socket back; the kernel still delivers what it has taken."""
        self._socket.close()

    def _move_out(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the kernel's buffer is full
            while self._outgoing and self._outgoing[0].move(self._socket):
                self._outgoing.popleft()

    def _move_in(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the rest is on its way
            while self._incoming and self._incoming[0].move(self._socket):
                self._incoming.popleft()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:  # what is packed need not be looked at in another way
        tensor = tensor.detach().view(-1).view(torch.uint8)
    return tensor.numpy().data


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
            sockets = connect_all(store, backend.rank, backend.world_size, host, backend.timeout_s)
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
    def interrupted_by(self, bell: WakeupEvent) -> Iterator[None]:
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
                pendings.append(PendingMessage(incoming, self._members[source], self._wait))
            for tensor, to in sends:
                self.ledger.book(tensor.nbytes)
                outgoing = Outgoing(tensor)
                self._connections.send(outgoing, self._members[to])
                pendings.append(PendingMessage(outgoing, self._members[to], self._wait))
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
        self.bell: WakeupEvent | None = None

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
