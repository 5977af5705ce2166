"""Transport: the one place where bytes leave a rank, and where they are counted.

`sockets.py` implements it over TCP connections of its own, `process_group.py` over torch.distributed (gloo, NCCL),
`shared_memory.py` through memory that all ranks map, `alone.py` for a single rank. Every operation has a bounded wait
and knows its peer.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Generic, Literal, Protocol, TypeVar, get_args

import torch
from typing_extensions import override

_AT_ONCE = 64


class WakeupEvent:
    """Rung until it is silenced, however often and whenever it was rung; can be polled as a socket.

    Attributes:
        is_ringing: whether it was rung since it was silenced; for who asks often, no question to the kernel.
    """

    def __init__(self) -> None:
        self.is_ringing = False
        self._rung, self._ringer = socket.socketpair()
        for end in (self._rung, self._ringer):
            end.setblocking(False)

    def fileno(self) -> int:
        """A descriptor that is readable while the bell rings; -1 once it is closed."""
        return self._rung.fileno()

    def ring(self) -> None:
        """From any thread."""
        with contextlib.suppress(BlockingIOError):  # it rings already, and nobody has listened for long
            self._ringer.send(b"\0")
        self.is_ringing = True  # behind the byte: whoever silences it in between finds it ringing for nothing, at worst

    def silence(self) -> None:
        """What was handed over before any ring until now is to be looked for afterwards."""
        if not self.is_ringing:
            return
        self.is_ringing = False
        with contextlib.suppress(BlockingIOError):
            while self._rung.recv(_AT_ONCE):
                pass

    def close(self) -> None:
        """It cannot ring afterwards."""
        self._rung.close()
        self._ringer.close()


Purpose = Literal["gradient", "control", "state", "activation", "replicas"]
"""what a message is for; replicas: they are made equal to be evaluated or saved, which is no step's traffic"""
ReduceOp = Literal["sum", "max"]


class TransportError(RuntimeError):
    """A peer was lost or did not answer in time; `lost_rank` names it where it is known."""

    def __init__(self, message: str, lost_rank: int | None = None) -> None:
        super().__init__(message)
        self.lost_rank = lost_rank


@dataclasses.dataclass
class Traffic:
    """What one rank has sent for one purpose since the start.

    Attributes:
        messages: number of messages sent.
        nbytes: bytes sent.
        seconds: time spent in calls of the transport, waiting included.
        from_formula: some of it went through the backend's own collectives, whose bytes follow from a formula.
    """

    messages: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    from_formula: bool = False

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            messages=self.messages + other.messages,
            nbytes=self.nbytes + other.nbytes,
            seconds=self.seconds + other.seconds,
            from_formula=self.from_formula or other.from_formula,
        )

    def since(self, before: Traffic) -> Traffic:
        """Return what was added after `before`; whether some of it is by formula is told of all."""
        return Traffic(
            messages=self.messages - before.messages,
            nbytes=self.nbytes - before.nbytes,
            seconds=self.seconds - before.seconds,
            from_formula=self.from_formula,
        )


class Ledger:
    """One rank's traffic per purpose, and the purpose under which the next message is booked."""

    def __init__(self) -> None:
        self.traffic: dict[Purpose, Traffic] = {purpose: Traffic() for purpose in get_args(Purpose)}
        self.purpose: Purpose = "gradient"

    def book(self, nbytes: int, *, messages: int = 1, from_formula: bool = False) -> None:
        """Count messages that leave now."""
        entry = self.traffic[self.purpose]
        entry.messages += messages
        entry.nbytes += nbytes
        entry.from_formula |= from_formula

    def timed(self) -> Stopwatch:
        """Count the seconds spent inside a `with` block."""
        return Stopwatch(self.traffic[self.purpose])


class Stopwatch:
    """Adds the seconds of a `with` block to a traffic entry; a generator would cost as much as a short message."""

    __slots__ = ("_entry", "_started")

    def __init__(self, entry: Traffic) -> None:
        self._entry = entry

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._entry.seconds += time.perf_counter() - self._started


class Pending(abc.ABC):
    """A send or receive under way."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until it is done; a second call returns at once.

        Raises:
            TransportError: the peer is lost or the time is up.
        """


class Done(Pending):
    """What was done before anybody waited."""

    def wait(self) -> None:
        """Return at once."""


@dataclasses.dataclass(frozen=True)
class Incoming:
    """Messages under way in both directions, and where they arrive.

    Attributes:
        buffers: uint8, one per message received.
        pendings: of all messages, sent ones included.
    """

    buffers: list[torch.Tensor]
    pendings: list[Pending]

    def wait(self) -> list[torch.Tensor]:
        """Return the buffers, filled."""
        wait_all(self.pendings)
        return self.buffers


Send = tuple[torch.Tensor, int]
"""(contiguous tensor, to)"""
Receive = tuple[torch.Tensor, int]
"""(contiguous tensor to fill, source)"""


class Transport(abc.ABC):
    """The ranks that take part, and messages between them.

    Messages between two ranks arrive in the order in which they were sent, whatever view of the transport they took.

    Attributes:
        rank: this process, 0..world_size-1 within this transport.
        world_size: number of ranks.
        device: where tensors must lie for this backend.
        timeout_s: longest wait for any one message, in seconds.
        ledger: what was sent; shared with all views of this transport.
        in_step: one `post` must hold both what this rank sends and what it receives meanwhile, as NCCL's group calls
            want it; elsewhere a buffer may be posted ahead of the send that it belongs to, which saves a round trip.
    """

    rank: int
    world_size: int
    device: torch.device
    timeout_s: float
    ledger: Ledger
    in_step: bool = False

    @property
    def traffic(self) -> dict[Purpose, Traffic]:
        """What was sent, per purpose; shared with all views of this transport."""
        return self.ledger.traffic

    @abc.abstractmethod
    def name(self, rank: int) -> int:
        """What users call this rank: its number among all ranks, not only those of this view."""

    @abc.abstractmethod
    def timeout_error(self, rank: int) -> TransportError:
        """The error to raise when a wait for `rank` took longer than `timeout_s`; finds out which rank is lost."""

    @contextlib.contextmanager
    def counted_as(self, purpose: Purpose) -> Iterator[None]:
        """Count what is sent inside the block for another purpose."""
        before, self.ledger.purpose = self.ledger.purpose, purpose
        try:
            yield
        finally:
            self.ledger.purpose = before

    def interrupted_by(self, bell: WakeupEvent) -> AbstractContextManager[None]:
        """A block in which waits for messages return early while the bell rings, and may be repeated.

        A backend whose waits nothing ends waits all the same.
        """
        del bell
        return contextlib.nullcontext()

    def send(self, tensor: torch.Tensor, to: int) -> Pending:
        """Start sending a contiguous tensor of any dtype; it must not change before `wait` returned."""
        return self.post([(tensor, to)], [])[0]

    def receive_into(self, tensor: torch.Tensor, source: int) -> Pending:
        """Start receiving into a contiguous tensor (mutated); except on NCCL, the message may be shorter."""
        return self.post([], [(tensor, source)])[0]

    @abc.abstractmethod
    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        """Start several messages at once; returns one `Pending` for each receive, then one for each send.

        Where the peers' posts mirror each other, no order of waiting can block; tensors must hold at least one element.
        """

    def send_receive(self, sends: Sequence[Send], receives: Sequence[tuple[int, int]]) -> Incoming:
        """Start messages whose length only the sender knows, all at once.

        Args:
            sends: (uint8 1-D message, to).
            receives: (upper bound of the length in bytes, source).

        Returns:
            One uint8 buffer per receive, at least as long as its message, whose own header tells where it ends.
        """
        buffers = [torch.empty(bound, dtype=torch.uint8, device=self.device) for bound, _ in receives]
        incoming = [(buffer, source) for buffer, (_, source) in zip(buffers, receives, strict=True)]
        return Incoming(buffers, self.post(sends, incoming))

    @abc.abstractmethod
    def all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """The backend's own all-reduce in place; every rank must call. Bytes are counted by the ring's formula."""

    def start_all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """`all_reduce_` under way, where the backend can; several may be, started in one order on all ranks."""
        self.all_reduce_(tensor, op)
        return Done()

    def all_reduce_scalars(self, values: Sequence[float], op: ReduceOp = "max") -> list[float]:
        """Flags and shared scalars, combined in float64 in rank order; counted as control. Every rank must call.

        All ranks send to all at once: one latency, and whoever waits knows for whom.
        """
        return self.start_all_reduce_scalars(values, op)()

    def start_all_reduce_scalars(self, values: Sequence[float], op: ReduceOp = "max") -> Callable[[], list[float]]:
        """`all_reduce_scalars` under way: what is returned waits for the others' values; to be called once."""
        mine = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        rows = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.world_size)]
        pendings: Sequence[Pending] = []
        if others and len(mine):
            with self.counted_as("control"):
                pendings = self.post([(mine, rank) for rank in others], [(rows[rank], rank) for rank in others])

        def finish() -> list[float]:
            with self.counted_as("control"):
                wait_all(pendings)
            total = rows[0].clone()
            for row in rows[1:]:
                total = total + row if op == "sum" else torch.maximum(total, row)
            return [float(value) for value in total.tolist()]

        return finish

    def barrier(self) -> None:
        """Wait for all ranks; counted as control."""
        self.all_reduce_scalars([0.0])

    @abc.abstractmethod
    def view(self, ranks: Sequence[int]) -> Transport:
        """The same wires, restricted to `ranks` (numbered 0.. in the given order); this rank must be among them.

        Every rank of `ranks` must call, in the same order relative to its other calls.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing of their own
        """Give back what this transport and its views hold; they are of no use then."""


def wait_all(pendings: Sequence[Pending]) -> None:
    """Wait for each in turn."""
    for pending in pendings:
        pending.wait()


class Message(Protocol):
    """What moves."""

    @property
    def is_done(self) -> bool:
        """Whether all of it has gone through."""


M = TypeVar("M", bound=Message)


class PendingMessage(Pending, Generic[M]):
    """A message and whom it waits for.

    Args:
        message: sent or received.
        peer: the rank it goes to or comes from.
        move: moves all that is under way until this message from or to `peer` has gone through.
    """

    def __init__(self, message: M, peer: int, move: Callable[[M, int], None]) -> None:
        self._message = message
        self._peer = peer
        self._move = move

    @override
    def wait(self) -> None:
        if not self._message.is_done:
            self._move(self._message, self._peer)


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
