"""A parameter server: workers push gradients layer by layer and pull parameters, with or without bounded staleness.

Source: Li et al., "Scaling distributed machine learning with the parameter server" (OSDI 2014). Bounded staleness: Ho
et al., "More effective distributed ML via a stale synchronous parallel parameter server" (NIPS 2013). Updates on
arrival: Dean et al., "Large scale distributed deep networks" (NIPS 2012), Downpour SGD.
Differs: pushes of one clock (step of a worker) are applied together, in rank order. So a run with a staleness bound is
reproducible if its timing is reproducible, and a bound of 0 gives the same result as synchronous training, bit for bit.

The version of the parameters counts the updates that were applied. The caller implements the update in `Parameters`.

A worker in another process is connected by a link: a transport between two ranks, used by one thread at each end. The
worker sends one packed payload per layer, in the order in which backward produces them, and a control message at the
end of its clock. The server answers with a control message and one packed `Dense` payload per layer. The first two
bytes distinguish control messages from payloads. A message that finds no posted receive buffer waits for a round trip.
So the server keeps buffers posted: enough for all messages of a clock, if these buffers need little memory.

Bytes per worker and step: the worker sends the packed payloads and a control message of 24 bytes; the server sends 16 +
4 m bytes for each layer of m elements and a control message of 24 bytes. The worker on the server's own rank sends
nothing. Answers to `synchronize` are counted under the purpose `replicas`.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch

from collectives.payloads.base import HEADER_BYTES, Payload, unpack
from collectives.payloads.fields import PayloadError
from collectives.transport import messages
from collectives.transport.base import Pending, Transport, TransportError, wait_all


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClockEnd:
    """The message with which a worker ends a clock (one of its steps), after it has pushed the gradients of all layers.

    Attributes:
        index, epoch: index of the worker's step, and number of its epoch.
        lr: learning rate of the update with these gradients.
        dropped: True to discard the gradients of this clock, because one of them was not finite.
    """

    index: int
    epoch: int
    lr: float
    dropped: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Push:
    """The gradients that one worker computed in one clock (one of its steps).

    Attributes:
        rank: the worker's rank.
        payloads: encoded gradients by layer id; a layer without a gradient is missing.
        clock_end: the message that ended the clock.
    """

    rank: int
    payloads: dict[int, Payload]
    clock_end: ClockEnd


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerReply:
    """The parameters that a worker gets for its next clock (step).

    Attributes:
        version: version of the parameters: the number of updates applied to them.
        num_steps: number of optimizer steps so far: the number of clocks (steps) of this worker if staleness is
            bounded, otherwise the number of pushes of all workers divided by the number of workers.
        staleness: number of updates that the parameters got between the version from which the worker computed its last
            push and the version to which the push was applied; None if the worker did not push, or if its push was
            discarded.
        parameters: packed `Dense` payloads, one per layer; shared with other workers, so do not change them.
    """

    version: int
    num_steps: int
    staleness: int | None
    parameters: Sequence[torch.Tensor]


class Parameters(Protocol):
    """The parameters that a server holds, and their update rule; used by one thread at a time."""

    def apply(self, pushes: Sequence[Push], num_terms: int) -> None:
        """Update the parameters (mutated) with the sum of the workers' pushed gradients, divided by `num_terms`.

        Args:
            pushes: pushes in rank order, without dropped ones.
            num_terms: number of pushes that a complete update averages, including dropped ones. With n workers, scale
                the learning rate by num_terms / n.
        """

    def packed(self) -> list[torch.Tensor]:
        """Return the current parameters as one new packed `Dense` payload per layer."""


class ParameterServer:
    """A server that holds the parameters, applies pushed gradients to them, and limits how far workers may run ahead.

    A clock is one step of a worker. With a limit, the pushes (gradients) of one clock are applied together, in one
    update, once all workers have sent theirs; a worker may start clock c, counted from 0, when the parameters have
    version c - staleness or a later one. Without a limit, every push is applied when it arrives, as 1 / world_size of a
    step, and no worker waits for others.

    Args:
        parameters: the parameters with their update rule.
        world_size: number of workers.
        timeout_s: longest wait of a worker for other workers, in seconds.
        staleness: largest number of updates that a worker's parameters may lack when its clock starts; 0 is synchronous
            training. None: no limit, and pushes are applied on arrival.
    """

    def __init__(self, parameters: Parameters, world_size: int, timeout_s: float, *, staleness: int | None) -> None:
        self.world_size = world_size
        self.staleness = staleness
        self.version = 0
        self._parameters = parameters
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._sessions: dict[int, Session] = {}
        self._waiting: dict[int, dict[int, Push]] = {}  # clock -> rank -> push that is not applied yet
        self._packed: tuple[int, list[torch.Tensor]] = (-1, [])
        self._synchronizing: list[Session] = []
        self._synchronized: list[ServerReply] = []  # replies of the last completed `synchronize`, by rank
        self._num_synchronized = 0
        self._failure: BaseException | None = None

    def join(self, rank: int) -> Session:
        """Return the `Session` of a worker; call this once for each worker before any worker pushes."""
        self._sessions[rank] = Session(self, rank)
        return self._sessions[rank]

    def state_dict(self) -> dict[str, Any]:
        """Return the version of the parameters, and for each worker the number of clocks (steps) that it has ended.

        No push may be waiting to be applied, so all workers must call `synchronize` first.
        """
        return {"version": self.version, "clocks": {rank: s.clock for rank, s in self._sessions.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`, which does not hold the parameters; call this before any push."""
        self.version = state["version"]
        for rank, session in self._sessions.items():
            session.clock, session.version = state["clocks"][rank], self.version
        self._packed = (-1, [])

    def fail(self, error: BaseException) -> None:
        """Stop the server: every worker that waits now, or that calls a method later, gets this error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def take(self, push: Push, session: Session) -> int:
        """Apply a push (one worker's gradients), or keep it until all workers have pushed for the same step.

        A push is only kept if staleness is limited. Return the staleness of the push, as in `ServerReply.staleness`.
        Only one thread may call this method at a time; `Session` ensures this with a lock.
        """
        if self.staleness is None:
            behind = self.version - session.version
            if not push.clock_end.dropped:
                self._parameters.apply([push], 1)
                self.version += 1
            return behind
        self._waiting.setdefault(session.clock, {})[push.rank] = push
        while len(self._waiting.get(self.version, ())) == self.world_size:
            by_rank = self._waiting.pop(self.version)
            kept = [by_rank[rank] for rank in sorted(by_rank) if not by_rank[rank].clock_end.dropped]
            if kept:
                self._parameters.apply(kept, self.world_size)
            self.version += 1
        return session.clock - session.version

    def may_start(self, clock: int) -> bool:
        """Return True if a worker may start the clock (its step) with this number, counted from 0."""
        return self.staleness is None or self.version >= clock - self.staleness

    def _answer(self, session: Session, staleness: int | None) -> ServerReply:
        if self._packed[0] != self.version:
            self._packed = (self.version, self._parameters.packed())
        clocks_of_all = sum(other.clock for other in self._sessions.values())
        return ServerReply(
            version=self.version,
            num_steps=clocks_of_all // self.world_size if self.staleness is None else session.clock,
            staleness=staleness,
            parameters=self._packed[1],
        )

    def _wait_until(self, condition: Callable[[], bool], session: Session) -> None:
        self._changed.wait_for(lambda: self._failure is not None or condition(), self._timeout_s)
        self._check()
        if not condition():
            slowest = min(self._sessions.values(), key=lambda other: (other in self._synchronizing, other.clock))
            raise TransportError(
                f"rank {session.rank} waited for rank {slowest.rank}, which did not push within {self._timeout_s:g} s",
                lost_rank=slowest.rank,
            )

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


class Session:
    """One worker's interface to the server, in the server's process; used by one thread at a time.

    Attributes:
        rank: the worker's rank.
        clock: number of clocks (steps) that the worker has ended.
        version: version of the parameters that the worker has: the number of updates in them.
    """

    def __init__(self, server: ParameterServer, rank: int) -> None:
        self.rank = rank
        self.clock = 0
        self.version = 0
        self._server = server
        self._payloads: dict[int, Payload] = {}  # pushed in the current clock

    def push(self, layer_id: int, payload: Payload) -> None:
        """Push the encoded gradient of one layer in the current step; `payload` must not change afterwards."""
        self._payloads[layer_id] = payload

    def end_clock(self, clock_end: ClockEnd) -> ServerReply:
        """End the clock (step) after all layers were pushed; return the parameters once the next step may start.

        Raises:
            TransportError: a rank was lost, or the slowest rank did not push in time.
        """
        push = Push(rank=self.rank, payloads=self._payloads, clock_end=clock_end)
        self._payloads = {}
        server = self._server
        with server._changed:
            server._check()
            behind = server.take(push, self)
            self.clock += 1
            server._changed.notify_all()
            server._wait_until(lambda: server.may_start(self.clock), self)
            self.version = server.version
            return server._answer(self, None if clock_end.dropped else behind)

    def synchronize(self) -> ServerReply:
        """Wait until all workers have called this method and all pushes are applied; return the parameters.

        All workers get the same version. If staleness is bounded, all must have ended equally many clocks (steps).

        Raises:
            TransportError: a rank was lost, or did not call this method in time.
        """
        server = self._server
        with server._changed:
            server._check()
            before = server._num_synchronized
            server._synchronizing.append(self)
            if len(server._synchronizing) == server.world_size:
                # All answers are made now, so that a worker that wakes up late does not get later pushes of others.
                sessions = server._sessions
                server._synchronized = [server._answer(sessions[rank], None) for rank in sorted(sessions)]
                server._synchronizing = []
                server._num_synchronized += 1
                server._changed.notify_all()
            server._wait_until(lambda: server._num_synchronized > before, self)
            answer = server._synchronized[self.rank]
            self.version = answer.version
            return answer


SERVER, WORKER = 0, 1  # ranks within a link
_MAGIC = 0x5357  # "WS" as bytes; payloads start with other bytes
_NONE = -1
_NO_CLOCK = ClockEnd(index=0, epoch=0, lr=0.0)
# Smallest number of posted receive buffers; more are posted if all of them together take at most `_POSTED_BYTES`. Each
# buffer is as long as the largest layer's message, but memory is only used for the bytes that a message fills.
_FEWEST_POSTED, _POSTED_BYTES = 8, 1 << 27


class Request(enum.IntEnum):
    """The command in a worker's control message to the server.

    APPLY and DROP end a clock (a step of the worker): with APPLY the server applies the gradients that were pushed in
    this clock; with DROP the server discards them.
    """

    APPLY = 1
    DROP = 2
    SYNCHRONIZE = 3
    DISCONNECT = 4


@dataclasses.dataclass(frozen=True)
class ControlMessage:
    """A worker's control message to the server, 24 bytes.

    Attributes:
        command: the command to the server.
        clock_end: the worker's step, epoch and learning rate, if the command ends a clock (a step of the worker).
    """

    FORM: ClassVar = struct.Struct("<HBxIIxxxxd")

    command: Request
    clock_end: ClockEnd = _NO_CLOCK

    def pack(self) -> torch.Tensor:
        """Return this control message in packed form, uint8 [24]."""
        end = self.clock_end
        raw = self.FORM.pack(_MAGIC, self.command, end.index, end.epoch, end.lr)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    @classmethod
    def read(cls, message: torch.Tensor) -> Self | None:
        """Return the control message in a receive buffer, uint8 1-D, or None if the buffer holds a payload.

        Raises:
            PayloadError: the message's command is not a `Request`.
        """
        raw = message[: cls.FORM.size].numpy().tobytes()
        if len(raw) < cls.FORM.size or int.from_bytes(raw[:2], "little") != _MAGIC:
            return None
        _, command, index, epoch, lr = cls.FORM.unpack(raw)
        if command not in set(Request):
            raise PayloadError(f"a worker sent command {command}, which does not exist")
        return cls(Request(command), ClockEnd(index=index, epoch=epoch, lr=lr, dropped=command == Request.DROP))


# The server's control message before the parameters, 24 bytes: magic number, staleness (-1: None), version, num_steps.
_REPLY = struct.Struct("<HxxiQQ")
# Bytes of each control message, from a worker or from the server.
CONTROL_BYTES = ControlMessage.FORM.size


class RemoteServer:
    """One worker's interface to a parameter server in another process; used by one thread at a time.

    Args:
        link: transport of two ranks: the server is rank 0 and this worker is rank 1.
        numels: number of elements of every layer, in the order of their ids, which count from 0.

    Raises:
        PayloadError: there are more than 2^16 layers, which a payload's header cannot number.
    """

    def __init__(self, link: Transport, numels: Sequence[int]) -> None:
        self._bound, self._num_posted = _buffers(numels)
        self._link = link
        self._numels = numels
        self._sent: list[Pending] = []

    def push(self, layer_id: int, payload: Payload) -> None:
        """Send the encoded gradient of one layer to the server."""
        payload.tensor_id = layer_id
        self._sent.append(self._link.send(messages.pack(payload, self._link, self._bound), SERVER))

    def end_clock(self, clock_end: ClockEnd) -> ServerReply:
        """End the current clock (step); wait for and return the parameters with which the next step starts."""
        return self._ask(ControlMessage(Request.DROP if clock_end.dropped else Request.APPLY, clock_end))

    def synchronize(self) -> ServerReply:
        """Wait until all workers have called this method and all gradients are applied; return the parameters."""
        return self._ask(ControlMessage(Request.SYNCHRONIZE))

    def disconnect(self) -> None:
        """Tell the server that this worker sends nothing more.

        The message is sent once for each receive buffer that the server has posted, so that no buffer stays posted.
        """
        with self._link.counted_as("control"):
            message = ControlMessage(Request.DISCONNECT).pack()
            wait_all([self._link.send(message, SERVER) for _ in range(self._num_posted)])

    def _ask(self, control: ControlMessage) -> ServerReply:
        reply = torch.empty(_REPLY.size, dtype=torch.uint8)
        parameters = [torch.empty(HEADER_BYTES + 4 * numel, dtype=torch.uint8) for numel in self._numels]
        incoming = self._link.post([], [(buffer, SERVER) for buffer in (reply, *parameters)])
        with self._link.counted_as("control"):
            self._sent.append(self._link.send(control.pack(), SERVER))
        wait_all(self._sent)
        self._sent = []
        wait_all(incoming)
        magic, behind, version, num_steps = _REPLY.unpack(reply.numpy().tobytes())
        if magic != _MAGIC:
            raise PayloadError(f"the server's answer starts with {magic:#06x} instead of {_MAGIC:#06x}")
        staleness = None if behind == _NONE else behind
        return ServerReply(version=version, num_steps=num_steps, staleness=staleness, parameters=parameters)


def serve(link: Transport, session: Session, numels: Sequence[int]) -> None:
    """Answer the messages of one worker in another process until it disconnects.

    Args:
        link: transport of two ranks: this server is rank 0 and the worker is rank 1; no other thread may use it.
        session: the worker's session at the server.
        numels: number of elements of every layer, in the order of their ids, which count from 0.

    Raises:
        TransportError: the worker was lost, or did not send anything in time.
        PayloadError: the worker sent an invalid message.
    """
    bound, num_posted = _buffers(numels)
    posted: collections.deque[tuple[torch.Tensor, Pending]] = collections.deque()
    while True:
        while len(posted) < num_posted:
            buffer = torch.empty(bound, dtype=torch.uint8)
            posted.append((buffer, link.receive_into(buffer, WORKER)))
        message, pending = posted.popleft()  # the buffer may be longer than the message
        pending.wait()
        control = ControlMessage.read(message)
        if control is None:
            payload = unpack(message)
            if payload.tensor_id >= len(numels) or payload.numel != numels[payload.tensor_id]:
                raise PayloadError(
                    f"a worker pushed {payload.numel} elements for layer {payload.tensor_id}, "
                    "which does not exist or has another number of elements"
                )
            session.push(payload.tensor_id, payload)
        elif control.command is Request.DISCONNECT:
            wait_all([left for _, left in posted])  # a process group must not be destroyed while a buffer is posted
            return
        elif control.command is Request.SYNCHRONIZE:
            answer = session.synchronize()
            with link.counted_as("replicas"):
                _reply(link, answer)
        else:
            _reply(link, session.end_clock(control.clock_end))


def _reply(link: Transport, answer: ServerReply) -> None:
    behind = _NONE if answer.staleness is None else answer.staleness
    reply = _REPLY.pack(_MAGIC, behind, answer.version, answer.num_steps)
    with link.counted_as("control"):
        pending = link.send(torch.frombuffer(bytearray(reply), dtype=torch.uint8), WORKER)
    wait_all([pending, *link.post([(parameter, WORKER) for parameter in answer.parameters], [])])


def _buffers(numels: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of each of the server's receive buffers, and the number of buffers posted for one worker."""
    if len(numels) > 2**16:
        raise PayloadError(f"a parameter server supports at most {2**16} layers; this model has {len(numels)}")
    bound = messages.bound_nbytes(max(numels, default=0), 1)
    return bound, min(max(_FEWEST_POSTED, _POSTED_BYTES // bound), len(numels) + 1)  # at most the messages of a clock
