"""The interface of transports, which send all messages between ranks and count their bytes.

`sockets.py` implements it over its own TCP connections, `process_group.py` over torch.distributed (gloo, NCCL), and
`shared_memory.py` over memory that all ranks map. Every wait is for a known rank and has a time limit.
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
    """An event that any thread can set (`ring`), and that is readable like a socket until it is cleared (`silence`).

    Attributes:
        is_ringing: True if the event is set; reading it needs no system call. A thread whose poll finds the event
            readable must set it too, because `silence` may have run in the middle of `ring`.
    """

    def __init__(self) -> None:
        self.is_ringing = False
        self._rung, self._ringer = socket.socketpair()
        for end in (self._rung, self._ringer):
            end.setblocking(False)

    def fileno(self) -> int:
        """Return a file descriptor that is readable while the event is set; -1 after `close`."""
        return self._rung.fileno()

    def ring(self) -> None:
        """Set the event; any thread may call this method."""
        self.is_ringing = True  # before the byte is sent, so that a thread that the byte wakes finds it set
        with contextlib.suppress(BlockingIOError):  # the buffer is full of unread bytes, so the event is readable
            self._ringer.send(b"\0")

    def silence(self) -> None:
        """Clear the event. Call this before looking for the announced work, so that no later `ring` is missed."""
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


# Purpose of a message. "replicas": makes model replicas equal for evaluation or saving, outside training steps.
Purpose = Literal["gradient", "control", "state", "activation", "replicas"]
ReduceOp = Literal["sum", "max"]


class TransportError(RuntimeError):
    """A rank was lost, or did not answer in time.

    Attributes:
        lost_rank: number of the rank that was lost or late; None if it is unknown.
    """

    def __init__(self, message: str, lost_rank: int | None = None) -> None:
        super().__init__(message)
        self.lost_rank = lost_rank


class MembershipError(RuntimeError):
    """A rank cannot join a job whose ranks may leave, or too few ranks are left; the message is one sentence."""


class RunEnded(Exception):
    """Rank 0 has ended a job whose ranks may leave, so this rank has nothing left to do."""


@dataclasses.dataclass
class Traffic:
    """The messages that one rank has sent for one purpose, such as "gradient", since its transport was created.

    Attributes:
        messages: number of messages sent.
        nbytes: bytes sent.
        seconds: time spent in calls of the transport, including waiting.
        from_formula: True if some bytes were computed instead of counted, because the backend's all-reduce sent them.
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
        """Return the messages, bytes and seconds that were added after `before`, an earlier copy of this object.

        `from_formula` of the result is that of this object.
        """
        return Traffic(
            messages=self.messages - before.messages,
            nbytes=self.nbytes - before.nbytes,
            seconds=self.seconds - before.seconds,
            from_formula=self.from_formula,
        )


@dataclasses.dataclass
class Ledger:
    """Counts of the messages and bytes that one rank has sent for each purpose, such as "gradient" or "control".

    Attributes:
        traffic: the traffic by purpose.
        purpose: the purpose for which the next messages are counted.
    """

    traffic: dict[Purpose, Traffic] = dataclasses.field(
        default_factory=lambda: {purpose: Traffic() for purpose in get_args(Purpose)}
    )
    purpose: Purpose = "gradient"

    def book(self, nbytes: int, *, messages: int = 1, from_formula: bool = False) -> None:
        """Count messages that this rank sends for the current purpose.

        Args:
            nbytes: bytes of all these messages together.
            messages: number of messages.
            from_formula: True if `nbytes` was computed, because the backend's own all-reduce sends the messages.
        """
        entry = self.traffic[self.purpose]
        entry.messages += messages
        entry.nbytes += nbytes
        entry.from_formula |= from_formula

    def timed(self) -> Stopwatch:
        """Return a context manager that adds the seconds of its `with` block to the current purpose's traffic."""
        return Stopwatch(self.traffic[self.purpose])


@dataclasses.dataclass(slots=True)
class Stopwatch:
    """A context manager that adds the duration of its `with` block to `entry.seconds`.

    This is a class because the overhead of a generator-based context manager is as long as a short message takes.
    """

    entry: Traffic
    _started: float = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.entry.seconds += time.perf_counter() - self._started


class Pending:
    """An operation of a transport, such as a send or a receive, that may still be running.

    An instance of this base class stands for an operation that is already done.
    """

    def wait(self) -> None:
        """Block until the operation is done; a second call returns at once.

        Raises:
            TransportError: the other rank is lost, or the wait exceeded the transport's `timeout_s`.
        """


class MovedMessage(Pending):
    """A message on a transport that transfers messages piece by piece while a rank waits.

    Args:
        peer: the other rank, which receives or sends the message.
        move: (this message, `peer`) -> None: transfers all messages under way until this one is done.

    Attributes:
        is_done: True if the whole message has been transferred; the transport sets it.
    """

    def __init__(self, peer: int, move: Callable[[MovedMessage, int], None]) -> None:
        self.is_done = False
        self._peer = peer
        self._move = move

    @override
    def wait(self) -> None:
        if not self.is_done:
            self._move(self, self._peer)


def wait_all(pendings: Sequence[Pending]) -> None:
    """Wait until all of these operations are done."""
    for pending in pendings:
        pending.wait()


Send = tuple[torch.Tensor, int]  # (contiguous tensor, receiving rank)
Receive = tuple[torch.Tensor, int]  # (contiguous tensor to fill, sending rank)


class Transport(abc.ABC):
    """A set of ranks that can send messages to each other.

    A view is a transport among some of the ranks of another transport (see `view`). Messages between two ranks arrive
    in the order in which they were sent, even if they were sent through different views.

    Attributes:
        members: the number of each rank of this transport in the transport from which views were made.
        names: the number of each rank of this transport among all ranks of the job, for messages to the user.
        rank: number of this process within this transport, 0..world_size-1.
        world_size: number of ranks of this transport.
        device: device on which tensors must lie.
        timeout_s: longest wait for any one message, in seconds.
        ledger: counts the messages that this rank sends; shared with all views of this transport.
        in_step: True if the sends and receives of an exchange must be in the same `post`, as NCCL's group calls need.
            False if a receive may be posted before the matching send, which saves a round trip.
    """

    members: Sequence[int]
    names: Sequence[int]
    rank: int
    world_size: int
    device: torch.device
    timeout_s: float
    ledger: Ledger
    in_step: bool = False

    @property
    def traffic(self) -> dict[Purpose, Traffic]:
        """Return the traffic that this rank has sent, per purpose, through this transport and all its views."""
        return self.ledger.traffic

    @abc.abstractmethod
    def timeout_error(self, rank: int) -> TransportError:
        """Find out which rank is lost, and return the error to raise.

        Call this method after a wait for `rank` took longer than `timeout_s`.
        """

    @contextlib.contextmanager
    def counted_as(self, purpose: Purpose) -> Iterator[None]:
        """Count the messages that are sent inside the `with` block for this purpose."""
        before, self.ledger.purpose = self.ledger.purpose, purpose
        try:
            yield
        finally:
            self.ledger.purpose = before

    def interrupted_by(self, bell: WakeupEvent) -> AbstractContextManager[None]:
        """Return a context manager in which a wait for a message returns early if the event `bell` is set.

        The caller must wait for that message again later. If a backend cannot interrupt waits, `bell` has no effect.
        """
        return contextlib.nullcontext()

    def send(self, tensor: torch.Tensor, to: int) -> Pending:
        """Start sending a contiguous tensor to rank `to`; the tensor must not change before `wait` has returned."""
        return self.post([(tensor, to)], [])[0]

    def receive_into(self, tensor: torch.Tensor, source: int) -> Pending:
        """Start receiving a message from rank `source` into a contiguous tensor (mutated).

        Except on NCCL, the message may be shorter than the tensor.
        """
        return self.post([], [(tensor, source)])[0]

    @abc.abstractmethod
    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        """Start sending and receiving several messages; return one `Pending` for each receive, then for each send.

        If the peers post matching messages, no order of waiting causes a deadlock. Tensors must not be empty.
        """

    def send_receive(
        self, sends: Sequence[Send], receives: Sequence[tuple[int, int]]
    ) -> Callable[[], list[torch.Tensor]]:
        """Start sending and receiving several messages whose length only the sender knows.

        Args:
            sends: (uint8 1-D message, receiving rank).
            receives: (upper bound of the length in bytes, sending rank).

        Returns:
            A function that waits for all messages and returns one uint8 buffer per receive. A buffer may be longer than
            its message; the length is in the message's header.
        """
        buffers = [torch.empty(bound, dtype=torch.uint8, device=self.device) for bound, _ in receives]
        pendings = self.post(sends, [(buffer, source) for buffer, (_, source) in zip(buffers, receives, strict=True)])

        def wait() -> list[torch.Tensor]:
            wait_all(pendings)
            return buffers

        return wait

    @abc.abstractmethod
    def start_all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start the backend's own all-reduce of a tensor, in place. Every rank must call this method.

        The all-reduce is asynchronous if the backend supports that. All ranks must start all-reduces in the same order.
        The bytes are computed by the formula of a ring instead of counted.
        """

    def all_reduce_scalars(self, values: Sequence[float], op: ReduceOp = "max") -> list[float]:
        """Return the element-wise sum or maximum over ranks of a few numbers. Every rank must call this method.

        Numbers are combined in float64 in rank order; the messages are counted as control. Each rank sends its numbers
        to all other ranks at once, so the call takes the latency of one message.
        """
        return self.start_all_reduce_scalars(values, op)()

    def start_all_reduce_scalars(self, values: Sequence[float], op: ReduceOp = "max") -> Callable[[], list[float]]:
        """Start `all_reduce_scalars`; return a function that waits for the messages and returns the result.

        Call that function only once.
        """
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
        """Wait until all ranks have called this method; the messages are counted as control."""
        self.all_reduce_scalars([0.0])

    def view(self, ranks: Sequence[int]) -> Self:
        """Return a transport among `ranks` only, which are numbered from 0 in the given order.

        This rank must be in `ranks`. Every rank in `ranks` must call this method, and must make its calls of this
        transport in the same order.
        """
        part = copy.copy(self)
        part.members = [self.members[rank] for rank in ranks]
        part.names = [self.names[rank] for rank in ranks]
        part.rank, part.world_size = list(ranks).index(self.rank), len(ranks)
        return part

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release the resources of this transport and its views; none of them can be used afterwards."""


class SingleRank(Transport):
    """The transport of a job with a single rank, which sends no messages."""

    @override
    def __init__(self, device: torch.device | None = None) -> None:
        self.members, self.names, self.rank, self.world_size = [0], [0], 0, 1
        self.device = device or torch.device("cpu")
        self.timeout_s = 0.0
        self.ledger = Ledger()

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
        return Pending()  # the sum over one rank is the tensor itself
