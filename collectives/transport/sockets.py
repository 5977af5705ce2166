"""A transport over its own TCP sockets, between ranks on CPUs; a backend's own all-reduce still runs on the backend.

gloo's thread wakes up for every packet; here a single thread does everything, and the kernel wakes it when a message
has arrived. Messages are transferred while their rank posts or waits. A wait for one message transfers all messages
under way, so ranks that send each other long messages in a circle do not deadlock. Bytes that fit into the kernel's
buffer are sent at once.

If one connection fails, the rank closes all its connections. Then the ranks that wait for this rank fail as well, and
all ranks find out together which rank is lost.
"""

import collections
import contextlib
import math
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from typing_extensions import override

from collectives.transport.base import (
    Ledger,
    MovedMessage,
    Pending,
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
from collectives.transport.rendezvous import connect_all, interface_host

_LENGTH = struct.Struct("<Q")
_LONG_BYTES, _PART_BYTES = 1 << 20, 1 << 16


Wait = Callable[[MovedMessage, int], None]


class SocketSend(MovedMessage):
    """A message to send over a socket; it keeps its tensor alive until the kernel has accepted all bytes."""

    def __init__(self, peer: int, wait: Wait, tensor: torch.Tensor) -> None:
        super().__init__(peer, wait)
        body = _bytes_of(tensor)
        self._left = [memoryview(_LENGTH.pack(len(body))), body]

    def move(self, sock: socket.socket) -> bool:
        """Send as many bytes as the kernel accepts, and return `is_done`.

        Raises:
            OSError: the error of `sendmsg`, such as BlockingIOError if the kernel's buffer is full.
        """
        sent = sock.sendmsg(self._left)
        while self._left and sent >= len(self._left[0]):
            sent -= len(self._left.pop(0))
        if self._left:
            self._left[0] = self._left[0][sent:]
        self.is_done = not self._left
        return self.is_done


class SocketReceive(MovedMessage):
    """A message to receive over a socket.

    Args:
        peer: the rank that sends the message.
        wait: transfers all messages under way until this one is done.
        room: greatest allowed length of the message, in bytes.
        tensor: buffer that is filled from the front; None to allocate a buffer of exactly the message's length.

    Attributes:
        left: memory for the bytes that are still missing: of the length at first, then of the message itself.
    """

    def __init__(self, peer: int, wait: Wait, room: int, tensor: torch.Tensor | None = None) -> None:
        super().__init__(peer, wait)
        self._tensor = tensor
        self._memory = np.empty(0, dtype=np.uint8)
        self._room = room
        self._length = bytearray(_LENGTH.size)
        self.left = memoryview(self._length)
        self._has_length = False

    @property
    def tensor(self) -> torch.Tensor:
        """Return the given buffer, or the allocated one: uint8 1-D, empty until the length is known."""
        return torch.from_numpy(self._memory) if self._tensor is None else self._tensor

    def move(self, sock: socket.socket) -> bool:
        """Receive the bytes that have arrived, and return `is_done`.

        Raises:
            BlockingIOError: no bytes have arrived.
            ConnectionError: the other rank has closed the connection.
            OverflowError: the message is longer than `room`.
        """
        while self.left:
            count = sock.recv_into(self.left)
            if not count:
                raise ConnectionResetError("the peer has closed the connection")
            self.left = self.left[count:]
            if self.left:  # the kernel has no more bytes, so another system call would be useless
                break
            if not self._has_length:
                self._has_length = True
                (length,) = _LENGTH.unpack(self._length)
                if length > self._room:
                    raise OverflowError(f"{length} bytes where this rank has room for {self._room}")
                if self._tensor is not None:
                    self.left = _bytes_of(self._tensor)[:length]
                else:  # numpy, because right after a wake-up torch's code is in no cache and takes thirty times as long
                    self._memory = np.empty(length, dtype=np.uint8)
                    self.left = self._memory.data
        self.is_done = not self.left
        return self.is_done


class Connection:
    """One rank's end of a connected socket, and a queue of messages in each direction.

    Attributes:
        sock: the socket, which does not block.
        outgoing: messages to send, in order.
        incoming: messages to receive, in order.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.outgoing: collections.deque[SocketSend] = collections.deque()
        self.incoming: collections.deque[SocketReceive] = collections.deque()
        self._low_water = 1

    def events(self) -> int:
        """Return the events for which to poll the socket.

        Also set SO_RCVLOWAT, so that a poll returns only once a whole message, or a large part of it, has arrived.
        """
        if self.incoming:
            missing = len(self.incoming[0].left)
            low_water = missing if missing <= _LONG_BYTES else _PART_BYTES
            if low_water != self._low_water:
                self._low_water = low_water
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
        return (select.POLLIN if self.incoming else 0) | (select.POLLOUT if self.outgoing else 0)

    def move(self, events: int) -> None:
        """Send and receive as many bytes as the events of a poll allow.

        Raises:
            OSError: the connection is broken, or the other rank has closed it.
            OverflowError: a message is longer than its buffer.
        """
        if events & ~select.POLLOUT:
            with contextlib.suppress(BlockingIOError):  # the rest has not arrived yet
                while self.incoming and self.incoming[0].move(self.sock):
                    self.incoming.popleft()
        if events & ~select.POLLIN:
            with contextlib.suppress(BlockingIOError):  # the kernel's buffer is full
                while self.outgoing and self.outgoing[0].move(self.sock):
                    self.outgoing.popleft()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:  # a packed payload needs no view, which would take time
        tensor = tensor.detach().view(-1).view(torch.uint8)
    return tensor.numpy().data


# Longest poll before trying to read anyway: if memory is short, the kernel may report a readable socket too late.
_LOOK_ANYWAY_S = 1.0


class Connections:
    """One rank's connections to all other ranks; all views of a transport share them.

    Args:
        opener: the transport whose ranks are connected; ranks have the same numbers here.
        by_rank: the connection to each other rank.

    Attributes:
        bell: an event that ends waits early when it is set; None if waits are not interrupted.
    """

    def __init__(self, opener: Transport, by_rank: Mapping[int, Connection]) -> None:
        self.by_rank = by_rank
        self._opener = opener
        self._is_closed = False
        self.bell: WakeupEvent | None = None

    def wait(self, message: MovedMessage, peer: int) -> None:
        """Transfer messages until this one, from or to rank `peer`, is done, or the event `bell` is set.

        Raises:
            TransportError: a connection is broken, the wait took too long, or a message is longer than its buffer.
        """
        deadline = time.monotonic() + self._opener.timeout_s
        while not message.is_done and not (self.bell is not None and self.bell.is_ringing):
            seconds = deadline - time.monotonic()
            if self._is_closed or seconds <= 0:
                raise self.failure(peer)
            self._advance(min(seconds, _LOOK_ANYWAY_S))

    def failure(self, peer: int) -> TransportError:
        """Close all connections, find out why a wait for rank `peer` failed, and return the error to raise."""
        self.close()
        return self._opener.timeout_error(peer)

    def close(self) -> None:
        """Close all sockets; the kernel still delivers the bytes that it has accepted."""
        self._is_closed = True
        for connection in self.by_rank.values():
            connection.sock.close()

    def _advance(self, within_s: float) -> None:
        """Wait up to `within_s` seconds until bytes can be sent or received, and transfer them.

        After that time, try all connections even though no event was reported.
        """
        poll = select.poll()
        busy = {}
        for rank, connection in self.by_rank.items():
            if events := connection.events():
                busy[connection.sock.fileno()] = rank, events
                poll.register(connection.sock, events)
        if self.bell is not None:
            poll.register(self.bell, select.POLLIN)
        ready = poll.poll(math.ceil(1e3 * within_s)) or [
            (descriptor, events) for descriptor, (_, events) in busy.items()
        ]
        for descriptor, events in ready:
            if self.bell is not None and descriptor == self.bell.fileno():
                self.bell.is_ringing = True  # because `silence` may have run before the byte arrived
                continue
            rank, _ = busy[descriptor]
            try:
                self.by_rank[rank].move(events)
            except OverflowError as error:
                self.close()
                raise TransportError(
                    f"rank {self._opener.names[rank]} sent {error}; all ranks must sum payloads of one kind and length"
                ) from error
            except OSError as error:
                raise self.failure(rank) from error


class SocketTransport(Transport):
    """A transport over one TCP connection per pair of ranks, used from one thread; `open_transport` creates it."""

    @override
    def __init__(self, connections: Connections, backend: Transport) -> None:
        self._connections = connections
        self._backend = backend
        self.members, self.names = range(backend.world_size), backend.names
        self.rank, self.world_size = backend.rank, backend.world_size
        self.device, self.timeout_s = backend.device, backend.timeout_s

    @property
    def ledger(self) -> Ledger:
        """Return the counts of the messages and bytes of the sockets and of the backend's own collectives together."""
        return self._backend.ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self._backend.ledger = ledger

    @override
    def timeout_error(self, rank: int) -> TransportError:
        return self._connections.failure(self.members[rank])

    @override
    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        received, sent = self._post(sends, [(tensor.nbytes, source, tensor) for tensor, source in receives])
        return [*received, *sent]

    @override
    def send_receive(
        self, sends: Sequence[Send], receives: Sequence[tuple[int, int]]
    ) -> Callable[[], list[torch.Tensor]]:
        received, sent = self._post(sends, [(bound, source, None) for bound, source in receives])

        def wait() -> list[torch.Tensor]:
            wait_all(received)
            wait_all(sent)
            return [message.tensor for message in received]

        return wait

    @override
    def start_all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        # first finish all messages under way, because they are not transferred while a rank waits for the backend
        for connection in self._connections.by_rank.values():
            wait_all([*connection.outgoing, *connection.incoming])
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
    def view(self, ranks: Sequence[int]) -> Self:
        part = super().view(ranks)
        part._backend = self._backend.view(ranks)
        return part

    @override
    def close(self) -> None:
        self._connections.close()
        self._backend.close()

    def _post(
        self, sends: Sequence[Send], receives: Sequence[tuple[int, int, torch.Tensor | None]]
    ) -> tuple[list[SocketReceive], list[SocketSend]]:
        # receives: (greatest allowed length in bytes, sending rank, buffer or None)
        with self.ledger.timed():
            received, sent = [], []
            for room, source, buffer in receives:
                peer = self.members[source]
                received.append(SocketReceive(peer, self._wait, room, buffer))
                self._connections.by_rank[peer].incoming.append(received[-1])
            for tensor, to in sends:
                self.ledger.book(tensor.nbytes)
                peer = self.members[to]
                sent.append(SocketSend(peer, self._wait, tensor))
                connection = self._connections.by_rank[peer]
                connection.outgoing.append(sent[-1])
                try:  # send as many queued bytes as the kernel accepts
                    connection.move(select.POLLOUT)
                except OSError as error:
                    raise self._connections.failure(peer) from error
            return received, sent

    def _wait(self, message: MovedMessage, peer: int) -> None:
        with self.ledger.timed():
            self._connections.wait(message, peer)


_num_opened: collections.Counter[str] = collections.Counter()


def open_transport(
    group: dist.ProcessGroup | None = None, device: torch.device | None = None, timeout_s: float = 60.0
) -> Transport:
    """Open a transport among the ranks of a process group. Every rank must call this function.

    The transport uses sockets for tensors on CPUs, and otherwise the backend of the process group.

    Args:
        group: the process group, which no other thread may use and which `close` destroys. None for the default group,
            which is not destroyed.
        device: device of the tensors. None for the CPU (gloo) or the current GPU (NCCL).
        timeout_s: longest wait for any one message, in seconds.

    Raises:
        TransportError: a rank is lost, or did not connect in time.
    """
    backend = ProcessGroupTransport(group, device, timeout_s)
    if backend.in_step or backend.device.type != "cpu" or backend.world_size == 1:
        return backend
    _num_opened[backend.group_name] += 1
    place = f"gradwire/sockets/{backend.group_name}/{_num_opened[backend.group_name]}"
    store = PrefixStore(place, _get_default_store())
    host = interface_host(otherwise=failure_detector().host)
    try:
        sockets = connect_all(store, backend.rank, backend.world_size, host, timeout_s)
    except TransportError as error:
        raise backend.timeout_error(error.lost_rank) from error
    connections = {peer: Connection(sock) for peer, sock in sockets.items()}
    return SocketTransport(Connections(backend, connections), backend)


def connect_ranks(
    store: Store, rank: int, ranks: Sequence[int], host: str, *, timeout_s: float, connect_s: float, ledger: Ledger
) -> SocketTransport:
    """Open a transport among some ranks of a job, on CPUs, without a process group. Each of these ranks must call this.

    The transport has no backend, so it cannot run a backend's own all-reduce.

    Args:
        store: rendezvous store that only these ranks use, and only for this rendezvous.
        rank: number of this rank among all ranks of the job; one of `ranks`.
        ranks: the ranks to connect; the transport numbers them from 0 in this order.
        host: this machine's address as other machines see it.
        timeout_s: longest wait for any one message, in seconds.
        connect_s: longest time until all ranks are connected, in seconds.
        ledger: counts the messages that this rank sends.

    Raises:
        TransportError: a rank is lost, or did not connect in time.
    """
    names = _MemberNames(rank, ranks, timeout_s, ledger)
    try:
        sockets = connect_all(store, names.rank, names.world_size, host, connect_s)
    except TransportError as error:
        raise names.timeout_error(error.lost_rank or 0) from error
    connections = {peer: Connection(sock) for peer, sock in sockets.items()}
    return SocketTransport(Connections(names, connections), names)


class _MemberNames(Transport):
    """The numbers and names of ranks that are connected without a process group; used in place of a backend."""

    @override
    def __init__(self, rank: int, ranks: Sequence[int], timeout_s: float, ledger: Ledger) -> None:
        self.members, self.names = range(len(ranks)), ranks
        self.rank, self.world_size = ranks.index(rank), len(ranks)
        self.device, self.timeout_s, self.ledger = torch.device("cpu"), timeout_s, ledger

    @override
    def timeout_error(self, rank: int) -> TransportError:
        lost = self.names[rank]
        return TransportError(
            f"rank {self.names[self.rank]} lost rank {lost}, or waited in vain for it", lost_rank=lost
        )

    @override
    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        raise NotImplementedError("messages go over the sockets")

    @override
    def start_all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        raise NotImplementedError("these ranks have no backend with an all-reduce of its own")
