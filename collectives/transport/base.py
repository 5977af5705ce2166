"""The interface of transports, which send all messages between ranks and count their bytes.

`sockets.py` implements it over its own TCP connections, `process_group.py` over torch.distributed (gloo, NCCL) and
`shared_memory.py` through memory that all ranks map. Every wait has a time limit and knows its peer.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import functools
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Self, get_args

import torch
from typing_extensions import override


class WakeupEvent:
    """An event that any thread can set ("ring"), and that can be polled like a socket until it is cleared ("silenced").

    Attributes:
        is_ringing: True if it was rung since it was last silenced; cheap to read, without a system call.
    """

    def __init__(self) -> None:
        self.is_ringing = False
        self._rung, self._ringer = socket.socketpair()
        for end in (self._rung, self._ringer):
            end.setblocking(False)

    def fileno(self) -> int:
        """Return a descriptor that is readable while the bell rings; -1 after `close`."""
        return self._rung.fileno()

    def ring(self) -> None:
        """Set the event; any thread may call."""
        with contextlib.suppress(BlockingIOError):  # the buffer is full of unread rings, so it rings already
            self._ringer.send(b"\0")
        self.is_ringing = True  # after the byte: a `silence` in between causes at most one needless wake-up

    def silence(self) -> None:
        """Clear the event; call this before looking for the work that a ring announced, so that none is missed."""
        if not self.is_ringing:
            return
        self.is_ringing = False
        with contextlib.suppress(BlockingIOError):
            while self._rung.recv(64):
                pass

    def close(self) -> None:
        """Release the sockets; the event cannot be used afterwards."""
        self._rung.close()
        self._ringer.close()


# Purpose of a message. "replicas": model replicas are made equal for evaluation or saving, outside training steps.
Purpose = Literal["gradient", "control", "state", "activation", "replicas"]
ReduceOp = Literal["sum", "max"]


class TransportError(RuntimeError):
    """A peer was lost or did not answer in time; `lost_rank` is its number, if known."""

    def __init__(self, message: str, lost_rank: int | None = None) -> None:
        super().__init__(message)
        self.lost_rank = lost_rank


@dataclasses.dataclass
class Traffic:
    """The traffic that one rank has sent for one purpose since the start.

    Attributes:
        messages: number of messages sent.
        nbytes: bytes sent.
        seconds: time spent in calls of the transport, waiting included.
        from_formula: some bytes were not counted but computed, because a backend's own collective sent them.
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
        """Return the traffic added after `before`; `from_formula` is that of the whole traffic."""
        return Traffic(
            messages=self.messages - before.messages,
            nbytes=self.nbytes - before.nbytes,
            seconds=self.seconds - before.seconds,
            from_formula=self.from_formula,
        )


class Ledger:
    """One rank's traffic per purpose, and the purpose to which the next message is counted."""

    def __init__(self) -> None:
        self.traffic: dict[Purpose, Traffic] = {purpose: Traffic() for purpose in get_args(Purpose)}
        self.purpose: Purpose = "gradient"

    def book(self, nbytes: int, *, messages: int = 1, from_formula: bool = False) -> None:
        """Count messages that are sent now."""
        entry = self.traffic[self.purpose]
        entry.messages += messages
        entry.nbytes += nbytes
        entry.from_formula |= from_formula

    def timed(self) -> Stopwatch:
        """Return a context manager that counts the seconds spent in its `with` block."""
        return Stopwatch(self.traffic[self.purpose])


class Stopwatch:
    """Adds the seconds of a `with` block to a traffic entry; a generator would take as long as a short message."""

    __slots__ = ("_entry", "_started")

    def __init__(self, entry: Traffic) -> None:
        self._entry = entry

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._entry.seconds += time.perf_counter() - self._started


class Pending:
    """A send or receive under way; of this class itself, one that was done when it was started."""

    def wait(self) -> None:
        """Block until it is done; a second call returns at once.

        Raises:
            TransportError: the peer is lost, or the wait exceeded the transport's `timeout_s`.
        """


class MovedMessage(Pending, abc.ABC):
    """A message, sent or received in several pieces, on a transport that moves messages while a rank waits.

    Args:
        peer: the rank that receives or sends it.
        move: moves all messages under way until this one has been transferred.
    """

    def __init__(self, peer: int, move: Callable[[MovedMessage, int], None]) -> None:
        self._peer = peer
        self._move = move

    @property
    @abc.abstractmethod
    def is_done(self) -> bool:
        """Return True if all of it has been transferred."""

    @override
    def wait(self) -> None:
        if not self.is_done:
            self._move(self, self._peer)


def wait_all(pendings: Sequence[Pending]) -> None:
    """Wait for each in turn."""
    for pending in pendings:
        pending.wait()


Send = tuple[torch.Tensor, int]  # (contiguous tensor, receiving rank)
Receive = tuple[torch.Tensor, int]  # (contiguous tensor to fill, sending rank)


class Transport(abc.ABC):
    """A set of ranks, and messages between them.

    Messages between two ranks arrive in the order in which they were sent, even if sent through different views.

    Attributes:
        members: the number of each rank in the transport that this one is a view of.
        rank: number of this process, 0..world_size-1 within this transport.
        world_size: number of ranks.
        device: device on which tensors must lie.
        timeout_s: longest wait for any one message, in seconds.
        ledger: traffic sent; shared with all views of this transport.
        in_step: a `post` must contain both the sends and the receives of an exchange, as NCCL's group calls need. On
            other backends a receive may be posted before the matching send, which saves a round trip.
    """

    members: Sequence[int]
    rank: int
    world_size: int
    device: torch.device
    timeout_s: float
    ledger: Ledger
    in_step: bool = False

    @property
    def traffic(self) -> dict[Purpose, Traffic]:
        """Return the traffic sent, per purpose; shared with all views of this transport."""
        return self.ledger.traffic

    @abc.abstractmethod
    def name(self, rank: int) -> int:
        """Return the rank's number among all ranks of the job, for messages to the user."""

    @abc.abstractmethod
    def timeout_error(self, rank: int) -> TransportError:
        """Find out which rank is lost after a wait for `rank` exceeded `timeout_s`, and return the error to raise."""

    @contextlib.contextmanager
    def counted_as(self, purpose: Purpose) -> Iterator[None]:
        """Count messages sent inside the `with` block for another purpose."""
        before, self.ledger.purpose = self.ledger.purpose, purpose
        try:
            yield
        finally:
            self.ledger.purpose = before

    def interrupted_by(self, bell: WakeupEvent) -> AbstractContextManager[None]:
        """Return a context manager in which waits for messages return early while the bell rings; wait again later.

        Backends whose waits cannot be interrupted ignore the bell.
        """
        return contextlib.nullcontext()

    def send(self, tensor: torch.Tensor, to: int) -> Pending:
        """Start sending a contiguous tensor of any dtype; it must not change before `wait` has returned."""
        return self.post([(tensor, to)], [])[0]

    def receive_into(self, tensor: torch.Tensor, source: int) -> Pending:
        """Start receiving into a contiguous tensor (mutated); except on NCCL, the message may be shorter."""
        return self.post([], [(tensor, source)])[0]

    @abc.abstractmethod
    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        """Start several messages at once; return one `Pending` for each receive, then one for each send.

        If the peers post matching messages, the order of waiting cannot cause a deadlock. Tensors must not be empty.
        """

    def send_receive(
        self, sends: Sequence[Send], receives: Sequence[tuple[int, int]]
    ) -> Callable[[], list[torch.Tensor]]:
        """Start several messages whose length only the sender knows.

        Args:
            sends: (uint8 1-D message, receiving rank).
            receives: (upper bound of the length in bytes, sending rank).

        Returns:
            A function that waits for all messages and returns one uint8 buffer per receive, at least as long as its
            message; the message's header gives its length.
        """
        buffers = [torch.empty(bound, dtype=torch.uint8, device=self.device) for bound, _ in receives]
        pendings = self.post(sends, [(buffer, source) for buffer, (_, source) in zip(buffers, receives, strict=True)])

        def wait() -> list[torch.Tensor]:
            wait_all(pendings)
            return buffers

        return wait

    @abc.abstractmethod
    def start_all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start the backend's own all-reduce in place, asynchronously if the backend can; every rank must call.

        All ranks must start several in the same order. Bytes follow the formula of a ring.
        """

    def all_reduce_scalars(self, values: Sequence[float], op: ReduceOp = "max") -> list[float]:
        """Combine a few numbers in float64 in rank order; counted as control. Every rank must call.

        Each rank sends to all others at once, which takes one latency, and a rank that waits knows for which peer.
        """
        return self.start_all_reduce_scalars(values, op)()

    def start_all_reduce_scalars(self, values: Sequence[float], op: ReduceOp = "max") -> Callable[[], list[float]]:
        """Start `all_reduce_scalars`; return a function, to be called once, that waits and returns the result."""
        mine = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        rows = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.world_size)]
        others = [rank for rank in range(self.world_size) if rank != self.rank and len(mine)]
        with self.counted_as("control"):
            pendings = self.post([(mine, rank) for rank in others], [(rows[rank], rank) for rank in others])

        def finish() -> list[float]:
            with self.counted_as("control"):
                wait_all(pendings)
            total = functools.reduce(torch.add if op == "sum" else torch.maximum, rows)
            return [float(value) for value in total.tolist()]

        return finish

    def barrier(self) -> None:
        """Wait for all ranks; counted as control."""
        self.all_reduce_scalars([0.0])

    def view(self, ranks: Sequence[int]) -> Self:
        """Return a transport among `ranks` only, numbered 0.. in the given order; this rank must be among them.

        Every rank of `ranks` must call, in the same order relative to its other calls.
        """
        part = copy.copy(self)
        part.members = [self.members[rank] for rank in ranks]
        part.rank, part.world_size = list(ranks).index(self.rank), len(ranks)
        return part

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release the resources of this transport and its views, which cannot be used afterwards."""


class SingleRank(Transport):
    """The transport of a job with a single rank."""

    @override
    def __init__(self) -> None:
        self.members, self.rank, self.world_size = [0], 0, 1
        self.device = torch.device("cpu")
        self.timeout_s = 0.0
        self.ledger = Ledger()

    @override
    def name(self, rank: int) -> int:
        return rank

    @override
    def timeout_error(self, rank: int) -> TransportError:
        return TransportError(f"there is no rank {rank}: this job has a single rank")

    @override
    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        for _, peer in (*sends, *receives):
            raise self.timeout_error(peer)
        return []

    @override
    def start_all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        return Pending()  # a sum of one term is that term
