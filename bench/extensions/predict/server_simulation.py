"""Event-by-event simulation of ranks that push to a server and do not wait for each other.

The simulation follows `bench/strategies/async_server.py`. A rank's exchange thread encodes each bucket when
backward hands it over, pushes it, and after the last one waits for the parameters of the next step. The server receives
messages, applies pushes and answers, one action after the other. The rules by which ranks wait are not modelled: the
server class of `--strategy async_server` itself applies them, here with empty parameters.

Ranks that do not wait for each other are at different points of their steps. So each rank begins at a random time, at
most one step's compute after the start of the simulation.

Each rank has one queue to the server and one from it, and each queue sends one message at a time. Messages share links
max-min fairly: the rate of a message can increase only if that of another message, which is no faster, decreases. The
ranks of a host share its link in equal parts, and the part of the server's link that a host cannot use is left to the
other hosts. Acknowledgements of the messages in one direction of a link reduce the rate in the other direction, but not
below half.

Source: Bertsekas and Gallager, "Data networks" (2nd edition, 1992), section 6.5.2: max-min fair rates by filling up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import simpy
import torch

from bench.extensions.predict.calibration import BucketParts, Calibration, EncodedBucket
from bench.extensions.predict.contention import Computing, FairShareQueue, Job
from bench.extensions.predict.links import Floats, Links
from bench.strategies.async_server import AsyncServer
from collectives.parameter_server.link import CONTROL_BYTES
from collectives.parameter_server.server import ClockEnd, ParameterServer, Push, Session
from collectives.payloads.base import HEADER_BYTES
from collectives.schedule.waves import Ints

# Bytes per second of a link without a limit: so fast that transfers take practically no time.
FASTEST = 1e15


class Star:
    """Messages between the ranks and one of them, which is the server.

    Args:
        env: the simulation, whose clock is used.
        links: the links between the ranks.
        root: the rank that is the server; ranks send messages only to it, and it sends messages to them.
    """

    def __init__(self, env: simpy.Environment, links: Links, root: int) -> None:
        n = links.num_ranks
        self._env, self._links, self._root = env, links, root
        self._up, self._down = (np.minimum(rates, FASTEST) for rates in (links.up_rate, links.down_rate))
        self._queues = [simpy.Resource(env) for _ in range(2 * n)]
        self._wires = FairShareQueue(env, 2 * n, self._fair_rates)

    def push(self, rank: int, nbytes: float) -> simpy.Event:
        """Send `nbytes` to the server after the rank's earlier pushes; the event happens when the last byte is sent."""
        return self._send(rank, rank, nbytes)

    def answer(self, rank: int, nbytes: float) -> simpy.Event:
        """Send `nbytes` from the server to a rank; the event happens when the last byte is sent."""
        return self._send(self._links.num_ranks + rank, rank, nbytes)

    def latency_s(self, rank: int, *, to_server: bool) -> float:
        """Return the one-way delay in seconds; 0 within a host."""
        source, other = (rank, self._root) if to_server else (self._root, rank)
        hosts = self._links.host_of
        return 0.0 if hosts[source] == hosts[other] else float(self._links.latency_s[hosts[source]])

    def _send(self, queue: int, rank: int, nbytes: float) -> simpy.Event:
        if self._links.host_of[rank] == self._links.host_of[self._root]:
            return self._env.event().succeed()
        return self._env.process(self._carry(queue, nbytes))

    def _carry(self, queue: int, nbytes: float) -> Generator[simpy.Event, Any, None]:
        with self._queues[queue].request() as turn:
            yield turn
            yield self._wires.begin(queue, nbytes)

    def _fair_rates(self, busy: npt.NDArray[np.bool_]) -> Floats:
        """Return the bytes per second of each queue, float [2 * ranks]; 0 for queues that are not `busy`."""
        hosts, share = self._links.host_of, self._links.ack_share
        server = hosts[self._root]
        to_server, from_server = (
            np.bincount(hosts[side], minlength=len(self._up)) for side in (busy[: len(hosts)], busy[len(hosts) :])
        )
        up = fair_shares(to_server, self._up, self._down[server])
        down = fair_shares(from_server, self._down, self._up[server])
        if share and to_server.any() and from_server.any():
            acked_up, acked_down = share * up * to_server, share * down * from_server
            up = fair_shares(to_server, _left(self._up, acked_down), _left(self._down[server], acked_down.sum()))
            down = fair_shares(from_server, _left(self._down, acked_up), _left(self._up[server], acked_up.sum()))
        return np.where(busy, np.concatenate([up[hosts], down[hosts]]), 0.0)


def _left(rate: Floats | float, acknowledged: Floats | float) -> Any:
    """Return the rate that acknowledgements leave to messages: at least half, because both share links fairly."""
    return np.maximum(rate - acknowledged, rate / 2)


def fair_shares(count: Ints, own: Floats, shared: float) -> Floats:
    """Return the rate of each single flow of every host, float [hosts], if the flows of all hosts share one link.

    Args:
        count: number of flows of each host, int [hosts].
        own: rate of each host's own link, float [hosts].
        shared: rate of the link that all flows share.
    """
    rates = np.zeros(len(count))
    used = np.flatnonzero(count)
    if not len(used):
        return rates
    full_at = own[used] / count[used]  # the rate per flow at which a host's own link is full
    order = np.argsort(full_at)
    own, count, full_at = own[used[order]], count[used[order]], full_at[order]
    taken = own.cumsum() - own
    flows_left = count[::-1].cumsum()[::-1]
    level = (shared - taken) / flows_left
    ends = np.flatnonzero(level <= full_at)
    rates[used[order]] = np.minimum(full_at, level[ends[0]] if len(ends) else np.inf)
    return rates


# Number of steps per rank at the beginning that do not count.
WARMUP_STEPS = 20
# Number of steps per rank that count, on average over ranks.
STEPS = 40
# Seconds after which the simulated server would report a rank as lost, which never happens.
NEVER_S = 1e9

Life = Generator[simpy.Event, Any, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncSetting(Job):
    """Everything that steps depend on, except for the calibration.

    Attributes:
        strategy: gives the rules of the server.
        seed: seed of the random times at which ranks begin.
    """

    strategy: AsyncServer
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of a rank and of its server in one step; times are CPU seconds of a rank alone on the machine.

    Attributes:
        computing: compute times of the ranks.
        encode_s: time to encode each bucket.
        nbytes, message_s: bytes of each bucket's messages, and time for them on each end; those of the last bucket
            include the control message that ends the clock.
        answer_nbytes, answer_s: bytes of the parameters and of the control message before them, and time for both on
            each end.
        apply_s: time to decode one push and to update the parameters.
        add_s: time for every further push of the same update.
        num_layers: number of layers, which are sent one by one.
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
        """Compute the work from the calibration, which has lengths of single layers, but no times of them."""
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
    """Return the bytes of a bucket if its layers are sent one by one, each with its own header."""
    offer = encoded.offers[0]
    return offer.nbytes + HEADER_BYTES * max(0, len(bucket.numels) - len(offer.leaves))


class _Applied:
    """Empty parameters, which record the number of pushes in each update."""

    def __init__(self) -> None:
        self.terms: list[int] = []

    def apply(self, pushes: Sequence[Push], num_terms: int) -> None:
        self.terms.append(len(pushes))

    def packed(self) -> list[torch.Tensor]:
        return []

    def take(self) -> list[int]:
        """Return the number of pushes in each update since the last call."""
        taken, self.terms = self.terms, []
        return taken


@dataclasses.dataclass(kw_only=True)
class Played:
    """Observations between two pushes, the last one of the warm-up and the last one of the simulation.

    Attributes:
        begun, ended: simulated times of these two pushes, in seconds.
        updates: number of updates of the parameters.
        serving_s: seconds for which the server was busy.
        step_s, exposed_s: seconds of the steps that each rank ended, and seconds for which it waited in them for the
            exchange; one list per rank.
        staleness: staleness of each push, in versions of the parameters.
    """

    begun: float = math.inf
    ended: float = 0.0
    updates: int = 0
    serving_s: float = 0.0
    step_s: list[list[float]]
    exposed_s: list[list[float]]
    staleness: list[int] = dataclasses.field(default_factory=list)


class Simulation:
    """Simulate all ranks and their server, with start times that are drawn once."""

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
        """Simulate until all ranks together have made their steps."""
        self._env.run(until=self._over)
        return self._played

    def _train(self, rank: int, begin: float) -> Life:
        """Simulate a rank's exchange thread, one step after the other."""
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
        """Simulate forward and backward, which hand over the buckets one by one; return when backward has ended."""
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
        """Return the factor on the time of a rank's other work at this moment."""
        return 1 / self._cores.rate_with(rank)

    def _push(self, rank: int, number: int) -> Life:
        """Send a bucket to the server, until the server has received it."""
        yield self._star.push(rank, self._work.nbytes[number])
        yield self._env.timeout(self._star.latency_s(rank, to_server=True) + self._links.wake_s)
        yield from self._serve(self._slower[self._root] * self._work.message_s[number])

    def _end_clock(self, rank: int) -> Life:
        """Let the server apply a complete push, and wait until the rank may start its next step."""
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
        """Let the server send the parameters, and wait until the rank has received them."""
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
        """Count one more push; begin to observe with the last push of the warm-up."""
        played, done = self._played, sum(session.clock for session in self._sessions)
        if done > self._untimed:
            played.staleness.append(behind)
        if done == self._untimed:
            played.begun, played.updates, played.serving_s = self._env.now, -self._server.version, 0.0
        elif done == self._untimed + self._pushes:
            played.ended = self._env.now
            played.updates += self._server.version
            self._over.succeed()
