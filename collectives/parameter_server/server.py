"""A parameter server: workers push gradients layer by layer and pull parameters, with or without bounded staleness.

Source: Li et al., "Scaling distributed machine learning with the parameter server" (OSDI 2014). Bounded staleness: Ho
et al., "More effective distributed ML via a stale synchronous parallel parameter server" (NIPS 2013). On arrival: Dean
et al., "Large scale distributed deep networks" (NIPS 2012), Downpour SGD.
Differs: pushes of one clock are applied together and in rank order, so that a run with a bound is reproducible if its
timing is, and a bound of 0 is synchronous training bit for bit.

A clock is one worker's step. The server's version counts the updates applied to the parameters. The caller implements
the update in `Parameters`.
"""

from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from typing_extensions import override

from collectives.payloads.base import Payload
from collectives.transport.base import TransportError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClockEnd:
    """The message with which a worker ends a clock, after it has pushed all layers.

    Attributes:
        index, epoch: the worker's step and epoch.
        lr: learning rate of its update.
        dropped: discard the pushes of this clock, because a gradient was not finite.
    """

    index: int
    epoch: int
    lr: float
    dropped: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Push:
    """One worker's gradients of one clock.

    Attributes:
        rank: the worker's rank.
        payloads: payloads by layer id; a layer without a gradient is missing.
        clock_end: the message that ended the clock.
    """

    rank: int
    payloads: dict[int, Payload]
    clock_end: ClockEnd


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The parameters that a worker gets for its next clock.

    Attributes:
        version: version of the parameters.
        num_steps: number of optimizer steps so far: the worker's own clocks if staleness is bounded, otherwise the
            pushes of all workers divided by the number of workers.
        staleness: number of versions that the worker's last push is behind when it is applied; None if it did not push.
        parameters: packed `Dense` payloads, one per layer; shared with other workers, so do not change them.
    """

    version: int
    num_steps: int
    staleness: int | None
    parameters: Sequence[torch.Tensor]


class Parameters(Protocol):
    """The parameters and their update rule; used by one thread at a time."""

    def apply(self, pushes: Sequence[Push], num_terms: int) -> None:
        """Update the parameters (mutated) with the sum of these pushes, divided by `num_terms`.

        Args:
            pushes: pushes in rank order, none of them dropped.
            num_terms: number of pushes in one update. With n workers, scale the learning rate by num_terms / n.
        """

    def packed(self) -> list[torch.Tensor]:
        """Return a new packed `Dense` payload per layer."""


class ServerClient(abc.ABC):
    """A worker's interface to the server, in the same process or over a link; used by one thread at a time."""

    @abc.abstractmethod
    def push(self, layer_id: int, payload: Payload) -> None:
        """Push one layer's gradient of this clock; the payload's tensors must not change afterwards."""

    @abc.abstractmethod
    def end_clock(self, clock_end: ClockEnd) -> Answer:
        """End the clock after all layers were pushed; return when the next clock may start.

        Raises:
            TransportError: a rank was lost, or the slowest rank did not push in time.
        """

    @abc.abstractmethod
    def synchronize(self) -> Answer:
        """Wait until all workers have called and all pushes are applied; all workers get the same version.

        If staleness is bounded, all workers must have ended the same number of clocks.

        Raises:
            TransportError: a rank was lost or did not call in time.
        """

    def disconnect(self) -> None:  # noqa: B027 - needed over a link only
        """Tell the server that this worker will send nothing more."""


class ParameterServer(abc.ABC):
    """Hold the parameters and their version; subclasses decide when pushes are applied and when workers proceed.

    Args:
        parameters: the parameters with their update rule.
        world_size: number of workers.
        timeout_s: longest wait of one worker for the others, in seconds.
    """

    def __init__(self, parameters: Parameters, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self.version = 0
        self._parameters = parameters
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._sessions: dict[int, Session] = {}
        self._packed: tuple[int, list[torch.Tensor]] = (-1, [])
        self._synchronizing: list[Session] = []
        self._synchronized: list[Answer] = []  # what the last completed `synchronize` answered
        self._num_synchronized = 0
        self._failure: BaseException | None = None

    def join(self, rank: int) -> Session:
        """Return the session of one worker; call it once for each worker before any of them pushes."""
        self._sessions[rank] = Session(self, rank)
        return self._sessions[rank]

    def state_dict(self) -> dict[str, Any]:
        """Return the version and every worker's clock; no push may be pending, so call `synchronize` before."""
        return {"version": self.version, "clocks": {rank: s.clock for rank, s in self._sessions.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, without the parameters; call it before any worker pushes."""
        self.version = state["version"]
        for rank, session in self._sessions.items():
            session.clock, session.version = state["clocks"][rank], self.version
        self._packed = (-1, [])

    def fail(self, error: BaseException) -> None:
        """Stop the server: every worker that waits or calls from now on gets this error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    @abc.abstractmethod
    def take(self, push: Push, session: Session) -> int:
        """Apply the push, now or when all pushes of its clock are there; return its staleness in versions.

        Only one thread may call at a time; sessions ensure this.
        """

    @abc.abstractmethod
    def may_start(self, clock: int) -> bool:
        """Return whether a worker may start this clock."""

    @abc.abstractmethod
    def _num_steps(self, session: Session) -> int:
        """Return `Answer.num_steps`."""

    def _end_clock(self, session: Session, push: Push) -> Answer:
        with self._changed:
            self._check()
            behind = self.take(push, session)
            session.clock += 1
            self._changed.notify_all()
            self._wait_until(lambda: self.may_start(session.clock), session)
            session.version = self.version
            return self._answer(session, None if push.clock_end.dropped else behind)

    def _synchronize(self, session: Session) -> Answer:
        with self._changed:
            self._check()
            before = self._num_synchronized
            self._synchronizing.append(session)
            if len(self._synchronizing) == self.world_size:
                # Answers are made now, so that a worker that wakes up late does not see later pushes of others.
                self._synchronized = [self._answer(self._sessions[rank], None) for rank in sorted(self._sessions)]
                self._synchronizing = []
                self._num_synchronized += 1
                self._changed.notify_all()
            self._wait_until(lambda: self._num_synchronized > before, session)
            answer = self._synchronized[session.rank]
            session.version = answer.version
            return answer

    def _answer(self, session: Session, staleness: int | None) -> Answer:
        if self._packed[0] != self.version:
            self._packed = (self.version, self._parameters.packed())
        return Answer(
            version=self.version,
            num_steps=self._num_steps(session),
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


class Session(ServerClient):
    """One worker's state at the server: its pushes of the current clock, and the version of its parameters.

    Attributes:
        rank: the worker's rank.
        clock: number of clocks that it has ended.
        version: version of the parameters that it has.
    """

    @override
    def __init__(self, server: ParameterServer, rank: int) -> None:
        self.rank = rank
        self.clock = 0
        self.version = 0
        self._server = server
        self._payloads: dict[int, Payload] = {}

    @override
    def push(self, layer_id: int, payload: Payload) -> None:
        self._payloads[layer_id] = payload

    @override
    def end_clock(self, clock_end: ClockEnd) -> Answer:
        push = Push(rank=self.rank, payloads=self._payloads, clock_end=clock_end)
        self._payloads = {}
        return self._server._end_clock(self, push)

    @override
    def synchronize(self) -> Answer:
        return self._server._synchronize(self)


class BoundedStaleness(ParameterServer):
    """Apply the pushes of one clock together once all have arrived; clock c needs version c - staleness or later.

    Args:
        parameters, world_size, timeout_s: as in `ParameterServer`.
        staleness: the bound; 0 is synchronous training.
    """

    def __init__(self, parameters: Parameters, world_size: int, timeout_s: float, *, staleness: int) -> None:
        super().__init__(parameters, world_size, timeout_s)
        self.staleness = staleness
        self._waiting: dict[int, dict[int, Push]] = {}  # clock -> rank -> push

    @override
    def take(self, push: Push, session: Session) -> int:
        self._waiting.setdefault(session.clock, {})[push.rank] = push
        while len(self._waiting.get(self.version, ())) == self.world_size:
            by_rank = self._waiting.pop(self.version)
            kept = [by_rank[rank] for rank in sorted(by_rank) if not by_rank[rank].clock_end.dropped]
            if kept:
                self._parameters.apply(kept, self.world_size)
            self.version += 1
        return session.clock - session.version

    @override
    def may_start(self, clock: int) -> bool:
        return self.version >= clock - self.staleness

    def _num_steps(self, session: Session) -> int:
        return session.clock


class OnArrival(ParameterServer):
    """Apply every push when it arrives, as 1 / world_size of a step; no worker waits."""

    @override
    def take(self, push: Push, session: Session) -> int:
        behind = self.version - session.version
        if not push.clock_end.dropped:
            self._parameters.apply([push], 1)
            self.version += 1
        return behind

    @override
    def may_start(self, clock: int) -> bool:
        return True

    def _num_steps(self, session: Session) -> int:
        return sum(other.clock for other in self._sessions.values()) // self.world_size
