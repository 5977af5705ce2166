"""Failure detector: every rank runs a ping server, and a rank whose wait timed out pings all other ranks.

When a wait times out, a rank knows only the peer it waited for, which may itself be waiting for another rank. A rank
that does not answer pings is lost. If all ranks answer, one of them is only late; it is found by following the chain of
waits. Each rank writes three things into the rendezvous store: the address of its ping server, the peer it waits for,
and its verdict. The first verdict counts, so all ranks name the same rank, even if the first ranks to fail have exited.

The store runs on the machine of one rank. If the store does not answer, ranks cannot share a verdict; a rank then keeps
its ping server open a little longer, for ranks that fail a little later.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from collectives.transport.rendezvous import interface_host

_ANSWER = b"."

Address = tuple[str, int]  # (host, port)


class PingServer:
    """A server that answers every connection with one byte, in its own thread, until it is closed.

    Args:
        host: this machine's address; the server chooses a free port.

    Attributes:
        address: the address to connect to.

    Raises:
        OSError: this machine cannot listen at that address.
    """

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: Address = (host, self._server.getsockname()[1])
        self._closed = threading.Event()
        threading.Thread(target=self._answer, name="ping_server", daemon=True).start()

    def close(self) -> None:
        """Stop the server; later connections are refused."""
        self._closed.set()
        with contextlib.suppress(OSError):  # wakes the thread on Linux; on other systems `close` wakes it
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _answer(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed, or a temporary shortage, such as too many open files
                self._closed.wait(0.1)
                continue
            with connection, contextlib.suppress(OSError):  # the caller may already have disconnected
                connection.sendall(_ANSWER)


def ping_all(addresses: Mapping[int, Address], within_s: float) -> dict[int, bool]:
    """Ping ranks; return, for each rank whose machine is reachable, True if its process answers and False if not.

    A machine also counts as reachable if it refuses the connection, or accepts it for a process that is stopped.

    Args:
        addresses: address of each rank's ping server.
        within_s: longest wait for an answer, in seconds.
    """
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        answers = list(pool.map(lambda address: _ping(address, within_s / 2), addresses.values()))
    return {rank: answer for rank, answer in zip(addresses, answers, strict=True) if answer is not None}


def _ping(address: Address, timeout_s: float) -> bool | None:
    """Return True if the ping server at this address answers, False if not, and None if its machine is unreachable."""
    try:
        connection = socket.create_connection(address, timeout_s)
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    with connection, contextlib.suppress(OSError):  # a timeout or a reset connection is no answer
        return connection.recv(1) == _ANSWER
    return False


def own_host(meeting_point: str) -> str:
    """Return the address that this machine uses to reach host `meeting_point`; other machines see it as this address.

    If that host is unreachable, no other machine can take part, so the result is the loopback address, as in gloo.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(meeting_point, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def host_seen_by_others(store: Store) -> str:
    """Return this machine's address as seen by the other machines that use the same rendezvous store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    # if the store is not a TCP store: the address of this machine's name on the interface that gloo uses
    name = "localhost" if os.environ.get("GLOO_SOCKET_IFNAME") == "lo" else socket.gethostname()
    return interface_host(own_host(store.host if isinstance(store, TCPStore) else name))


GRACE_S = 4.0  # longest wait, in seconds, for a busy machine to answer a ping; other waits are fractions of it

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The cause of a failed wait for another rank.

    Attributes:
        lost: ranks that no longer answer pings.
        late: the rank that answers but did not take part in time; None if ranks are lost, or if the rank is unknown.
        is_cut_off: True if this rank reaches none of several other machines, so probably its own network link is down.
        is_split: True if there is one other machine and it is unreachable, so the link of either machine may be down.
    """

    lost: tuple[int, ...] = ()
    late: int | None = None
    is_cut_off: bool = False
    is_split: bool = False


class FailureDetector:
    """Answer pings from other ranks, and find out which rank is lost after a wait has failed.

    Args:
        store: rendezvous store that all ranks share; a clone of the store that only this object uses.
        rank: number of this rank.
        host: this machine's address as other machines see it.
        grace_s: longest wait for the answer to a ping, in seconds.

    Attributes:
        host: the argument `host`.
        ping_server: answers the other ranks' pings until it is closed.

    Raises:
        OSError: this machine cannot listen at that address.
    """

    def __init__(self, store: Store, rank: int, host: str, *, grace_s: float = GRACE_S) -> None:
        self._store = PrefixStore("gradwire/failure_detector", store)
        self._rank = rank
        self._grace_s = grace_s
        self.host = host
        self.ping_server = PingServer(host)
        self._addresses: dict[int, Address] = {}
        self._append("ping_servers", [rank, *self.ping_server.address])

    def publish(self, world_size: int) -> None:
        """Tell the other ranks that this rank has joined; wait up to `grace_s` for them, and read their addresses."""
        if self._store.add("num_joined", 1) >= world_size:
            self._store.set("all_joined", "")
        with contextlib.suppress(RuntimeError):  # timed out: use the addresses of the ranks that have joined
            self._store.wait(["all_joined"], datetime.timedelta(seconds=self._grace_s))
        self._addresses = self._read_addresses()

    def find_lost(self, group: str, ranks: Sequence[int], waited_for: int | None) -> Diagnosis | None:
        """Return the cause of a failed wait; takes up to about twice `grace_s`.

        Args:
            group: name of the process group; it cannot be used after its first failure.
            ranks: the members of the process group, numbered among all ranks of the job.
            waited_for: the rank that this rank waited for; None if it waited for all members.

        Returns:
            The cause; None if it is unknown, because the store is unreachable and this rank does not know the address
            of every member.
        """
        addresses = _within(self._grace_s / 2, lambda: self._announce(group, waited_for))
        has_store = addresses is not None
        self._addresses = addresses or self._addresses
        time.sleep(self._grace_s / 4)  # time for others to announce their peers, and for failing ranks to exit
        verdict = self._ping([rank for rank in ranks if rank != self._rank], waited_for, all_joined=has_store)
        if not has_store:
            time.sleep(self._grace_s / 2)  # ranks that fail a little later can still ping this one
            return verdict
        if verdict is None or verdict.is_cut_off or verdict.is_split:
            return verdict  # valid for this rank only
        return _within(self._grace_s / 2, lambda: self._agree(group, verdict, waited_for)) or verdict

    def _announce(self, group: str, waited_for: int | None) -> dict[int, Address]:
        self._append(f"{group}/waits", [self._rank, waited_for])
        return self._read_addresses()

    def _ping(self, others: Sequence[int], waited_for: int | None, *, all_joined: bool) -> Diagnosis | None:
        """Ping other ranks; return the cause of the failed wait, or None if this rank cannot know it.

        Args:
            others: ranks to ping.
            waited_for: the rank that this rank waited for; None if it waited for all of them.
            all_joined: True if a rank without a known address counts as lost, because it has not joined; False if
                nothing is known about such a rank.
        """
        addresses = {rank: self._addresses[rank] for rank in others if rank in self._addresses}
        answers = ping_all(addresses, self._grace_s)
        lost = tuple(rank for rank in (others if all_joined else addresses) if not answers.get(rank))
        if lost:
            elsewhere = {rank: host for rank, (host, _) in addresses.items() if host != self.host}
            dark = set() if elsewhere.keys() & answers.keys() else set(elsewhere.values())
            return Diagnosis(lost=lost, is_cut_off=len(dark) > 1, is_split=len(dark) == 1)
        if waited_for in answers:
            return Diagnosis(late=waited_for)
        return Diagnosis() if len(answers) == len(others) else None

    def _agree(self, group: str, verdict: Diagnosis, waited_for: int | None) -> Diagnosis:
        """Return the diagnosis on which all ranks agree: the first that any rank wrote into the store.

        Args:
            group: name of the process group.
            verdict: this rank's own diagnosis; it is returned if the agreed diagnosis says that this rank is late.
            waited_for: the rank that this rank waited for; None if it waited for all of them.
        """
        if not verdict.lost:  # the late rank is the last in the chain of waits; None if this rank waited for all
            waits = dict(self._entries(f"{group}/waits"))
            chain = [self._rank]
            while waited_for is not None and waited_for not in chain:
                chain.append(waited_for)
                waited_for = waits.get(waited_for)
            verdict = Diagnosis(late=chain[-1] if len(chain) > 1 else None)
        own = "" if verdict == Diagnosis() else json.dumps([verdict.lost, verdict.late])
        first = self._store.compare_set(f"{group}/verdict", "", own)
        lost, late = json.loads(first or "[[], null]")
        return verdict if late == self._rank else Diagnosis(lost=tuple(lost), late=late)

    def _read_addresses(self) -> dict[int, Address]:
        return {rank: (host, port) for rank, host, port in self._entries("ping_servers")}

    def _append(self, key: str, entry: list[Any]) -> None:
        self._store.append(key, json.dumps(entry) + "\n")  # type: ignore[attr-defined]

    def _entries(self, key: str) -> list[list[Any]]:
        """Return the entries that all ranks appended to a key of the store; this rank must also have appended one."""
        return [json.loads(line) for line in self._store.get(key).splitlines()]


_joined: list[tuple[Store, FailureDetector]] = []


def failure_detector() -> FailureDetector:
    """Return this process's failure detector for the current default process group.

    The first call waits until all ranks have called this function, at most `GRACE_S` seconds.
    """
    store = _get_default_store()
    if not _joined or _joined[0][0] is not store:
        for _, former in _joined:
            former.ping_server.close()
        detector = FailureDetector(store.clone(), dist.get_rank(), host_seen_by_others(store))
        detector.publish(dist.get_world_size())
        _joined[:] = [(store, detector)]
    return _joined[0][1]


def _within(limit_s: float, ask: Callable[[], T]) -> T | None:
    """Return the result of calling `ask`; None if the call fails or takes longer than `limit_s` seconds.

    `ask` uses the rendezvous store; a call of an unreachable store can block for minutes.
    """
    answers: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the store refuses connections
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else None
