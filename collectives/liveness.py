"""Who is still there: ranks answer a roll call over the rendezvous store, a connection that no message of theirs uses.

A rank whose wait failed knows only whom it waited for, and that neighbour may itself be waiting. So it calls the roll:
every rank has a thread that looks at the store once a second and answers for as long as its process runs and its link
is up. Who does not answer is lost. If all answer, somebody is merely late, found by following who waits for whom. The
first verdict stands, so that all ranks name the same one even when those that failed first have already left.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

POLL_S = 1.0
GRACE_S = 4.0
"""a running rank answers within POLL_S; the rest is for a busy machine"""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a failed wait.

    Attributes:
        lost: ranks that do not answer any more.
        late: a rank that answers but did not take part in time; None where some are lost.
        is_cut_off: the store itself does not answer: this rank has lost the others.
    """

    lost: tuple[int, ...] = ()
    late: int | None = None
    is_cut_off: bool = False


class Liveness:
    """One rank's part in the roll calls.

    Args:
        store: shared by all ranks; used by nothing else through this object.
        rank: this one.
        poll_s: seconds between looks at the store.
        grace_s: seconds within which a running rank answers.
    """

    def __init__(self, store: Store, rank: int, *, poll_s: float = POLL_S, grace_s: float = GRACE_S) -> None:
        self._store = PrefixStore("gradwire/liveness", store)
        self._rank = rank
        self._poll_s = poll_s
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._answered = 0
        self._stopped = threading.Event()
        threading.Thread(target=self._answer_calls, name="liveness", daemon=True).start()

    def stop(self) -> None:
        """Answer no more."""
        self._stopped.set()

    def find_lost(self, group: str, ranks: Sequence[int], waited_for: int | None) -> Verdict:
        """Find out why a wait failed; takes up to about two grace periods.

        Args:
            group: names the process group, which is of no use after its first failure.
            ranks: its members, as numbers of the whole job.
            waited_for: whom this rank waited for; None if for all of them.
        """
        found = _within(2 * self._grace_s, lambda: self._investigate(group, ranks, waited_for))
        return found if found is not None else Verdict(is_cut_off=True)

    def _investigate(self, group: str, ranks: Sequence[int], waited_for: int | None) -> Verdict:
        if waited_for is not None:
            self._store.set(f"{group}/waits/{self._rank}", str(waited_for))
        known = self._stored(f"{group}/lost")
        if not known:
            missing = self._call_roll(ranks)
            if not missing:
                return Verdict(late=self._end_of_chain(group, waited_for))
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
            missing = [rank for rank in missing if int(self._stored(f"here/{rank}") or 0) < call]
        return missing

    def _end_of_chain(self, group: str, waited_for: int | None) -> int | None:
        """The rank that others wait for and that waits for nobody."""
        seen: list[int] = [self._rank]
        while waited_for is not None and waited_for not in seen:
            seen.append(waited_for)
            next_one = self._stored(f"{group}/waits/{waited_for}")
            waited_for = int(next_one) if next_one else None
        return seen[-1] if len(seen) > 1 else None

    def _answer_calls(self) -> None:
        while not self._stopped.wait(self._poll_s):
            try:
                self._answer(self._store.add("call", 0))
            except RuntimeError:
                return  # the store has gone, and with it everybody who could ask

    def _answer(self, call: int) -> None:
        with self._lock:
            if call > self._answered:
                self._store.set(f"here/{self._rank}", str(call))
                self._answered = call

    def _stored(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


_joined: list[tuple[Store, Liveness]] = []


def liveness() -> Liveness:
    """This process's part in the roll calls of the job that `init_process_group` made it part of."""
    store = _get_default_store()
    if not _joined or _joined[0][0] is not store:
        for _, former in _joined:
            former.stop()
        _joined[:] = [(store, Liveness(store.clone(), dist.get_rank()))]
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
