"""Membership: ranks may be lost and return while they train with local steps; rank 0 decides who takes part.

Every rank but 0 has a channel to rank 0. An exchange is one round of messages over these channels:

    other ranks -> rank 0   ready      with the exchange's number
    rank 0 -> other ranks   go         with the members: the ranks that take part
    (the members sum, over connections of their own)
    other ranks -> rank 0   summed     and whether the sum succeeded
    rank 0 -> other ranks   commit     if it did on all members that are still there; otherwise `again`: they are ready

A rank whose channel breaks is lost. Once `quorum` ranks are ready, the others have `deadline` seconds; who comes later
is told so and has to start again. A rank that starts, at first or again, connects to rank 0, which sends it the outer
copy after the next exchange; with fewer members than the quorum, at once. Rank 0 writes its address and a random token
into a store, so only ranks with access to the store can join.
"""

import abc
import collections
import contextlib
import dataclasses
import datetime
import hmac
import json
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch.distributed.distributed_c10d import Store
from typing_extensions import override

from collectives.transport.base import Ledger, TransportError
from compressors.local.channel import Channel, Message
from compressors.local.options import LocalOptions

# Seconds for which rank 0 waits for reports after a sum has failed, and for the others at the end.
PATIENCE_S = 10.0
RETRY_S = 0.5
# Sums that may fail in a row before the run does; a rank that returns may fail again in the same sum.
MOST_ATTEMPTS = 8
_MOST_STRANGERS = 64
_KEY = "gradwire/coordinator"


class MembershipError(RuntimeError):
    """This rank cannot take part, or too few ranks are left; the message is one sentence for the user."""


class RunEnded(Exception):
    """Rank 0 has ended the run, so this rank has nothing left to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """What a rank needs to find the others.

    Attributes:
        rank: number of this rank.
        world_size: number of ranks if none is lost.
        store: rendezvous store that all ranks can reach, also those that start later.
        host: this machine's address as others see it.
        digest: identifies the run; a rank of another run is refused.
        timeout_s: longest wait for the first start of all ranks, or for a quorum, in seconds.
    """

    rank: int
    world_size: int
    store: Store
    host: str
    digest: str
    timeout_s: float

    @property
    def sum_timeout_s(self) -> float:
        """Return the longest wait in a sum, after which the others repeat it before the launcher ends a silent run."""
        return self.timeout_s / 2


@dataclasses.dataclass(frozen=True)
class Members:
    """The ranks that take part in an exchange, in order; another generation means new connections between them."""

    generation: int
    ranks: Sequence[int]


class Membership(abc.ABC):
    """One rank's view of who takes part in the exchanges.

    Attributes:
        num_lost, num_returned: how many times a rank was lost or left out, and joined again; known to rank 0.
    """

    num_lost = 0
    num_returned = 0

    @abc.abstractmethod
    def join(self, state: Callable[[int], bytes]) -> bytes | None:
        """Join the run; return the state from which this rank starts, or None on rank 0, which begins the run.

        Args:
            state: returns the state with which a rank joins before the exchange of a number; rank 0 calls it.

        Raises:
            MembershipError: the ranks did not start in time, or rank 0 refuses this one.
            TransportError: rank 0 does not answer.
        """

    @abc.abstractmethod
    def begin(self, exchange: int, steps: int) -> Members:
        """Announce that this rank is ready for an exchange, and return who takes part in it.

        Args:
            exchange: number of the exchange.
            steps: steps that this rank has made since it joined.

        Raises:
            MembershipError: this rank came too late, or fewer ranks than the quorum are left.
            RunEnded: rank 0 has ended the run.
            TransportError: rank 0 is lost.
        """

    @abc.abstractmethod
    def agree(self, problem: str | None) -> bool:
        """Return True if the sum succeeded on all members that are still there; otherwise call `begin` again.

        Args:
            problem: why it failed on this rank; None if it succeeded. The errors are those of `begin`.
        """

    def admit(self) -> None:  # noqa: B027 - the task of rank 0
        """Send the state to the ranks that wait to join; call this after an exchange."""

    @abc.abstractmethod
    def share_figures(self, step: int, own: dict[str, Any], steps: int) -> tuple[list[dict[str, Any]], int]:
        """Send this rank's figures to rank 0, which returns those of all ranks that are there, its own first.

        Other ranks return their own. Figures that do not come within the deadline are left out.

        Args:
            step: the step of the run that the figures are of.
            own: values that JSON can hold.
            steps: steps that this rank has made since it joined.

        Returns:
            The figures, and the steps of the ranks that are lost or late, as far as they have told rank 0.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the run; rank 0 ends it for the others, too."""

    @abc.abstractmethod
    def disconnect(self) -> None:
        """Close all channels without a word, as the end of the process does."""


@dataclasses.dataclass(eq=False, kw_only=True)
class _Peer:
    """Another rank, as rank 0 sees it.

    Attributes:
        status: "stranger" before it has greeted, "waiting" to join, "member", or "late" after it was left out.
        since: the number of the first exchange in which it can take part.
        ready: the number of the exchange for which it is ready; None while it trains.
        problem: why its last sum failed, "" if it succeeded, None until it says so.
        steps: steps that it has made since it joined.
    """

    channel: Channel
    status: Literal["stranger", "waiting", "member", "late"] = "stranger"
    rank: int = -1
    since: int = 0
    ready: int | None = None
    problem: str | None = None
    steps: int = 0


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


class Coordinator(Membership):
    """Rank 0: decide who takes part, and admit ranks that start.

    Args:
        meeting: how to find the other ranks.
        options: quorum and deadline.
        ledger: counts the messages of rank 0.
        say: called with a sentence when a rank is lost or returns.
    """

    def __init__(
        self, meeting: Meeting, options: LocalOptions, ledger: Ledger, say: Callable[[str], None] = _say
    ) -> None:
        self._meeting, self._options, self._ledger, self._say = meeting, options, ledger, say
        family = socket.AF_INET6 if ":" in meeting.host else socket.AF_INET
        self._listener = socket.create_server((meeting.host, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._token, self._answer = secrets.token_hex(32), secrets.token_hex(32)
        address = self._listener.getsockname()[:2]
        meeting.store.set(_KEY, json.dumps([*address, self._token, self._answer]))
        self._peers: list[_Peer] = []
        self._ever: list[_Peer] = []  # all that were members at any time
        self._figures: dict[int, dict[_Peer, dict[str, Any]]] = collections.defaultdict(dict)  # by step
        self._exchange = 0  # the next exchange
        self._generation = 0
        self._connected: list[_Peer] | None = None  # the members that have connections to each other
        self._attempts = 0
        self._has_begun = self._is_over = False

    @override
    def join(self, state: Callable[[int], bytes]) -> None:
        self._state = state
        limit = time.monotonic() + self._meeting.timeout_s
        everyone = set(range(1, self._meeting.world_size))
        while missing := everyone - {peer.rank for peer in self._with("waiting")}:
            if time.monotonic() >= limit:
                raise MembershipError(
                    f"{_named(missing)} did not join within {self._meeting.timeout_s:g} s (--timeout)"
                )
            self._poll(limit)
        self._admit_waiting()
        self._has_begun = True

    @override
    def begin(self, exchange: int, steps: int) -> Members:
        self._exchange = exchange
        self._await_quorum()
        members = self._with("member")
        if members != self._connected:
            self._generation += 1
        self._connected = members
        ranks = [0, *(peer.rank for peer in members)]
        for peer in members:
            peer.ready = peer.problem = None
            self._send(peer, "go", generation=self._generation, ranks=ranks)
        return Members(self._generation, ranks)

    @override
    def agree(self, problem: str | None) -> bool:
        members = list(self._connected or ())
        problems = [] if problem is None else [problem]
        limit = time.monotonic() + (self._meeting.sum_timeout_s if problem is None else PATIENCE_S)
        while awaited := [peer for peer in self._with("member") if peer.problem is None]:
            if time.monotonic() >= limit:
                for peer in awaited:
                    self._leave_out(peer)
                break
            self._poll(limit)
            if any(peer.problem for peer in members):
                limit = min(limit, time.monotonic() + PATIENCE_S)
        left = self._with("member")
        problems += [peer.problem for peer in left if peer.problem]
        if problems:
            self._connected = None  # one broken connection has closed them all
            self._attempts += 1
            if self._attempts == MOST_ATTEMPTS:
                raise MembershipError(
                    f"exchange {self._exchange} has failed {MOST_ATTEMPTS} times; the last time, {problems[0]}"
                )
        else:
            self._exchange, self._attempts = self._exchange + 1, 0
        for peer in left:
            self._send(peer, "again" if problems else "commit")
        return not problems

    @override
    def admit(self) -> None:
        while self._poll(0):
            pass
        self._admit_waiting()

    @override
    def share_figures(self, step: int, own: dict[str, Any], steps: int) -> tuple[list[dict[str, Any]], int]:
        limit = time.monotonic() + self._options.deadline
        while self._lack_figures(step) and time.monotonic() < limit:
            self._poll(limit)
        of_step = self._figures[step]
        for earlier in [each for each in self._figures if each <= step]:
            del self._figures[earlier]
        figures = [of_step[peer] for peer in sorted(of_step, key=lambda peer: peer.rank)]
        return [own, *figures], sum(peer.steps for peer in self._ever if peer not in of_step)

    @override
    def close(self) -> None:
        self._is_over = True
        for peer in [*self._with("member"), *self._with("waiting")]:
            self._send(peer, "end")
        limit = time.monotonic() + PATIENCE_S
        while len(self._peers) > len(self._with("stranger")) and time.monotonic() < limit:
            self._poll(limit)  # whatever a rank asks for now, the answer was sent
        self.disconnect()

    @override
    def disconnect(self) -> None:
        for peer in list(self._peers):
            self._drop(peer)
        self._selector.close()
        self._listener.close()

    def _with(self, status: str) -> list[_Peer]:
        """Return the peers with this status, in rank order."""
        return sorted((peer for peer in self._peers if peer.status == status), key=lambda peer: peer.rank)

    def _await_quorum(self) -> None:
        """Wait until all members are ready; or, once a quorum is, until the deadline, and leave out the others.

        Raises:
            MembershipError: no quorum was ready in time.
        """
        quorum, seconds = self._options.quorum, self._meeting.timeout_s
        last = time.monotonic() + seconds
        limit = last
        while True:
            members = self._with("member")
            awaited = [peer for peer in members if peer.ready != self._exchange]
            num_ready = 1 + len(members) - len(awaited)
            if num_ready >= quorum and not awaited:
                return
            if num_ready < quorum:
                limit = last
            elif limit == last:
                limit = min(last, time.monotonic() + self._options.deadline)
            if time.monotonic() < limit:
                if 1 + len(members) < quorum:
                    self._admit_waiting()
                self._poll(limit)
            elif num_ready >= quorum:
                for peer in awaited:
                    self._leave_out(peer)
            else:
                absent = set(range(self._meeting.world_size)) - {0, *(p.rank for p in members if p not in awaited)}
                raise MembershipError(
                    f"exchange {self._exchange} needs {quorum} ranks (quorum), and {_named(absent)} did not come "
                    f"within {seconds:g} s (--timeout)"
                )

    def _lack_figures(self, step: int) -> bool:
        expected = [peer for peer in self._with("member") if peer.since * self._options.interval < step]
        return any(peer not in self._figures[step] for peer in expected)

    def _admit_waiting(self) -> None:
        if waiting := self._with("waiting"):
            body = self._state(self._exchange)
            for peer in waiting:
                peer.status, peer.since = "member", self._exchange
                self._ever.append(peer)
                if self._has_begun:
                    self.num_returned += 1
                    self._say(f"rank {peer.rank} returns before exchange {self._exchange}")
                self._send(peer, "state", body, purpose="state", answer=self._answer)

    def _poll(self, limit: float) -> bool:
        """Wait for messages until a time of `time.monotonic`, and take those that have come; return False if none."""
        events = self._selector.select(max(0.0, limit - time.monotonic()))
        for key, _ in events:
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._peers:  # not dropped since
                self._read(key.data)
        return bool(events)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the connection is already closed
            return
        peer = _Peer(channel=Channel(sock, self._ledger, is_trusted=False))
        self._peers.append(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)
        if len(strangers := [each for each in self._peers if each.status == "stranger"]) > _MOST_STRANGERS:
            self._drop(strangers[0])

    def _read(self, peer: _Peer) -> None:
        try:
            for message in peer.channel.arrived():
                self._take(peer, message)
        except (OSError, ValueError, RecursionError):  # closed, or another program's nonsense
            self._lose(peer, "its connection is closed")

    def _take(self, peer: _Peer, message: Message) -> None:
        values = message.values
        if peer.status == "stranger":
            token = str(values.get("token")).encode()
            if message.kind == "hello" and hmac.compare_digest(token, self._token.encode()):
                self._greet(peer, values)
            else:
                self._drop(peer)
        elif message.kind == "bye":
            self._drop(peer)
        elif peer.status == "late":
            if message.kind in ("ready", "summed"):
                self._send(peer, "left_out", deadline=self._options.deadline)
        elif message.kind == "ready":
            peer.ready, peer.steps = values["exchange"], values["steps"]
        elif message.kind == "summed":
            peer.problem = values["problem"] or ""
        elif message.kind == "figures":
            self._figures[values["step"]][peer] = values["figures"]
            peer.steps = values["steps"]

    def _greet(self, peer: _Peer, values: dict[str, Any]) -> None:
        peer.rank = values["rank"]
        peer.channel.is_trusted = True
        if values["digest"] != self._meeting.digest or not 0 < peer.rank < self._meeting.world_size:
            self._send(peer, "refused", answer=self._answer)
            self._drop(peer)
            return
        for former in [each for each in self._peers if each.rank == peer.rank and each is not peer]:
            self._lose(former, "it started again")
        peer.status = "waiting"
        if self._is_over:
            self._send(peer, "end", answer=self._answer)

    def _send(self, peer: _Peer, kind: str, body: bytes = b"", **values: Any) -> None:
        try:
            peer.channel.send(kind, body, **values)
        except OSError:
            self._lose(peer, "it takes no messages")

    def _lose(self, peer: _Peer, why: str) -> None:
        if peer not in self._peers:
            return
        if peer.status == "member" and not self._is_over:
            self.num_lost += 1
            self._say(f"rank {peer.rank} is lost before exchange {self._exchange} is done: {why}")
        self._drop(peer)

    def _leave_out(self, peer: _Peer) -> None:
        self.num_lost += 1
        self._say(f"rank {peer.rank} is late for exchange {self._exchange}, which goes on without it")
        peer.status = "late"

    def _drop(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        self._selector.unregister(peer.channel.sock)
        peer.channel.close()


class Member(Membership):
    """Any rank but 0: follow the decisions of rank 0.

    Args:
        meeting: how to find rank 0.
        ledger: counts the messages of this rank.
    """

    def __init__(self, meeting: Meeting, ledger: Ledger) -> None:
        self._meeting, self._ledger = meeting, ledger
        self._channel: Channel | None = None

    @override
    def join(self, state: Callable[[int], bytes]) -> bytes:
        meeting = self._meeting
        try:
            meeting.store.wait([_KEY], datetime.timedelta(seconds=meeting.timeout_s))
            host, port, token, answer = json.loads(meeting.store.get(_KEY))
            sock = _connected((host, port), time.monotonic() + meeting.timeout_s)
        except (RuntimeError, OSError) as error:
            raise TransportError(f"rank {meeting.rank} cannot reach rank 0: {error}", lost_rank=0) from error
        self._channel = Channel(sock, self._ledger, is_trusted=True)
        self._send("hello", rank=meeting.rank, token=token, digest=meeting.digest)
        message = self._receive()
        if not hmac.compare_digest(str(message.values.get("answer")).encode(), answer.encode()):
            raise TransportError(f"another program answers rank {meeting.rank} at the address of rank 0", lost_rank=0)
        return message.body

    @override
    def begin(self, exchange: int, steps: int) -> Members:
        self._send("ready", exchange=exchange, steps=steps)
        values = self._receive().values
        return Members(values["generation"], values["ranks"])

    @override
    def agree(self, problem: str | None) -> bool:
        self._send("summed", problem=problem)
        return self._receive().kind == "commit"

    @override
    def share_figures(self, step: int, own: dict[str, Any], steps: int) -> tuple[list[dict[str, Any]], int]:
        self._send("figures", purpose=None, step=step, figures=own, steps=steps)
        return [own], 0

    @override
    def close(self) -> None:
        self._send("bye")
        self.disconnect()

    @override
    def disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _send(self, kind: str, **values: Any) -> None:
        assert self._channel is not None
        with contextlib.suppress(OSError):  # the next message that is received says what has happened, or none comes
            self._channel.send(kind, **values)

    def _receive(self) -> Message:
        assert self._channel is not None
        rank = self._meeting.rank
        try:
            message = self._channel.receive()
        except OSError as error:
            raise TransportError(
                f"rank {rank} lost rank 0, which decides who takes part in exchanges ({error})", lost_rank=0
            ) from error
        match message.kind:
            case "end":
                raise RunEnded
            case "refused":
                raise MembershipError(
                    f"rank {rank} belongs to another run than rank 0: the machines have different options or data; use "
                    "the same command on each"
                )
            case "left_out":
                raise MembershipError(
                    f"rank {rank} came more than {message.values['deadline']:g} s (deadline) after the quorum and was "
                    "left out"
                )
        return message


def _connected(address: tuple[str, int], limit: float) -> socket.socket:
    """Connect to rank 0; try again until a time of `time.monotonic`, because this rank's own link may come back."""
    while True:
        try:
            return socket.create_connection(address, PATIENCE_S)
        except ConnectionRefusedError:  # rank 0 has ended
            raise
        except OSError:
            if time.monotonic() >= limit:
                raise
        time.sleep(RETRY_S)


def _named(ranks: Iterable[int]) -> str:
    *others, last = (f"rank {rank}" for rank in sorted(ranks))
    return f"{', '.join(others)} and {last}" if others else last
