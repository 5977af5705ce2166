"""Predict steps in which ranks push to a server and do not wait for each other, by event-by-event simulation.

The simulation follows `bench/extensions/async_server/strategy.py`. When backward hands over a bucket of gradients, the
rank's exchange thread encodes it and pushes it to the server. After the last bucket, the thread waits for the
parameters of the next step. The server receives messages, applies pushes and answers, one action after the other. The
rules by which ranks wait are not modelled: the simulation runs the server class of `--strategy async_server` itself,
with empty parameters.

Ranks that do not wait for each other are at different points of their steps. So each simulated rank begins at a random
time, at most one step's compute after the start of the simulation.

With bounded staleness, a rank that starts sending slightly earlier gets a larger share of the link, so its lead over
the other ranks grows to the bound. After that, every rank waits for the slowest rank's push in each step, and all
continue together. The simulation therefore runs these ranks in lockstep, as with a bound of 0. The prediction then adds
the bound to the staleness of all ranks but one.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Generator, Sequence
from typing import Any, Self

import numpy as np
import simpy
import torch

from bench.extensions.async_server.server import CONTROL_BYTES, ClockEnd, Push
from bench.extensions.async_server.strategy import AsyncServer
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.contention import Computing, FairShareQueue, Job, Star
from bench.extensions.predict.links import Floats
from bench.extensions.predict.prediction import Prediction
from collectives.payloads.base import HEADER_BYTES

# Number of warm-up steps per rank at the beginning of a simulation, which the prediction leaves out.
WARMUP_STEPS = 20
# Number of steps per rank after the warm-up, on average over ranks.
STEPS = 40
# Seconds after which the simulated server would report a rank as lost; so long that this never happens.
NEVER_S = 1e9

Life = Generator[simpy.Event, Any, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of a rank and of the parameter server in one step; times are CPU seconds of a rank alone on the machine.

    Attributes:
        computing: compute times of the ranks.
        encode_s: time to encode each bucket.
        nbytes, message_s: bytes of each bucket's messages, and the time that sending or receiving them takes; for the
            last bucket, both include the control message that tells the server that the push is complete.
        answer_nbytes, answer_s: bytes of the parameters and of the control message before them, and the time that
            sending or receiving both takes.
        apply_s: time to decode one push (a rank's gradients of one step) and to update the parameters with it.
        add_s: additional time for each further push that is applied in the same update.
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
    def of(cls, calibration: Calibration, job: Job) -> Self:
        """Compute the work from a calibration, which has the number of layers, but only the times of whole buckets."""
        links, encoded = job.links, job.encoded
        offers = [bucket.offers[0] for bucket in encoded]
        messages = [len(bucket.numels) for bucket in calibration.buckets]
        num_layers = sum(messages)
        # The layers of a bucket are sent one by one, each with its own header.
        nbytes = [
            offer.nbytes + HEADER_BYTES * max(0, layers - len(offer.leaves))
            for layers, offer in zip(messages, offers, strict=True)
        ]
        messages[-1] += 1
        nbytes[-1] += CONTROL_BYTES
        answer_nbytes = calibration.dense_nbytes + HEADER_BYTES * num_layers + CONTROL_BYTES
        *message_s, answer_s = (
            links.message_s * number + links.per_byte_s * length
            for number, length in zip([*messages, num_layers + 1], [*nbytes, answer_nbytes], strict=True)
        )
        unpack_s = sum(offer.unpack.fixed_s + offer.unpack.per_byte_s * offer.nbytes for offer in offers)
        return cls(
            computing=Computing.of_ranks(calibration, job),
            encode_s=tuple(bucket.work_s[0] + bucket.offers[0].pack_s for bucket in encoded),
            nbytes=tuple(nbytes),
            message_s=tuple(message_s),
            answer_nbytes=answer_nbytes,
            answer_s=answer_s,
            apply_s=sum(bucket.work_s[1] for bucket in encoded) + calibration.update_s + unpack_s,
            add_s=sum(offer.decode_s for offer in offers) + unpack_s,
            num_layers=num_layers,
        )


class _NumbersOfPushes(list[int]):
    """Stand in for the server's parameters in a simulation: record the pushes of each update, and update nothing.

    For each update, the number of its pushes (one push is the gradients of one rank's step) is appended to a list.
    """

    def apply(self, pushes: Sequence[Push], num_terms: int) -> None:
        self.append(len(pushes))

    def packed(self) -> list[torch.Tensor]:
        return []


class Simulation:
    """Simulate all ranks and their server for `WARMUP_STEPS` + `STEPS` steps per rank, on average over ranks.

    Args:
        job: the ranks, their links and their work.
        strategy: gives the rules of the server.
        work: the work of a step.
        draw: generator of the random times at which ranks begin.

    Attributes:
        begun, ended: simulated times in seconds at which the server had applied the last gradients of the warm-up, and
            the last gradients of all. All other attributes cover the time between these two.
        updates: number of updates of the parameters.
        serving_s: seconds for which the server was busy.
        step_s, exposed_s: seconds of each step, and seconds for which the rank waited for the exchange in that step;
            one list per rank.
        staleness: for each push (gradients of one rank's step), number of updates between the start of the step and
            the moment when the push is applied.
    """

    def __init__(self, job: Job, strategy: AsyncServer, work: StepWork, draw: np.random.Generator) -> None:
        n = job.links.num_ranks
        self._job, self._work, self._root = job, work, strategy.root
        self._env = simpy.Environment()
        self._star = Star(self._env, job.links, self._root)
        self._cores = FairShareQueue(self._env, n, work.computing.rates)
        self._serving = simpy.Resource(self._env)
        self._applied = _NumbersOfPushes()
        self._server = strategy.server(self._applied, n, NEVER_S)
        self._sessions = [self._server.join(rank) for rank in range(n)]
        self._changed, self._over = self._env.event(), self._env.event()
        self.begun, self.ended, self.updates, self.serving_s = math.inf, 0.0, 0, 0.0
        self.step_s: list[list[float]] = [[] for _ in range(n)]
        self.exposed_s: list[list[float]] = [[] for _ in range(n)]
        self.staleness: list[int] = []
        for rank, begin in enumerate(draw.uniform(0.0, work.computing.computed_s)):
            self._env.process(self._train(rank, begin))
        self._env.run(until=self._over)

    def _train(self, rank: int, begin: float) -> Life:
        work, env, is_remote = self._work, self._env, rank != self._root
        yield env.timeout(begin)
        while True:
            begun, sent = env.now, []
            handed_over = [env.event() for _ in work.nbytes]
            backward = env.process(self._compute(rank, handed_over))
            for number, bucket in enumerate(handed_over):
                yield bucket
                yield env.timeout(1 / self._cores.rate_with(rank) * work.encode_s[number])
                if is_remote:
                    yield env.timeout(self._job.slower[rank] * work.message_s[number])
                    sent.append(env.process(self._push(rank, number)))
            computed = yield backward
            yield env.all_of(sent)
            yield from self._end_clock(rank)
            if is_remote:
                yield from self._answer(rank)
            if env.now > self.begun:
                self.step_s[rank].append(env.now - begun)
                self.exposed_s[rank].append(env.now - computed)

    def _compute(self, rank: int, handed_over: Sequence[simpy.Event]) -> Life:
        """Simulate forward and backward of a rank, and return the simulated time at which backward has ended.

        Each event in `handed_over` belongs to a bucket, and is triggered when the bucket's gradients are ready.
        """
        computing, begun = self._work.computing, self._env.now
        *until_buckets, rest = np.diff(computing.marks, prepend=0.0)
        for bucket, seconds in zip(handed_over, until_buckets, strict=True):
            yield self._cores.begin(rank, seconds)
            if bucket is handed_over[-1]:
                yield self._env.timeout(computing.longer[rank] * (self._env.now - begun))
            bucket.succeed()
        yield self._cores.begin(rank, rest)
        return self._env.now

    def _push(self, rank: int, number: int) -> Life:
        """Simulate sending a bucket to the server, until the server has received it."""
        yield self._star.send(rank, self._work.nbytes[number], to_server=True)
        yield self._env.timeout(self._star.latency_s(rank, to_server=True) + self._job.links.wake_s)
        yield from self._serve(self._job.slower[self._root] * self._work.message_s[number])

    def _end_clock(self, rank: int) -> Life:
        """Simulate how the server applies a rank's gradients, and how the rank waits until its next step may start.

        Attributes such as `staleness` are recorded once the last gradients of the warm-up are applied.
        """
        session, work, n = self._sessions[rank], self._work, len(self._sessions)
        with self._serving.request() as request:
            yield request
            behind = self._server.take(
                Push(rank=rank, payloads={}, clock_end=ClockEnd(index=session.clock, epoch=0, lr=0.0)), session
            )
            session.clock += 1
            work_s = sum(work.apply_s + (terms - 1) * work.add_s for terms in self._applied)
            busy_s = 1 / self._cores.rate_with(self._root) * work_s
            self._applied.clear()
            yield self._env.timeout(busy_s)
            self.serving_s += busy_s
            self._changed.succeed()
            self._changed = self._env.event()
            pushes = sum(each.clock for each in self._sessions)
            if pushes > n * WARMUP_STEPS:
                self.staleness.append(behind)
            if pushes == n * WARMUP_STEPS:
                self.begun, self.updates, self.serving_s = self._env.now, -self._server.version, 0.0
            elif pushes == n * (WARMUP_STEPS + STEPS):
                self.ended = self._env.now
                self.updates += self._server.version
                self._over.succeed()
        while not self._server.may_start(session.clock):
            yield self._changed
        session.version = self._server.version

    def _answer(self, rank: int) -> Life:
        work, job = self._work, self._job
        yield from self._serve(job.slower[self._root] * work.answer_s)
        yield self._star.send(rank, work.answer_nbytes, to_server=False)
        yield self._env.timeout(
            self._star.latency_s(rank, to_server=False) + job.links.wake_s + (job.slower[rank] * work.answer_s)
        )

    def _serve(self, seconds: float) -> Life:
        with self._serving.request() as request:
            yield request
            yield self._env.timeout(seconds)
            self.serving_s += seconds


# Number of random start times in all simulations together. Each simulation uses one start time per rank, so fewer ranks
# mean more simulations.
STARTS = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncPrediction(Prediction):
    """A predicted step of ranks that do not wait for each other; fields are named like columns of `metrics.csv`.

    Times are those of rank 0's steps. Other values cover the steps of all ranks.

    Attributes:
        staleness_mean, staleness_max: mean and maximum number of updates of the parameters between the start of a step
            and the moment when the step's gradients are applied.
        updates_per_s: updates of the server's parameters per second.
        bound_by: what limits the step: as in `Prediction`, or server if the server is nearly always busy.
        step_times_s: median step time of each rank, in seconds; for a rank that ended no step after the warm-up, the
            compute time of one step.
    """

    staleness_mean: float
    staleness_max: int
    updates_per_s: float
    step_times_s: tuple[float, ...]


def predict_async(calibration: Calibration, job: Job, strategy: AsyncServer, seed: int = 0) -> AsyncPrediction:
    """Predict a step of `async_server`; with few ranks, from several simulations with different start times.

    Args:
        calibration: the measured parts of a step.
        job: the ranks, their links and their work.
        strategy: gives the rules of the server.
        seed: seed of the random times at which ranks begin.
    """
    n, root, hosts = job.links.num_ranks, strategy.root, job.links.host_of
    draw, work = np.random.default_rng(seed), StepWork.of(calibration, job)
    runs = [Simulation(job, dataclasses.replace(strategy, staleness=0), work, draw) for _ in range(max(1, STARTS // n))]
    step_s, exposed_s = (
        [list(itertools.chain.from_iterable(of_rank)) for of_rank in zip(*of_runs, strict=True)]
        for of_runs in ([run.step_s for run in runs], [run.exposed_s for run in runs])
    )
    staleness = [behind for run in runs for behind in run.staleness]
    simulated_s, serving_s = sum(run.ended - run.begun for run in runs), sum(run.serving_s for run in runs)
    steps = np.array([len(of_rank) for of_rank in step_s], dtype=float)
    remote = np.arange(n) != root
    pushed, answered = sum(work.nbytes) - CONTROL_BYTES, work.answer_nbytes - CONTROL_BYTES
    sent = np.where(remote, pushed * steps, answered * steps[remote].sum())
    own_s = work.computing.cpu_s - calibration.update_s + sum(work.encode_s)
    messages_s = np.where(remote, sum(work.message_s) + work.answer_s, 0.0)
    cpu_s: Floats = steps * (own_s + messages_s) + np.where(remote, 0.0, serving_s)
    carried_s = job.links.carry_byte_s * steps[hosts != hosts[root]].sum() * (pushed + answered)
    stretch = 1.0  # time that shared cores need for the work of all ranks / simulated time, at least 1
    if job.shared_cores is not None:
        stretch = max(1.0, (float(cpu_s.sum()) + carried_s) / (job.shared_cores * simulated_s))
    seconds = stretch * simulated_s
    pushes_per_s, nbytes = len(staleness) / seconds, float(sent.sum() / steps.sum())
    step_times_s = tuple(
        stretch * float(statistics.median(of_rank) if of_rank else computed_s)
        for of_rank, computed_s in zip(step_s, work.computing.computed_s, strict=True)
    )
    alone_s = work.computing.computed_s + float(work.computing.factor[root]) * work.apply_s
    possible_per_s = (1 / alone_s).sum() if strategy.mode == "asp" else n / alone_s.max()
    if stretch > 1:
        bound_by = "cpu"
    elif pushes_per_s > possible_per_s / 1.1:
        bound_by = "compute"
    else:
        bound_by = "server" if serving_s / simulated_s > 0.9 else "network"
    return AsyncPrediction(
        step_time_s=step_times_s[0],
        exposed_s=statistics.fmean(exposed_s[0] or [0.0]) + step_times_s[0] * (1 - 1 / stretch),
        encode_s=float(work.computing.factor[0]) * sum(work.encode_s),
        cpu_s_per_step=float((cpu_s / np.maximum(1.0, steps)).mean()),
        samples_per_s=calibration.batch_size * pushes_per_s,
        payload_bytes_per_step=nbytes,
        payload_bytes_max_per_step=float((sent / np.maximum(1.0, steps)).max()),
        messages_per_step=2 * work.num_layers * float(steps[remote].sum() / steps.sum()),
        dense_bytes_per_step=calibration.dense_nbytes,
        compression_ratio=2 * (n - 1) / n * calibration.dense_nbytes / nbytes if nbytes else None,
        bound_by=bound_by,
        staleness_mean=statistics.fmean(staleness) + strategy.staleness * (n - 1) / n,
        staleness_max=max(staleness) + strategy.staleness,
        updates_per_s=sum(run.updates for run in runs) / seconds,
        step_times_s=step_times_s,
    )
