"""Predict a training step on given links from measured parts.

For each rank, h is the factor by which its host is slower, and f is h times the slowdown by other ranks on the same
cores. There are B buckets, and `free` is the time from which the exchange thread is free:

    handed over   t_b = start + h ready_b              b = 1 .. B; on shared cores, `contention.py` computes t_b, and
                                                       the CPU time of exchanging the other buckets delays the last
    encoded       e_b = max(t_b, free) + f work_b
    summed        s_b = end of the flows of the collective's messages, which begin at e_b (`flows.py`)
    free          s_b if some of the collective's messages depend on received ones; otherwise e_b, and the pending sums
                  are completed one after the other at the end
    told          each rank tells all others whether its gradients are finite, sent at `free` of the last bucket
    decoded       while the thread waits for a bucket, otherwise after the last bucket
    end           the rank has decoded all buckets and has been told by all ranks, + f update

The time of a step is the time of the slowest rank. It is at least (CPU time of all ranks + CPU time of carrying
messages between virtual hosts) / number of shared cores. If rates change over time, the time of a step is the mean over
the whole trace (`replay`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.extensions.predict.calibration import BucketParts, Calibration, EncodedBucket
from bench.extensions.predict.contention import Computing, Job
from bench.extensions.predict.flows import Flows
from bench.extensions.predict.links import Floats, SettlingWindows, Windows
from bench.extensions.predict.sums import KEPT_UP_TO, is_bare, sums_of
from collectives.allreduce import Allgather, Native
from collectives.base import Collective
from collectives.schedule.waves import Wave

# Bytes of the flag that tells whether gradients are finite; each rank sends its flag to all others.
FLAG_BYTES = 8
# Bytes of a rank's notice to rank 0 that its backward has ended, and of the answer that all may begin (trigger sync).
COMMAND_BYTES = 1
# Most ranks for which several steps are simulated; on each rank, a step begins when the previous step has ended.
SETTLES_UP_TO = KEPT_UP_TO
# Number of steps until a step is like all later steps. Links with a delay need more steps (SETTLING_WINDOWS), because
# the windows of new connections grow.
SETTLING_STEPS, SETTLING_WINDOWS = 2, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """A part of a bandwidth trace.

    Attributes:
        begin_s, end_s: seconds since the trace began.
        step_time_s: mean step time in this part.
    """

    begin_s: float
    end_s: float
    step_time_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted step; its fields are named like the columns of `metrics.csv`.

    Attributes:
        bound_by: what limits the step: compute, network, exchange (each rank's own work for the exchange: encoding,
            messages, decoding) or cpu (the cores that ranks share).
        step_time_p95_s: 95th percentile of the step times over a trace; None if rates are constant.
        slowest_window, fastest_window: the tenths of the trace with the slowest and with the fastest steps; None if
            rates are constant, or if a step takes longer than the trace.
    """

    step_time_s: float
    exposed_s: float
    encode_s: float
    cpu_s_per_step: float
    samples_per_s: float
    payload_bytes_per_step: float
    payload_bytes_max_per_step: float
    messages_per_step: float
    dense_bytes_per_step: float
    compression_ratio: float | None
    bound_by: str
    step_time_p95_s: float | None = None
    slowest_window: Window | None = None
    fastest_window: Window | None = None


def predict(
    calibration: Calibration,
    job: Job,
    collective: Collective,
    *,
    in_hook: bool,
    starts_early: bool,
) -> Prediction:
    """Predict a step in which all ranks wait for each other.

    Args:
        calibration: the measured parts of a step.
        job: the ranks, their links and their work.
        collective: the collective that computes sums; it must describe its rounds of messages.
        in_hook: True if sums run in a communication hook, where ranks also tell each other whether gradients are
            finite; False if DDP sums by itself.
        starts_early: True if each bucket is sent when it is ready (trigger async); False if all are sent when all are
            ready.
    """
    n, dense = job.links.num_ranks, calibration.dense_nbytes
    step = SimulatedStep(calibration, job, collective, in_hook=in_hook, starts_early=starts_early)
    computing = step.computing
    ends = np.zeros(n)
    for _ in range(step.settles_in):
        starts, (ends, exposed) = ends, step.run(ends)
    cpu_s = computing.cpu_s + step.worked_s + step.busy_s
    slowest_s = float((ends - starts).max())
    carried_s = job.links.carry_byte_s * step.sent_over_links
    shared_s = 0.0 if job.shared_cores is None else float((cpu_s + carried_s).sum()) / job.shared_cores
    exposed_s = float(exposed.mean()) + max(0.0, shared_s - slowest_s)
    times: dict[str, Any] = {"step_time_s": slowest_s, "exposed_s": exposed_s}
    if period_s := job.links.period_s:
        most_steps = int(np.clip(MOST_MESSAGES / float(step.messages.sum()), LEAST_STEPS, MOST_STEPS))
        times = replay(step.run, ends, period_s=period_s, at_least_s=shared_s, most_steps=most_steps)
    alone_s = float((step.computed_s + computing.factor * calibration.update_s).max())
    bound_by = step.bound_by(times["step_time_s"], alone_s=alone_s, shared_s=shared_s)
    nbytes, step_time_s = float(step.sent.mean()), max(times["step_time_s"], shared_s)
    return Prediction(
        encode_s=float(computing.factor.mean()) * sum(sum(bucket.work_s) for bucket in job.encoded),
        cpu_s_per_step=float(cpu_s.mean()),
        samples_per_s=n * calibration.batch_size / step_time_s,
        payload_bytes_per_step=nbytes,
        payload_bytes_max_per_step=float(step.sent.max()),
        messages_per_step=float(step.messages.mean()),
        dense_bytes_per_step=dense,
        compression_ratio=2 * (n - 1) / n * dense / nbytes if nbytes else None,
        bound_by=bound_by,
        **(times | {"step_time_s": step_time_s}),
    )


# Share by which a lower bound is reduced, because sums of times have rounding errors.
ROUNDING = 1e-9


def least_step_s(
    calibration: Calibration,
    job: Job,
    collective: Collective,
    *,
    in_hook: bool,
    starts_early: bool,
) -> float:
    """Return a lower bound of the step time that `predict` returns for the same arguments; 0 if there is none.

    The bound is the time at which the first rank ends a step that all ranks begin at once, on idle links and without
    TCP windows. In a later step, some rank begins first; on it, everything that the others begin later or that TCP
    windows delay is not earlier, because flows and decoding consist of sums and maxima of non-negative terms. This does
    not hold if ranks that begin later let others compute faster, or if rates change over time.
    """
    if job.shared_cores is not None or job.links.period_s is not None or job.links.num_ranks > SETTLES_UP_TO:
        return 0.0
    step = SimulatedStep(calibration, job, collective, in_hook=in_hook, starts_early=starts_early, has_windows=False)
    ends, _ = step.run(np.zeros(job.links.num_ranks))
    return float(ends.min()) * (1 - ROUNDING)


class SimulatedStep:
    """Simulate the threads in which ranks exchange gradients, one step after the other.

    The arguments are those of `predict`, and the two below. If `in_hook` and `starts_early` are both False, each rank
    begins to send after its own backward, without waiting for other ranks.

    Args:
        idle_s: seconds for which connections are idle before each step, in addition to the time of the update.
        has_windows: False to simulate without TCP windows, so that only links limit how fast ranks send.

    Attributes:
        settles_in: number of steps until a step is like all later steps.
        computing: compute times of the ranks.
        computed_s: seconds from the start of the last step until backward ended, float [ranks].
        exposed_s: seconds for which each rank waited for the exchange after backward, float [ranks].
        late_work_s: seconds for which each rank's exchange thread worked after backward, float [ranks].
        sent, sent_over_links, messages: bytes that each rank sent in the last step, bytes that it sent to other hosts,
            and number of messages that it sent, float [ranks].
        busy_s: CPU seconds of each rank for messages in the last step, float [ranks].
        worked_s: CPU seconds of one rank for encoding, packing and decoding in the last step.
    """

    def __init__(
        self,
        calibration: Calibration,
        job: Job,
        collective: Collective,
        *,
        in_hook: bool,
        starts_early: bool,
        idle_s: float = 0.0,
        has_windows: bool = True,
    ) -> None:
        self._calibration, self._job, self._collective = calibration, job, collective
        self._in_hook, self._starts_early = in_hook, starts_early
        self._flows = Flows(job.links, job.slower)
        self.settles_in = SETTLING_STEPS if job.links.num_ranks <= SETTLES_UP_TO else 1
        if has_windows and job.links.latency_s.any():
            if self.settles_in > 1:
                self._flows.windows = SettlingWindows(job.links.num_ranks)
                self.settles_in = SETTLING_WINDOWS
            else:
                self._flows.windows = Windows(job.links.num_ranks)
        # Connections are silent at the end of a step for at least this time, in which the last message is under way and
        # the parameters are updated.
        self._silent_anyway_s = float(job.links.latency_s.max()) + calibration.update_s + idle_s
        self.computing = Computing.of_ranks(calibration, job)

    def run(self, starts: Floats) -> tuple[Floats, Floats]:
        """Simulate a step that begins on each rank at the time `starts`, float [ranks].

        Returns:
            The time at which each rank ends the step, and the seconds for which each rank waited for the exchange,
            float [ranks] each.
        """
        calibration, flows = self._calibration, self._flows
        ranks = np.arange(self._job.links.num_ranks)
        busy_s, over_links = flows.busy_s.copy(), flows.sent_over_links.copy()
        *early, last, computed = self.computing.reached(starts)
        self.computed_s, self.worked_s = computed - starts, 0.0
        num_early = len(early) if self._starts_early else 0
        if flows.windows is not None:
            first = early[0] if num_early else last
            flows.windows.begin_step(float((first - starts).min()) + self._silent_anyway_s)
        flows.ready, flows.crowded_until = starts, float(computed.max())
        if (
            self._in_hook and not self._starts_early
        ):  # each rank tells rank 0 that its backward has ended, and then all begin
            rank_0, nbytes = np.zeros_like(ranks[1:]), np.full(len(ranks) - 1, COMMAND_BYTES)
            flows.ready = np.maximum(flows.ready, last)
            flows.run([Wave(ranks[1:], rank_0, nbytes), Wave(rank_0, ranks[1:], nbytes)])
        sent, messages = flows.sent.copy(), flows.messages.copy()
        under_way: list[tuple[Floats, float]] = []
        to_decode = np.zeros(len(ranks))
        for number, (bucket, encoded) in enumerate(zip(calibration.buckets, self._job.encoded, strict=True)):
            if number == num_early:
                worked_before_s = self._works_s(busy_s)
                if self._starts_early and self._job.shared_cores is not None and self._job.load >= 1:
                    # All shared cores are busy, so the exchange delays the end of compute.
                    carried_s = self._job.links.carry_byte_s * (flows.sent_over_links - over_links)
                    work_s = float((flows.busy_s - busy_s + self.worked_s + carried_s).sum())
                    held_up_s = work_s / self._job.shared_cores
                    last, computed = last + held_up_s, computed + held_up_s
            due = early[number] if number < num_early else last
            flows.crowded_until = float(computed.max())
            to_decode = np.maximum(0.0, to_decode - np.maximum(0.0, due - flows.ready))
            flows.ready = np.maximum(flows.ready, due)
            to_decode = to_decode + self._takes(self._exchange(bucket, encoded, under_way))
        self.sent, self.messages = flows.sent - sent, flows.messages - messages
        begun = flows.ready
        if self._in_hook:  # sent after the last bucket, while ranks decode other buckets
            flows.run([Wave(ranks, ranks, np.full((1, 1), FLAG_BYTES), each_to_each=True)])
        all_told, flows.ready = flows.ready, begun
        for ended, decode_s in under_way:
            flows.ready = np.maximum(flows.ready, ended) + self._takes(decode_s)
        flows.ready = np.maximum(flows.ready + to_decode, all_told)
        self.busy_s, self.sent_over_links = flows.busy_s - busy_s, flows.sent_over_links - over_links
        exchanged = np.maximum(flows.ready, computed)
        self.exposed_s = exchanged - last
        self.late_work_s = self._works_s(busy_s) - worked_before_s
        return exchanged + self.computing.factor * calibration.update_s, self.exposed_s

    def bound_by(self, step_time_s: float, *, alone_s: float, shared_s: float) -> str:
        """Return what limits a step of this time: "cpu", "compute", "exchange" or "network"; see `Prediction`.

        Args:
            step_time_s: seconds of the step.
            alone_s: seconds that the slowest rank takes for the step without exchanging anything.
            shared_s: CPU seconds of all ranks / number of cores that they share.
        """
        if 1.1 * shared_s >= step_time_s:
            return "cpu"
        if step_time_s <= 1.1 * alone_s:
            return "compute"
        return "exchange" if 2 * self.late_work_s.mean() > self.exposed_s.mean() else "network"

    def _works_s(self, busy_before_s: Floats) -> Floats:
        """Return the seconds that each rank's exchange thread has worked in this step, float [ranks].

        Args:
            busy_before_s: `Flows.busy_s` at the start of the step.
        """
        return self.computing.factor * self.worked_s + self._job.slower * (self._flows.busy_s - busy_before_s)

    def _takes(self, work_s: float) -> Floats:
        """Add `work_s` CPU seconds to `worked_s`; return the seconds each rank takes for this work, float [ranks]."""
        self.worked_s += work_s
        return self.computing.factor * work_s

    def _exchange(self, bucket: BucketParts, encoded: EncodedBucket, under_way: list[tuple[Floats, float]]) -> float:
        """Simulate encoding and summing one bucket; return the CPU seconds of decoding that remain to be done.

        If the thread does not wait for the sum, append (end of the sum on each rank, CPU seconds of decoding) to
        `under_way` and return 0.
        """
        flows, collective, num_ranks = self._flows, self._collective, self._job.links.num_ranks
        *before, after_s = encoded.work_s
        for work_s, offer in zip(before, encoded.offers, strict=True):
            flows.ready = flows.ready + self._takes(work_s + (0.0 if is_bare(offer, collective) else offer.pack_s))
            begun = flows.ready
            for each in sums_of(collective, num_ranks, bucket, offer):
                flows.run(each.waves, unpack=each.unpack, merge=each.merge)
            more_s = (num_ranks - 1) * offer.decode_s if collective.leaves_terms else 0.0
            if len(encoded.offers) > 1:  # the terms of each message are added before the next message is encoded
                flows.ready = flows.ready + self._takes(more_s)
            elif isinstance(collective, Allgather | Native):
                under_way.append((flows.ready, after_s + more_s))
                flows.ready = begun
                return 0.0
        return after_s


LEAST_STEPS = 16
# Most steps that are simulated for one period of a trace.
MOST_STEPS = 500
# Most messages in all of these steps together, unless `LEAST_STEPS` steps already have more.
MOST_MESSAGES = 2_000_000
# Number of parts into which a trace is divided to find the slowest and the fastest part.
TENTHS = 10


def replay(
    run_step: Callable[[Floats], tuple[Floats, Floats]],
    starts: Floats,
    *,
    period_s: float,
    at_least_s: float,
    most_steps: int,
) -> dict[str, Any]:
    """Simulate steps from the start of a bandwidth trace through whole periods.

    Return the fields of `Prediction` that with a trace are means over all steps, and the fields that exist only with a
    trace.

    A period is divided into `most_steps` equal intervals. A simulated step that is shorter than an interval stands for
    all steps in the interval, and the next simulated step begins one interval later. So a trace of an hour does not
    need ten thousand simulated steps.

    Args:
        run_step: simulates a step that begins at given times; returns the times at which it ends, and the seconds for
            which each rank waited for the exchange, float [ranks] each.
        starts: start times of the first step, float [ranks]; the step is delayed until the trace repeats.
        period_s: seconds after which the trace repeats.
        at_least_s: shortest time of a step in seconds.
        most_steps: largest number of steps that are simulated in a period.
    """
    share_s = period_s / most_steps
    begin = math.ceil(starts.max() / period_s) * period_s
    until, rounds = math.inf, 0
    moments, made, seconds, exposed = [begin], [0.0], [], []
    ends = starts
    while moments[-1] < until:
        starts = ends + (moments[-1] - ends.max())
        ends, exposed_s = run_step(starts)
        alone_s = float(ends.max() - starts.max())
        seconds.append(max(alone_s, at_least_s))
        exposed.append(float(exposed_s.mean()) + seconds[-1] - alone_s)
        lasts_s = max(seconds[-1], share_s)
        moments.append(moments[-1] + lasts_s)
        made.append(made[-1] + lasts_s / seconds[-1])
        if len(seconds) == LEAST_STEPS:
            rounds = math.ceil((moments[-1] - begin) / period_s)
            until = begin + rounds * period_s
    windows = []
    if rounds <= LEAST_STEPS:  # `made` counts the steps until each moment; tenths are means over all rounds
        edges = np.linspace(0.0, rounds * period_s, rounds * TENTHS + 1)
        steps = np.diff(np.interp(edges, np.array(moments) - begin, made)).reshape(rounds, TENTHS).mean(0)
        length_s = period_s / TENTHS
        windows = [
            Window(begin_s=number * length_s, end_s=(number + 1) * length_s, step_time_s=length_s / float(made_in_it))
            for number, made_in_it in enumerate(steps)
        ]
    weights = np.diff(made)
    order = np.argsort(seconds)
    shares = np.cumsum(weights[order]) / weights.sum()
    return {
        "step_time_s": rounds * period_s / float(np.interp(until, moments, made)),
        "exposed_s": float(np.average(exposed, weights=weights)),
        "step_time_p95_s": float(seconds[order[np.searchsorted(shares, 0.95)]]),
        "slowest_window": max(windows, key=lambda window: window.step_time_s, default=None),
        "fastest_window": min(windows, key=lambda window: window.step_time_s, default=None),
    }
