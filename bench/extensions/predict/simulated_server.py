"""Ranks that push to a server and do not wait for each other, played through event by event.

What every rank does is written down as it does it (`bench/strategies/parameter_server`): its exchange thread encodes
each bucket when backward hands it over and pushes it, then waits for the parameters of its next step; the server takes
in what comes, applies pushes, and answers, one thing after the other. Who waits for whom is not modelled: the server
that `--strategy async_server` trains with decides it, here with parameters of no size.

Ranks that do not wait for each other are anywhere in their steps, so each begins at a time drawn from its first one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import Any, Self

import numpy as np
import simpy
import torch

from bench.extensions.predict.calibration import BucketParts, Calibration, EncodedBucket
from bench.extensions.predict.links.star import Star
from bench.extensions.predict.ranks.computing import Computing, Job
from bench.extensions.predict.sharing import FairShareQueue
from bench.strategies.async_server.async_server import AsyncServer
from collectives.parameter_server.link import CONTROL_BYTES
from collectives.parameter_server.server import ClockEnd, ParameterServer, Push, Session
from collectives.payloads.base import HEADER_BYTES

WARMUP_STEPS = 20
"""of every rank, which do not count"""
STEPS = 40
"""of every rank on average, which count"""
NEVER_S = 1e9
"""within which the simulated server gives nobody up"""

Life = Generator[simpy.Event, Any, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncSetting(Job):
    """Where and with what steps are to be made.

    Attributes:
        strategy: its server's rules.
        seed: of the times at which ranks begin.
    """

    strategy: AsyncServer
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a step takes of a rank or of its server.

    Attributes:
        computing: of the ranks.
        encode_s: of each bucket.
        nbytes, message_s: of each bucket's messages, and work for them at either end; the last one's with the control
            message that ends the clock.
        answer_nbytes, answer_s: of the parameters and the control message before them, likewise.
        apply_s: to decode one push and to update the parameters.
        add_s: for every further push of the same update.
        num_layers: that travel one by one.
    """

    computing: Computing
    encode_s: tuple[float, ...]
    nbytes: tuple[float, ...]
    message_s: tuple[float, ...]
    answer_nbytes: float
    answer_s: float
    apply_s: float
    add_s: float
    num_layers: int

    @classmethod
    def of(cls, calibration: Calibration, setting: AsyncSetting) -> Self:
        """Put it together from what was calibrated; nothing is known of single layers but their length."""
        links, encoded = setting.links, setting.encoded
        messages = [len(bucket.numels) for bucket in calibration.buckets]
        nbytes = list(map(_pushed_nbytes, calibration.buckets, encoded))
        answer_nbytes = calibration.dense_nbytes + HEADER_BYTES * sum(messages) + CONTROL_BYTES

        def work_s(messages: int, nbytes: float) -> float:
            return links.message_s * messages + links.per_byte_s * nbytes

        num_layers = sum(messages)
        unpack_s = sum(bucket.offers[0].unpack_s for bucket in encoded)
        messages[-1] += 1
        nbytes[-1] += CONTROL_BYTES
        return cls(
            computing=Computing.of_ranks(calibration, setting),
            encode_s=tuple(bucket.work_s[0] + bucket.offers[0].pack_s for bucket in encoded),
            nbytes=tuple(nbytes),
            message_s=tuple(map(work_s, messages, nbytes)),
            answer_nbytes=answer_nbytes,
            answer_s=work_s(num_layers + 1, answer_nbytes),
            apply_s=sum(bucket.work_s[1] for bucket in encoded) + calibration.update_s + unpack_s,
            add_s=sum(bucket.offers[0].decode_s for bucket in encoded) + unpack_s,
            num_layers=num_layers,
        )


def _pushed_nbytes(bucket: BucketParts, encoded: EncodedBucket) -> int:
    """Of its layers one by one, each with a header of its own, where one payload stands for several in the bucket."""
    offer = encoded.offers[0]
    return offer.nbytes + HEADER_BYTES * max(0, len(bucket.numels) - len(offer.leaves))


class _Applied:
    """Parameters of no size, which count what would be applied."""

    def __init__(self) -> None:
        self.terms: list[int] = []

    def apply(self, pushes: Sequence[Push], num_terms: int) -> None:
        self.terms.append(len(pushes))

    def packed(self) -> list[torch.Tensor]:
        return []

    def take(self) -> list[int]:
        """How many pushes each update since the last call was made of."""
        taken, self.terms = self.terms, []
        return taken


@dataclasses.dataclass(kw_only=True)
class Played:
    """What was seen, from one push to another.

    Attributes:
        begun, ended: when these were taken.
        updates: of the parameters.
        serving_s: how long the server was busy.
        step_s, exposed_s: of the steps that each rank ended meanwhile.
        staleness: of each push.
    """

    begun: float = math.inf
    ended: float = 0.0
    updates: int = 0
    serving_s: float = 0.0
    step_s: list[list[float]]
    exposed_s: list[list[float]]
    staleness: list[int] = dataclasses.field(default_factory=list)


class Simulation:
    """All ranks and their server, from one start."""

    def __init__(self, setting: AsyncSetting, work: StepWork, draw: np.random.Generator) -> None:
        n = setting.links.num_ranks
        self._links, self._work, self._root = setting.links, work, setting.strategy.root
        self._slower = setting.slower
        self._env = simpy.Environment()
        self._star = Star(self._env, setting.links, self._root)
        self._cores = FairShareQueue(self._env, n, work.computing.rates)
        self._serving = simpy.Resource(self._env)
        self._applied = _Applied()
        self._server: ParameterServer = setting.strategy.server(self._applied, n, NEVER_S)
        self._sessions: list[Session] = [self._server.join(rank) for rank in range(n)]
        self._changed, self._over = self._env.event(), self._env.event()
        self._untimed = n * WARMUP_STEPS
        self._pushes = n * STEPS
        self._played = Played(step_s=[[] for _ in range(n)], exposed_s=[[] for _ in range(n)])
        for rank, begin in enumerate(draw.uniform(0.0, work.computing.computed_s)):
            self._env.process(self._train(rank, begin))

    def run(self) -> Played:
        """Play until all ranks together have made their steps."""
        self._env.run(until=self._over)
        return self._played

    def _train(self, rank: int, begin: float) -> Life:
        """A rank's exchange thread, step after step."""
        work, env, is_remote = self._work, self._env, rank != self._root
        yield env.timeout(begin)
        while True:
            begun, sent = env.now, []
            handed_over = [env.event() for _ in work.nbytes]
            backward = env.process(self._compute(rank, handed_over))
            for number, bucket in enumerate(handed_over):
                yield bucket
                yield env.timeout(self._longer(rank) * work.encode_s[number])
                if is_remote:
                    yield env.timeout(self._slower[rank] * work.message_s[number])
                    sent.append(env.process(self._push(rank, number)))
            computed = yield backward
            yield env.all_of(sent)
            yield from self._end_clock(rank)
            if is_remote:
                yield from self._answer(rank)
            if env.now > self._played.begun:
                self._played.step_s[rank].append(env.now - begun)
                self._played.exposed_s[rank].append(env.now - computed)

    def _compute(self, rank: int, handed_over: Sequence[simpy.Event]) -> Life:
        """Forward and backward, which hands over bucket after bucket; returns when it has ended."""
        computing, begun = self._work.computing, self._env.now
        *until_buckets, rest = np.diff(computing.marks, prepend=0.0)
        for bucket, seconds in zip(handed_over, until_buckets, strict=True):
            yield self._cores.begin(rank, seconds)
            if bucket is handed_over[-1]:
                yield self._env.timeout(computing.longer[rank] * (self._env.now - begun))
            bucket.succeed()
        yield self._cores.begin(rank, rest)
        return self._env.now

    def _longer(self, rank: int) -> float:
        """Times what it takes one that has the machine to itself, what other work of a rank takes now."""
        return 1 / self._cores.rate_with(rank)

    def _push(self, rank: int, number: int) -> Life:
        """A bucket's way to the server, until that has it."""
        yield self._star.push(rank, self._work.nbytes[number])
        yield self._env.timeout(self._star.latency_s(rank, to_server=True) + self._links.wake_s)
        yield from self._serve(self._slower[self._root] * self._work.message_s[number])

    def _end_clock(self, rank: int) -> Life:
        """What the server does with a whole push, until the rank may make its next step."""
        session, work = self._sessions[rank], self._work
        with self._serving.request() as turn:
            yield turn
            clock_end = ClockEnd(index=session.clock, epoch=0, lr=0.0)
            behind = self._server.take(Push(rank=rank, payloads={}, clock_end=clock_end), session)
            session.clock += 1
            seconds = sum(work.apply_s + (terms - 1) * work.add_s for terms in self._applied.take())
            yield from self._be_busy(self._longer(self._root) * seconds)
            self._changed.succeed()
            self._changed = self._env.event()
            self._count(behind)
        while not self._server.may_start(session.clock):
            yield self._changed
        session.version = self._server.version

    def _answer(self, rank: int) -> Life:
        """The parameters' way to a rank, until it has them."""
        work = self._work
        yield from self._serve(self._slower[self._root] * work.answer_s)
        yield self._star.answer(rank, work.answer_nbytes)
        taken_s = self._slower[rank] * work.answer_s
        yield self._env.timeout(self._star.latency_s(rank, to_server=False) + self._links.wake_s + taken_s)

    def _serve(self, seconds: float) -> Life:
        with self._serving.request() as turn:
            yield turn
            yield from self._be_busy(seconds)

    def _be_busy(self, seconds: float) -> Life:
        yield self._env.timeout(seconds)
        self._played.serving_s += seconds

    def _count(self, behind: int) -> None:
        """One push more; from the last of the untimed ones on they count."""
        played, done = self._played, sum(session.clock for session in self._sessions)
        if done > self._untimed:
            played.staleness.append(behind)
        if done == self._untimed:
            played.begun, played.updates, played.serving_s = self._env.now, -self._server.version, 0.0
        elif done == self._untimed + self._pushes:
            played.ended = self._env.now
            played.updates += self._server.version
            self._over.succeed()
