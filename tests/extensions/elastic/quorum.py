"""Ranks in threads that train with local steps and may be lost and return; they connect by TCP on this machine."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from bench.core import spec
from bench.extensions.elastic.members import ElasticMembers
from bench.extensions.elastic.membership import Rendezvous
from bench.extensions.elastic.strategy import Elastic
from collectives.base import Collective
from compressors.base import Compressor
from compressors.layer import Step
from gradwire.exchange.report import Bucket, StepReport
from gradwire.local.exchange import LocalSteps
from gradwire.local.fragments import FragmentExchange
from tests.testing.compressor_cases import step_at
from tests.testing.limits import LIMIT_S
from tests.testing.local_steps import Change, flat

Moment = Literal["before", "during", "after"]


class Killed(Exception):
    """The rank ends at once; the kernel closes its connections."""


class QuorumRank:
    """One rank's model with local steps; it may be killed before, during or after the sum of an exchange."""

    def __init__(self, run: QuorumRun, rank: int, model: nn.Module, digest: str = "run") -> None:
        self.run, self.rank, self.model = run, rank, model
        options = Elastic(**run.options)
        self.rendezvous = Rendezvous(
            rank=rank,
            world_size=run.world_size,
            store=run.store,
            host="127.0.0.1",
            digest=digest,
            timeout_s=run.timeout_s,
            quorum=options.quorum,
            deadline_s=options.deadline,
            interval=options.interval,
        )
        collective = cast(Collective, spec.build("collectives", run.collective))
        self.members = _Mortal(collective, self.rendezvous)
        compressor = cast(Compressor, spec.build("compressors", run.compressor))
        self.local = LocalSteps(model, options, compressor, self.members)
        self.first_step = self.index = self.members.join(self.local, run.while_waiting, lambda: None)

    def step(self, change: Change) -> StepReport:
        """Make one step with what the inner optimizer does."""
        self.local.start_step(step_at(self.index, self.rank, self.run.world_size))
        with torch.no_grad():
            change(self.model, self.rank, self.index)
        self.local.after_update()
        self.index += 1
        return self.local.finish_step()

    def kill_in(self, exchange: int, moment: Moment) -> None:
        """Let `step` raise `Killed` at a moment of the exchange with this number."""
        self.members.killed_in = exchange, moment

    def fail_once_in(self, exchange: int) -> None:
        """Let this rank report that the first sum of an exchange has failed, and leave other buffers than the mean."""
        self.members.fails_in = exchange

    def outer(self) -> torch.Tensor:
        """Return the outer copy of all parameters, as an evaluation sees it."""
        self.local.show_outer()
        return flat(self.model)

    def residuals(self) -> dict[int, torch.Tensor]:
        """Return what the compressor has not sent yet, by layer."""
        return cast(dict[int, torch.Tensor], self.local.reducer.state_dict()["residuals"])


class _Mortal(ElasticMembers):
    killed_in: tuple[int, Moment] | None = None
    fails_in: int | None = None
    attempts = 0  # sums that were begun

    def average_(self, local: LocalSteps, exchange: FragmentExchange, step: Step) -> Bucket:
        at = None if self.killed_in is None else self.killed_in
        if at == (exchange.number, "before"):
            self.die()
        if at is not None and at[0] == exchange.number:
            agree, reduce = self.membership.agree, local.reducer.reduce
            self.membership.agree = lambda problem: self.die() if at[1] == "after" else agree(problem)
            local.reducer.reduce = lambda *given: self.die() if at[1] == "during" else reduce(*given)
        if self.fails_in == exchange.number:
            agree_once = self.membership.agree

            def disagree(_: str | None) -> bool:
                self.membership.agree = agree_once
                for buffer in exchange.buffers:
                    buffer += 1
                return agree_once("it pretends to have failed")

            self.membership.agree = disagree
        return super().average_(local, exchange, step)

    def _connect(self, local: LocalSteps, participants: Any) -> None:
        self.attempts += 1
        super()._connect(local, participants)

    def disconnect(self) -> None:
        """Close all connections, as the kernel does when a process ends."""
        self._local.transport.close()
        self.membership.disconnect()

    def die(self) -> Any:
        self.disconnect()
        raise Killed


class QuorumRun:
    """A run of several ranks in threads."""

    def __init__(
        self,
        world_size: int,
        *,
        compressor: str = "none",
        collective: str = "ring",
        timeout_s: float = LIMIT_S,
        **options: Any,
    ) -> None:
        self.world_size, self.timeout_s = world_size, timeout_s
        self.compressor, self.collective = compressor, collective
        self.options = {"quorum": 1, "steps": 1} | options
        self.store = HashStore()
        self.results: dict[int, Any] = {}
        self.while_waiting: Callable[[], None] = lambda: None
        self._threads: list[threading.Thread] = []

    def start(self, rank: int, model: nn.Module, work: Callable[[QuorumRank], Any], digest: str = "run") -> None:
        """Start a rank, whose result is that of `work`, or the exception that it raised."""

        def target() -> None:
            made = None
            try:
                made = QuorumRank(self, rank, model, digest)
                self.results[rank] = work(made)
                made.local.close()
            except Killed:
                pass
            except Exception as error:  # noqa: BLE001 - the test looks at it
                self.results[rank] = error
                if made is not None:
                    made.members.disconnect()

        self._threads.append(threading.Thread(target=target, daemon=True))
        self._threads[-1].start()

    def join(self) -> dict[int, Any]:
        """Return the results of the ranks, by rank, once all have ended."""
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), f"a rank hangs; results so far: {self.results}"
        return self.results


def shown(error: object) -> str:
    """Return the traceback of an exception, for the message of a failed test."""
    return "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else ""


def lower(model: nn.Module, rank: int, _: int) -> None:
    """Each rank moves by another distance, so that the mean says who took part."""
    for parameter in model.parameters():
        parameter -= float(4**rank)


def outers(rank: QuorumRank, steps: int = 6) -> list[float]:
    """Return the first parameter of the outer copy after every step."""
    found = []
    for _ in range(steps):
        rank.step(lower)
        found.append(float(rank.outer()[0]))
    return found
