"""Who is still there: ranks answer a roll call over the rendezvous store, a connection that no message of theirs uses.

A rank whose wait failed knows only whom it waited for, and that neighbour may itself be waiting. So it calls the roll:
every rank has a thread that looks at the store once a second and answers for as long as its process runs and its link
is up. Who does not answer is lost. If all answer, somebody is merely late, found by following who waits for whom. The
first verdict stands, so that all ranks name the same one even when those that failed first have already left.

Where the store does not answer, or nobody on another machine, ranks ping each other directly
(`ping.py`), which tells whose link is down. Without a store no verdict can be left for others, so a
rank keeps its ping server open a little longer for those that fail a little later.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from collectives.transport.ping import Address, PingServer, ping_all, start_ping_server

POLL_S = 1.0
GRACE_S = 4.0
"""a running rank answers within POLL_S; the rest is for a busy machine"""

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
    """One rank's part in the roll calls.

    Args:
        store: shared by all ranks; used by nothing else through this object.
        rank: this one.
        world_size: number of ranks.
        ping_server: this rank's, where it has one; closed by `stop`.
        poll_s: seconds between looks at the store.
        grace_s: seconds within which a running rank answers.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        ping_server: PingServer | None = None,
        poll_s: float = POLL_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._store = PrefixStore("gradwire/failure_detector", store)
        self._rank = rank
        self._world_size = world_size
        self._ping_server = ping_server
        self._poll_s = poll_s
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._answered = -1
        self._ping_servers: dict[int, Address] = {}  # the others'
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._answer_calls, name="failure_detector", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread that the interpreter's end finds inside the store aborts the process

    def stop(self) -> None:
        """Answer no more."""
        atexit.unregister(self.stop)
        self._stopped.set()
        self._thread.join(self._grace_s)
        if self._ping_server is not None:
            self._ping_server.close()

    def find_lost(self, group: str, ranks: Sequence[int], waited_for: int | None) -> Verdict | None:
        """Find out why a wait failed; takes up to about three grace periods.

        Args:
            group: names the process group, which is of no use after its first failure.
            ranks: its members, as numbers of the whole job.
            waited_for: whom this rank waited for; None if for all of them.

        Returns:
            None where it cannot be found out: the store is out of reach, and so are the addresses it would have given.
        """
        found = _within(1.5 * self._grace_s, lambda: self._investigate(group, ranks, waited_for))
        elsewhere = set(ranks) - {self._rank, *self._on_this_machine()}
        if found is not None and not (elsewhere and elsewhere <= set(found.lost)):
            return found
        heard = self._ping(ranks, waited_for)
        if found is None:
            time.sleep(self._grace_s / 2)  # those that fail a little later shall still reach this rank
        return heard or found

    def _on_this_machine(self) -> set[int]:
        """The other ranks on this machine, which need no link."""
        own = self._ping_server and self._ping_server.address[0]
        return {rank for rank, (host, _) in self._ping_servers.items() if host == own}

    def _ping(self, ranks: Sequence[int], waited_for: int | None) -> Verdict | None:
        """The verdict by ping servers; who has none, or none that is known, was not asked and so is not called lost."""
        ping_servers = {rank: self._ping_servers[rank] for rank in ranks if rank in self._ping_servers}
        answers = ping_all(ping_servers, self._grace_s)
        missing = tuple(rank for rank in ping_servers if not answers.get(rank))
        if missing:
            elsewhere = ping_servers.keys() - self._on_this_machine()
            in_reach = {ping_servers[rank][0] for rank in elsewhere & answers.keys()}
            dark = {ping_servers[rank][0] for rank in elsewhere} if not in_reach else set()
            return Verdict(lost=missing, is_cut_off=len(dark) > 1, is_split=len(dark) == 1)
        if waited_for in answers:
            return Verdict(late=waited_for)
        return Verdict() if {self._rank, *answers} >= set(ranks) else None

    def _investigate(self, group: str, ranks: Sequence[int], waited_for: int | None) -> Verdict:
        if waited_for is not None:
            self._store.set(f"{group}/waits/{self._rank}", str(waited_for))
        (known,) = self._stored([f"{group}/lost"])
        if not known:
            missing = self._call_roll(ranks)
            if not missing:
                return Verdict(late=self._end_of_chain(group, ranks, waited_for))
            known = self._store.compare_set(f"{group}/lost", "", ",".join(map(str, missing))).decode()
        return Verdict(lost=tuple(int(rank) for rank in known.split(",")))

    def _call_roll(self, ranks: Sequence[int]) -> list[int]:
        """Ranks that do not answer."""
        call = self._store.add("call", 1)
        self._answer(call)
        deadline = time.monotonic() + self._grace_s
        missing = list(ranks)
        while missing and time.monotonic() < deadline:
            time.sleep(self._poll_s / 10)
            answers = self._stored([f"here/{rank}" for rank in missing])
            missing = [rank for rank, answer in zip(missing, answers, strict=True) if int(answer or -1) < call]
        return missing

    def _end_of_chain(self, group: str, ranks: Sequence[int], waited_for: int | None) -> int | None:
        """The rank that others wait for and that waits for nobody."""
        stored = self._stored([f"{group}/waits/{rank}" for rank in ranks])
        waits = {rank: int(other) for rank, other in zip(ranks, stored, strict=True) if other}
        seen: list[int] = [self._rank]
        while waited_for is not None and waited_for not in seen:
            seen.append(waited_for)
            waited_for = waits.get(waited_for)
        return seen[-1] if len(seen) > 1 else None

    def _answer_calls(self) -> None:
        """A handful of round trips per look, however many ranks there are: who looks seldom is called lost."""
        try:
            address = None if self._ping_server is None else self._ping_server.address
            self._store.set(f"ping_server/{self._rank}", json.dumps(address))
            knows_ping_servers = False
            while not self._stopped.is_set():
                self._answer(int(self._stored(["call"])[0] or 0))
                knows_ping_servers = knows_ping_servers or self._learn_ping_servers()
                self._stopped.wait(self._poll_s)
        except RuntimeError:
            return  # the store has gone: who asks from now on pings

    def _answer(self, call: int) -> None:
        with self._lock:
            if call > self._answered:
                self._store.set(f"here/{self._rank}", str(call))
                self._answered = call

    def _learn_ping_servers(self) -> bool:
        """True when all ranks have said where theirs is, or that they have none."""
        keys = [f"ping_server/{rank}" for rank in range(self._world_size)]
        if not self._store.check(keys):
            return False
        addresses = [json.loads(address) for address in self._store.multi_get(keys)]
        self._ping_servers = {
            rank: (address[0], address[1])
            for rank, address in enumerate(addresses)
            if address is not None and rank != self._rank
        }
        return True

    def _stored(self, keys: list[str]) -> list[str]:
        """The keys' values, empty where there is none yet; two round trips where there are all."""
        if self._store.check(keys):
            return [value.decode() for value in self._store.multi_get(keys)]
        if len(keys) == 1:
            return [""]
        half = len(keys) // 2
        return self._stored(keys[:half]) + self._stored(keys[half:])


_joined: list[tuple[Store, FailureDetector]] = []


def failure_detector() -> FailureDetector:
    """This process's part in the roll calls of the job that `init_process_group` made it part of."""
    store = _get_default_store()
    if not _joined or _joined[0][0] is not store:
        for _, former in _joined:
            former.stop()
        _joined[:] = [
            (
                store,
                FailureDetector(store.clone(), dist.get_rank(), dist.get_world_size(), ping_server=start_ping_server()),
            )
        ]
    return _joined[0][1]


def _within(limit_s: float, ask: Callable[[], T]) -> T | None:
    """What `ask` returns; None if it fails or takes longer: a store out of reach may keep a caller for minutes."""
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(ask())
        except RuntimeError:
            return  # the store refuses connections: as good as no answer

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else None
