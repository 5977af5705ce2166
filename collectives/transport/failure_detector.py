"""Who is still there: every rank has a ping server, and one that waited in vain pings all others.

It knows only whom it waited for, and that neighbour may itself be waiting. Who does not answer is lost. If all answer,
somebody is merely late, found by following who waits for whom. In the rendezvous store ranks leave where their ping
servers are, whom they wait for, and their verdict: the first one stands, so that all name the same rank even when those
that failed first have already left.

The store lies on one rank's machine. Where it does not answer, no verdict can be left for others, so a rank keeps its
ping server open a little longer for those that fail a little later.
"""

from __future__ import annotations

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
_RETRY_S = 0.1

Address = tuple[str, int]
"""(host, port)"""


class PingServer:
    """Answers whoever connects, in a thread of its own, until it is closed.

    Args:
        host: this machine's address; the port is any free one.

    Attributes:
        address: where others can connect.

    Raises:
        OSError: the machine gives no port at that address.
    """

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: Address = (host, self._server.getsockname()[1])
        self._closed = threading.Event()
        threading.Thread(target=self._answer, name="ping_server", daemon=True).start()

    def close(self) -> None:
        """Give the port back; whoever connects from now on is refused."""
        self._closed.set()
        with contextlib.suppress(OSError):  # wakes the thread on Linux; where it may not be called, closing does
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _answer(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed, or short of something that may be free again soon, such as open files
                self._closed.wait(_RETRY_S)
                continue
            with connection, contextlib.suppress(OSError):  # whoever connected may have left
                connection.sendall(_ANSWER)


def ping_all(addresses: Mapping[int, Address], within_s: float) -> dict[int, bool]:
    """By rank, whether its process answers; ranks whose machine is out of reach are left out.

    A machine is in reach also where it refuses the connection, or takes it for a process that was stopped.

    Args:
        addresses: where each rank's ping server is.
        within_s: longest wait for an answer.
    """
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        answers = list(pool.map(lambda address: _ping(address, within_s / 2), addresses.values()))
    return {rank: answer for rank, answer in zip(addresses, answers, strict=True) if answer is not None}


def _ping(address: Address, timeout_s: float) -> bool | None:
    """Whether the process answers; None where its machine is out of reach."""
    try:
        connection = socket.create_connection(address, timeout_s)
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    with connection, contextlib.suppress(OSError):  # silence, or a connection that is reset, is no answer
        return connection.recv(1) == _ANSWER
    return False


def own_host(meeting_point: str) -> str:
    """This machine's address as others see it: that from which it reaches the host where all ranks meet.

    Loopback where there is no way to it, as gloo has it: then no other machine takes part.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(meeting_point, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


GRACE_S = 4.0
"""longest wait for a ping's answer from a busy machine; other waits are shares of it"""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a failed wait.

    Attributes:
        lost: ranks that do not answer any more.
        late: a rank that answers but did not take part in time; None where some are lost or none is to be named.
        is_cut_off: none of several other machines is in reach, so it is rather this rank that has lost its link.
        is_split: the only other machine is out of reach, and nothing tells whose link is down.
    """

    lost: tuple[int, ...] = ()
    late: int | None = None
    is_cut_off: bool = False
    is_split: bool = False


class FailureDetector:
    """One rank's part in finding out who is lost: from now on it answers pings.

    Args:
        store: shared by all ranks; used by nothing else through this object.
        rank: this one.
        host: this machine's address as others see it.
        grace_s: longest wait for a ping's answer.

    Raises:
        OSError: the machine gives no port at that address.
    """

    def __init__(self, store: Store, rank: int, host: str, *, grace_s: float = GRACE_S) -> None:
        self._store = PrefixStore("gradwire/failure_detector", store)
        self._rank = rank
        self._grace_s = grace_s
        self._ping_server = PingServer(host)
        self._addresses: dict[int, Address] = {}
        self._append("ping_servers", [rank, *self._ping_server.address])

    @property
    def host(self) -> str:
        """This machine's address, as given."""
        return self._ping_server.address[0]

    def stop(self) -> None:
        """Answer no more."""
        self._ping_server.close()

    def publish(self, world_size: int) -> None:
        """Announce this rank, wait up to `grace_s` for the others, and read the addresses of their ping servers."""
        if self._store.add("num_joined", 1) >= world_size:
            self._store.set("all_joined", "")
        with contextlib.suppress(RuntimeError):  # only some may ever join; those that have are known
            self._store.wait(["all_joined"], datetime.timedelta(seconds=self._grace_s))
        self._addresses = self._read_addresses()

    def find_lost(self, group: str, ranks: Sequence[int], waited_for: int | None) -> Verdict | None:
        """Find out why a wait failed; takes up to about two grace periods.

        Args:
            group: names the process group, which is of no use after its first failure.
            ranks: its members, as numbers of the whole job.
            waited_for: whom this rank waited for; None if for all of them.

        Returns:
            None where it cannot be found out: the store is out of reach, and so are the addresses it would have given.
        """
        addresses = _within(self._grace_s / 2, lambda: self._announce(group, waited_for))
        has_store = addresses is not None
        self._addresses = addresses or self._addresses
        time.sleep(self._grace_s / 4)  # others announce whom they wait for, and who is about to end has ended
        verdict = self._ping([rank for rank in ranks if rank != self._rank], waited_for, all_joined=has_store)
        if not has_store:
            time.sleep(self._grace_s / 2)  # those that fail a little later shall still reach this rank
            return verdict
        if verdict is None or verdict.is_cut_off or verdict.is_split:
            return verdict  # this rank's own view, on which others need not agree
        return _within(self._grace_s / 2, lambda: self._agree(group, verdict, waited_for)) or verdict

    def _announce(self, group: str, waited_for: int | None) -> dict[int, Address]:
        """Say whom this rank waits for; returns the addresses of all that have joined."""
        self._append(f"{group}/waits", [self._rank, waited_for])
        return self._read_addresses()

    def _ping(self, others: Sequence[int], waited_for: int | None, *, all_joined: bool) -> Verdict | None:
        """The verdict by ping servers.

        Args:
            others: whom to ping.
            waited_for: whom this rank waited for.
            all_joined: who is not known has not joined, and counts as lost; else it only cannot be asked.
        """
        addresses = {rank: self._addresses[rank] for rank in others if rank in self._addresses}
        answers = ping_all(addresses, self._grace_s)
        lost = tuple(rank for rank in (others if all_joined else addresses) if not answers.get(rank))
        if lost:
            own = self._ping_server.address[0]
            elsewhere = {rank: host for rank, (host, _) in addresses.items() if host != own}
            dark = set() if elsewhere.keys() & answers.keys() else set(elsewhere.values())
            return Verdict(lost=lost, is_cut_off=len(dark) > 1, is_split=len(dark) == 1)
        if waited_for in answers:
            return Verdict(late=waited_for)
        return Verdict() if len(answers) == len(others) else None

    def _agree(self, group: str, verdict: Verdict, waited_for: int | None) -> Verdict:
        """The first rank's verdict, which stands for all but the one that it calls late."""
        if not verdict.lost:
            verdict = Verdict(late=self._end_of_chain(group, waited_for))
        own = "" if verdict == Verdict() else json.dumps([verdict.lost, verdict.late])
        first = self._store.compare_set(f"{group}/verdict", "", own)
        lost, late = json.loads(first or "[[], null]")
        return verdict if late == self._rank else Verdict(lost=tuple(lost), late=late)

    def _end_of_chain(self, group: str, waited_for: int | None) -> int | None:
        """The rank that others wait for and that waits for nobody."""
        waits = dict(self._entries(f"{group}/waits"))
        seen = [self._rank]
        while waited_for is not None and waited_for not in seen:
            seen.append(waited_for)
            waited_for = waits.get(waited_for)
        return seen[-1] if len(seen) > 1 else None

    def _read_addresses(self) -> dict[int, Address]:
        return {rank: (host, port) for rank, host, port in self._entries("ping_servers")}

    def _append(self, key: str, entry: list[Any]) -> None:
        self._store.append(key, json.dumps(entry) + "\n")  # type: ignore[attr-defined]

    def _entries(self, key: str) -> list[list[Any]]:
        """What ranks appended under a key to which this one has appended: one round trip, however many there are."""
        return [json.loads(line) for line in self._store.get(key).splitlines()]


_joined: list[tuple[Store, FailureDetector]] = []


def failure_detector() -> FailureDetector:
    """This process's failure detector for the job that `init_process_group` made it part of.

    The first call waits until all ranks have called, up to `GRACE_S`.
    """
    store = _get_default_store()
    if not _joined or _joined[0][0] is not store:
        for _, former in _joined:
            former.stop()
        detector = FailureDetector(store.clone(), dist.get_rank(), interface_host(own_host(_meeting_point(store))))
        detector.publish(dist.get_world_size())
        _joined[:] = [(store, detector)]
    return _joined[0][1]


def _meeting_point(store: Store) -> str:
    """The machine that all ranks can reach; where they meet in a file each its own, on the interface that gloo uses."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return store.host
    return "localhost" if os.environ.get("GLOO_SOCKET_IFNAME") == "lo" else socket.gethostname()


def _within(limit_s: float, ask: Callable[[], T]) -> T | None:
    """What `ask` returns; None if it fails or takes longer: a store out of reach may keep a caller for minutes."""
    answers: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the store refuses connections: as good as no answer
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else None
