"""`Coordinator`: rank 0 decides who takes part in each exchange, and admits ranks that start (see `membership.py`).

The coordinator runs in rank 0's training thread, during exchanges and evaluations. At other times, the kernel buffers
what other ranks send.
"""

import collections
import dataclasses
import errno
import hmac
import json
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

from typing_extensions import override

from bench.extensions.elastic.channel import Channel, MembershipMessage
from bench.extensions.elastic.membership import COORDINATOR_KEY, Membership, Participants, Rendezvous
from collectives.transport.base import Ledger, MembershipError

# The run fails when an exchange has failed this many times. A rank that returns may fail again in the same exchange.
MOST_ATTEMPTS = 8
_MOST_STRANGERS, _MOST_POLLS = 64, 1024
# Seconds for which rank 0 waits for a rank that takes no part of a message.
STALL_S = 10.0
# Seconds for which rank 0 waits for the reports of the other members once a sum has failed.
REPORTS_S = 10.0
# Seconds for which rank 0 waits for the other ranks to leave at the end of the run.
FAREWELL_S = 10.0


@dataclasses.dataclass(eq=False, kw_only=True)
class _Peer:
    """Another rank, as rank 0 sees it.

    Attributes:
        status: "stranger" until the rank names itself, "waiting" to join, "member", or "late" after it was left out.
        since: number of the first exchange in which the rank can take part.
        ready: number of the exchange for which the rank is ready; None while it trains.
        problem: why the rank's last sum failed; "" if the sum succeeded; None until the rank has reported.
        steps: number of steps that the rank has made since it joined.
        why_late: a sentence that says why the rank was left out; "" if it was not.
    """

    channel: Channel
    status: Literal["stranger", "waiting", "member", "late"] = "stranger"
    rank: int = -1
    since: int = 0
    ready: int | None = None
    problem: str | None = None
    steps: int = 0
    why_late: str = ""


def _log(sentence: str) -> None:
    """Write a sentence into the log of rank 0."""
    print(sentence, file=sys.stderr, flush=True)


class Coordinator(Membership):
    """The membership on rank 0: decide which ranks take part in exchanges, and admit ranks that start.

    Args:
        rendezvous: tells how to find the other ranks, and gives quorum and deadline.
        ledger: counts the messages of rank 0.
        state: given the number of the next exchange, returns the state from which a rank that joins starts.
        while_waiting: called at least once a second while rank 0 waits for other ranks.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        ledger: Ledger,
        *,
        state: Callable[[int], bytes],
        while_waiting: Callable[[], None],
    ) -> None:
        self._rendezvous, self._ledger = rendezvous, ledger
        self._state, self._while_waiting = state, while_waiting
        family = socket.AF_INET6 if ":" in rendezvous.host else socket.AF_INET
        self._listener = socket.create_server((rendezvous.host, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._token, self._answer = secrets.token_hex(32), secrets.token_hex(32)
        address = self._listener.getsockname()[:2]
        rendezvous.store.set(COORDINATOR_KEY, json.dumps([*address, self._token, self._answer]))
        self._peers: list[_Peer] = []
        self._all_members: list[_Peer] = []  # the peers that were members at any time
        self._figures: dict[int, dict[_Peer, dict[str, Any]]] = collections.defaultdict(dict)  # by step
        self._exchange = 0  # number of the next exchange
        self._generation = 0
        self._connected: list[_Peer] | None = None  # the members that have connections to each other
        self._attempts = 0
        self._has_begun = self._is_over = False

    @override
    def join(self) -> None:
        limit = time.monotonic() + self._rendezvous.timeout_s
        everyone = set(range(1, self._rendezvous.world_size))
        while missing := everyone - {peer.rank for peer in self._with("waiting")}:
            if time.monotonic() >= limit:
                raise MembershipError(
                    f"{_named(missing)} did not join within {self._rendezvous.timeout_s:g} s (--timeout)"
                )
            self._poll(limit)
        self._admit_waiting()
        self._has_begun = True

    @override
    def begin(self, exchange: int, steps: int) -> Participants:
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
        return Participants(self._generation, ranks)

    @override
    def agree(self, problem: str | None) -> bool:
        members = list(self._connected or ())
        problems = [] if problem is None else [problem]
        limit = time.monotonic() + (self._rendezvous.sum_timeout_s if problem is None else REPORTS_S)
        while self._summing():
            if time.monotonic() < limit:
                self._poll(limit)
            else:
                self._take_arrived()
                for peer in self._summing():
                    self._leave_out(peer, "which did not say in time whether its sum succeeded")
            if any(peer.problem for peer in members):
                limit = min(limit, time.monotonic() + REPORTS_S)
        left = self._with("member")
        problems += [peer.problem for peer in left if peer.problem]
        if problems:
            self._connected = None  # one broken connection has closed all connections
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
        self._take_arrived()
        self._admit_waiting()

    @override
    def share_figures(self, step: int, own: dict[str, Any], steps: int) -> tuple[list[dict[str, Any]], int]:
        limit = time.monotonic() + self._rendezvous.deadline_s
        while self._lack_figures(step) and time.monotonic() < limit:
            self._poll(limit)
        of_step = self._figures[step]
        for earlier in [each for each in self._figures if each <= step]:
            del self._figures[earlier]
        figures = [of_step[peer] for peer in sorted(of_step, key=lambda peer: peer.rank)]
        return [own, *figures], sum(peer.steps for peer in self._all_members if peer not in of_step)

    @override
    def close(self) -> None:
        self._is_over = True
        for peer in [*self._with("member"), *self._with("waiting")]:
            self._send(peer, "end", answer=self._answer)
        limit = time.monotonic() + FAREWELL_S
        while len(self._peers) > len(self._with("stranger")) and time.monotonic() < limit:
            self._poll(limit)  # "end", sent above, answers whatever a rank asks for now
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

    def _summing(self) -> list[_Peer]:
        """Return the members that have not yet reported whether their sum succeeded."""
        return [peer for peer in self._with("member") if peer.problem is None]

    def _await_quorum(self) -> None:
        """Wait until all members are ready, or until the deadline once a quorum is ready; leave out late members.

        Raises:
            MembershipError: no quorum was ready in time.
        """
        quorum, seconds = self._rendezvous.quorum, self._rendezvous.timeout_s
        last = time.monotonic() + seconds
        limit = last
        while True:
            if (now := time.monotonic()) >= limit:
                self._take_arrived()  # what came while rank 0 was busy is not late
            members = self._with("member")
            awaited = [peer for peer in members if peer.ready != self._exchange]
            num_ready = 1 + len(members) - len(awaited)
            if num_ready >= quorum and not awaited:
                return
            if num_ready < quorum:
                limit = last
            elif limit == last:
                limit = min(last, now + self._rendezvous.deadline_s)
            if now < limit:
                if 1 + len(members) < quorum and self._admit_waiting():
                    limit = last = now + seconds  # time for the new members' steps until the exchange
                self._poll(limit)
            elif num_ready >= quorum:
                for peer in awaited:
                    self._leave_out(peer, f"which was late for it (deadline={self._rendezvous.deadline_s:g})")
            else:
                absent = set(range(self._rendezvous.world_size)) - {0, *(p.rank for p in members if p not in awaited)}
                raise MembershipError(
                    f"exchange {self._exchange} needs {quorum} ranks (quorum), and {_named(absent)} did not come "
                    f"within {seconds:g} s (--timeout)"
                )

    def _lack_figures(self, step: int) -> bool:
        expected = [peer for peer in self._with("member") if peer.since * self._rendezvous.interval < step]
        return any(peer not in self._figures[step] for peer in expected)

    def _admit_waiting(self) -> bool:
        """Send the state to the ranks that wait to join; return True if there were any."""
        if waiting := self._with("waiting"):
            body = self._state(self._exchange)
            for peer in waiting:
                peer.status, peer.since = "member", self._exchange
                self._all_members.append(peer)
                if self._has_begun:
                    self.num_returned += 1
                    _log(f"rank {peer.rank} returns before exchange {self._exchange}")
                purpose = "state" if self._has_begun else None  # equal first weights are not counted, as in other runs
                self._send(peer, "state", body, purpose=purpose, answer=self._answer)
        return bool(waiting)

    def _take_arrived(self) -> None:
        """Process the messages that have arrived; stop after `_MOST_POLLS` polls, as a program may send without end."""
        for _ in range(_MOST_POLLS):
            if not self._poll(0):
                return

    def _poll(self, limit: float) -> bool:
        """Wait for messages until `limit` (a time of `time.monotonic`), at most a second, and process the messages.

        Return True if anything has arrived, otherwise False.
        """
        self._while_waiting()
        events = self._selector.select(max(0.0, min(limit - time.monotonic(), 1.0)))
        for key, _ in events:
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._peers:  # not dropped since
                self._read(key.data)
        return bool(events)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return  # the connection is already closed
        send_s = self._rendezvous.sum_timeout_s
        peer = _Peer(channel=Channel(sock, self._ledger, is_trusted=False, send_s=send_s, stall_s=STALL_S))
        self._peers.append(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)
        if len(strangers := [each for each in self._peers if each.status == "stranger"]) > _MOST_STRANGERS:
            self._drop(strangers[0])

    def _read(self, peer: _Peer) -> None:
        try:
            for message in peer.channel.arrived():
                if peer in self._peers:  # the previous message may have ended the connection
                    self._take(peer, message)
        except (OSError, ValueError, RecursionError):  # closed, or another program sent something invalid
            self._lose(peer, "its connection is closed")

    def _take(self, peer: _Peer, message: MembershipMessage) -> None:
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
                self._send(peer, "left_out", why=peer.why_late)
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
        if values["digest"] != self._rendezvous.digest or not 0 < peer.rank < self._rendezvous.world_size:
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
        if peer in self._peers and peer.status == "member" and not self._is_over:
            self.num_lost += 1
            _log(f"rank {peer.rank} is lost before exchange {self._exchange} is done: {why}")
        self._drop(peer)

    def _leave_out(self, peer: _Peer, why: str) -> None:
        self.num_lost += 1
        peer.status = "late"
        peer.why_late = f"exchange {self._exchange} goes on without rank {peer.rank}, {why}"
        _log(peer.why_late)

    def _drop(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        self._selector.unregister(peer.channel.sock)
        peer.channel.close()


def _named(ranks: Iterable[int]) -> str:
    *others, last = (f"rank {rank}" for rank in sorted(ranks))
    return f"{', '.join(others)} and {last}" if others else last
