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

The time of a step is that of the slowest rank. It is at least the CPU time of all ranks, plus that of carrying messages
between virtual hosts, divided by the number of cores that they share. If rates change over time (`trace_replay.py`),
the time of a step is the mean over the whole trace.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.extensions.predict.calibration import (
    FP32_BYTES,
    BucketParts,
    Calibration,
    EncodedBucket,
    LeafSize,
    LinearCost,
    MessageProfile,
)
from bench.extensions.predict.contention import Computing, Job
from bench.extensions.predict.flows import NOTHING, Flows
from bench.extensions.predict.links import Floats, SettlingWindows, Windows
from bench.extensions.predict.trace_replay import Window, replay, steps_for
from collectives.allgather import Allgather
from collectives.base import Collective
from collectives.hierarchical import Hierarchical
from collectives.native import Native
from collectives.options import Incompatible
from collectives.payloads.base import HEADER_BYTES
from collectives.schedule.layout import Layout, Leaf
from collectives.schedule.waves import Ints, Lengths, Wave, waves_of


def layout_of(offer: MessageProfile, bucket: BucketParts) -> Layout:
    """Return the layout of a message, which is the same on all ranks."""
    numel_of = dict(zip(bucket.layers, bucket.numels, strict=True))
    return Layout(tuple(map(_leaf, offer.leaves)), offer.layers, tuple(numel_of[layer] for layer in offer.layers))


def lengths_of(offer: MessageProfile) -> Lengths:
    """Return the lengths of a message's pieces.

    The bytes of a payload are assumed to be spread evenly over its elements, and grow with the number of merged ranks.
    Beyond the measured numbers of ranks, they grow at the last measured rate, until the dense form in fp32 is shorter.
    """
    offsets = np.cumsum([0, *(leaf.numel for leaf in offer.leaves)])
    bodies = np.cumsum([0.0, *(leaf.nbytes - HEADER_BYTES for leaf in offer.leaves)])
    filled = np.flatnonzero(np.diff(offsets))
    firsts, ends = offsets[:-1][filled], offsets[1:][filled]

    def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
        payloads = np.maximum(1, np.searchsorted(firsts, stop) - np.searchsorted(ends, start, side="right"))
        one = np.interp(stop, offsets, bodies) - np.interp(start, offsets, bodies)
        dense = np.maximum(one, FP32_BYTES * (stop - start))
        nbytes = HEADER_BYTES * payloads + np.minimum(one * grown(offer, terms), dense)
        return payloads, np.ceil(nbytes - 1e-6).astype(np.int64)

    return Lengths(packed)


def grown(offer: MessageProfile, terms: Ints) -> npt.NDArray[np.float64]:
    """Return how many times larger the merged messages of `terms` ranks are than one rank's message."""
    ranks, factors = np.log(list(offer.growth)).T
    logs = np.interp(np.log(terms), ranks, factors)
    if len(ranks) > 1:
        slope = (factors[-1] - factors[-2]) / (ranks[-1] - ranks[-2])
        logs = logs + slope * np.maximum(0.0, np.log(terms) - ranks[-1])
    factor: npt.NDArray[np.float64] = np.exp(logs)
    return factor


def _leaf(size: LeafSize) -> Leaf:
    wire = None
    if size.wire_numel is not None and size.wire_dtype is not None:
        wire = size.wire_numel, getattr(torch, size.wire_dtype)
    return Leaf(size.numel, size.alignment, size.addable, wire, size.splits_blocks)


# Bytes of the flag that tells whether gradients are finite, which each rank sends to each other rank.
FLAG_BYTES = 8
# Bytes of a rank's notice to rank 0 that its backward has ended, and of the answer that all may begin (trigger sync).
COMMAND_BYTES = 1
ONE_BYTE = Lengths(lambda start, stop, terms: (np.ones_like(start), np.ones_like(start)))
# Most ranks for which several steps are simulated; on each rank, a step begins when the previous one has ended.
SETTLES_UP_TO = 64
# Number of steps until a step is like all later ones. Links with a delay need more (SETTLING_WINDOWS), because the
# windows of new connections grow.
SETTLING_STEPS, SETTLING_WINDOWS = 2, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting(Job):
    """Everything that a step depends on, except for the calibration.

    Attributes:
        collective: the collective that computes sums; `check_predictable` must accept it.
        in_hook: True if sums use the communication hook, and ranks tell each other whether gradients are finite; False
            if DDP sums by itself.
        starts_early: True if each bucket is sent when it is ready (trigger async); False if all are sent when all are
            ready.
    """

    collective: Collective
    in_hook: bool = True
    starts_early: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step, with the column names of `metrics.csv`.

    Attributes:
        bound_by: what limits the step: compute, network, exchange (each rank's own work for the exchange: encoding,
            messages, decoding) or cpu (the cores that ranks share).
        step_time_p95_s, slowest_window, fastest_window: values over a trace; None if rates are constant.
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


def predict(calibration: Calibration, setting: Setting) -> Prediction:
    """Predict a step."""
    n, dense = setting.links.num_ranks, calibration.dense_nbytes
    step = _Step(calibration, setting)
    computing = step.computing
    update_s = computing.factor * calibration.update_s
    ends = np.zeros(n)
    for _ in range(step.settles_in):
        starts, ends = ends, step.run(ends)
    cpu_s = computing.cpu_s + step.worked_s + step.busy_s
    slowest = float((ends - starts).max())
    carried_s = setting.links.carry_byte_s * step.sent_over_links
    shared_s = 0.0 if setting.shared_cores is None else float((cpu_s + carried_s).sum()) / setting.shared_cores
    exposed_s = float(step.exposed_s.mean()) + max(0.0, shared_s - slowest)
    over_time: dict[str, Any] = {}
    if period_s := setting.links.period_s:
        most_steps = steps_for(float(step.messages.sum()))
        over_trace = replay(step, ends, period_s=period_s, at_least_s=shared_s, most_steps=most_steps)
        slowest, exposed_s = over_trace.step_time_s, over_trace.exposed_s
        over_time = over_trace.differences()
    computing_s = float((step.computed_s + update_s).max())
    nbytes, step_time_s = float(step.sent.mean()), max(slowest, shared_s)
    return Prediction(
        step_time_s=step_time_s,
        exposed_s=exposed_s,
        encode_s=float(computing.factor.mean()) * sum(sum(bucket.work_s) for bucket in setting.encoded),
        cpu_s_per_step=float(cpu_s.mean()),
        samples_per_s=n * calibration.batch_size / step_time_s,
        payload_bytes_per_step=nbytes,
        payload_bytes_max_per_step=float(step.sent.max()),
        messages_per_step=float(step.messages.mean()),
        dense_bytes_per_step=dense,
        compression_ratio=2 * (n - 1) / n * dense / nbytes if nbytes else None,
        bound_by=_bound_by(step, slowest_s=slowest, shared_s=shared_s, computing_s=computing_s),
        **over_time,
    )


def _bound_by(step: _Step, *, slowest_s: float, shared_s: float, computing_s: float) -> str:
    if 1.1 * shared_s >= slowest_s:
        return "cpu"
    if slowest_s <= 1.1 * computing_s:
        return "compute"
    return "exchange" if 2 * step.late_work_s.mean() > step.exposed_s.mean() else "network"


class _Step:
    """Simulate the exchange threads of all ranks, one step after the other."""

    def __init__(self, calibration: Calibration, setting: Setting) -> None:
        self._calibration = calibration
        self._setting = setting
        self._flows = Flows(setting.links, setting.slower)
        self.settles_in = SETTLING_STEPS if setting.links.num_ranks <= SETTLES_UP_TO else 1
        if setting.links.latency_s.any():
            if self.settles_in == 1:
                self._flows.windows = Windows(setting.links.num_ranks)
            else:
                self._flows.windows = SettlingWindows(setting.links.num_ranks)
                self.settles_in = SETTLING_WINDOWS
        # Connections are silent at the end of a step for at least this time, in which the last message is under way and
        # the parameters are updated.
        self._silent_anyway_s = float(setting.links.latency_s.max()) + calibration.update_s
        self.computing = Computing.of_ranks(calibration, setting)
        self.computed_s = np.zeros(setting.links.num_ranks)
        self.exposed_s = np.zeros(setting.links.num_ranks)
        self.late_work_s = np.zeros(setting.links.num_ranks)
        self.sent = np.zeros(setting.links.num_ranks)
        self.sent_over_links = np.zeros(setting.links.num_ranks)
        self.messages = np.zeros(setting.links.num_ranks)
        self.busy_s = np.zeros(setting.links.num_ranks)
        self.worked_s = 0.0

    def run(self, starts: Floats) -> Floats:
        """Simulate a step that begins at `starts` on each rank; return when it ends, float [ranks]."""
        calibration, setting, flows = self._calibration, self._setting, self._flows
        n = setting.links.num_ranks
        busy_s, over_links = flows.busy_s.copy(), flows.sent_over_links.copy()
        *early, last, computed = self.computing.reached(starts)
        self.computed_s = computed - starts
        self.worked_s = 0.0
        num_early = len(early) if setting.starts_early else 0
        first = early[0] if num_early else last
        if flows.windows is not None:
            flows.windows.begin_step(float((first - starts).min()) + self._silent_anyway_s)
        flows.ready, flows.crowded_until = starts, float(computed.max())
        if not setting.starts_early:
            self._await_command(last)
        sent, messages = flows.sent.copy(), flows.messages.copy()
        under_way: list[tuple[Floats, float]] = []
        to_decode = np.zeros(n)
        for number, (bucket, encoded) in enumerate(zip(calibration.buckets, setting.encoded, strict=True)):
            if number == num_early:
                worked_before_s = self._works_s(busy_s)
                if setting.starts_early:
                    held_up_s = self._held_up_s(flows.sent_over_links - over_links, flows.busy_s - busy_s)
                    last, computed = last + held_up_s, computed + held_up_s
            due = early[number] if number < num_early else last
            flows.crowded_until = float(computed.max())
            waited = np.maximum(0.0, due - flows.ready)
            to_decode = np.maximum(0.0, to_decode - waited)
            flows.wait_until(due)
            decode_s = self._exchange(bucket, encoded, under_way)
            to_decode = to_decode + self._takes(decode_s)
        self.sent, self.messages = flows.sent - sent, flows.messages - messages
        all_told = self._tell_all_whether_finite()
        for ended, decode_s in under_way:
            flows.wait_until(ended)
            flows.work(self._takes(decode_s))
        flows.work(to_decode)
        flows.wait_until(all_told)
        self.busy_s, self.sent_over_links = flows.busy_s - busy_s, flows.sent_over_links - over_links
        exchanged: Floats = np.maximum(flows.ready, computed)
        self.exposed_s = exchanged - last
        self.late_work_s = self._works_s(busy_s) - worked_before_s
        return exchanged + self.computing.factor * calibration.update_s

    def _await_command(self, computed: Floats) -> None:
        """Let all ranks begin the exchange after each rank has told rank 0 that its backward has ended."""
        flows = self._flows
        others = np.arange(1, self._setting.links.num_ranks)
        rank_0, nbytes = np.zeros_like(others), np.full(others.shape, COMMAND_BYTES)
        flows.wait_until(computed)
        flows.run([Wave(others, rank_0, nbytes), Wave(rank_0, others, nbytes)])

    def _tell_all_whether_finite(self) -> Floats:
        """Return when each rank knows whether all gradients are finite, float [ranks].

        Ranks send this after the last bucket, while they decode other buckets.
        """
        flows, ranks = self._flows, np.arange(self._setting.links.num_ranks)
        begun = flows.ready
        if self._setting.in_hook:
            flows.run([Wave(ranks, ranks, np.full((1, 1), FLAG_BYTES), each_to_each=True)])
        told, flows.ready = flows.ready, begun
        return told

    def _held_up_s(self, sent_over_links: Floats, busy_s: Floats) -> float:
        """Return the seconds by which the exchange delays the end of compute if all shared cores are busy."""
        cores = self._setting.shared_cores
        if cores is None or self._setting.load < 1:
            return 0.0
        carried_s = self._setting.links.carry_byte_s * sent_over_links
        return float((busy_s + self.worked_s + carried_s).sum()) / cores

    def _works_s(self, busy_before_s: Floats) -> Floats:
        """Return the seconds that each rank's exchange thread has worked in this step, float [ranks]."""
        busy_s = self._setting.slower * (self._flows.busy_s - busy_before_s)
        return self.computing.factor * self.worked_s + busy_s

    def _takes(self, work_s: float) -> Floats:
        """Return the seconds that each rank takes for `work_s` CPU seconds, float [ranks]; count these CPU seconds."""
        self.worked_s += work_s
        return self.computing.factor * work_s

    def _exchange(self, bucket: BucketParts, encoded: EncodedBucket, under_way: list[tuple[Floats, float]]) -> float:
        """Encode and sum one bucket; return the CPU seconds of decoding that remain.

        If the thread does not wait for the sum, append (end of the sum, CPU seconds of decoding) to `under_way` and
        return 0.
        """
        setting, flows = self._setting, self._flows
        *before, after_s = encoded.work_s
        for work_s, offer in zip(before, encoded.offers, strict=True):
            flows.work(self._takes(work_s + (0.0 if self._is_bare(offer) else offer.pack_s)))
            begun = flows.ready
            self._sum(bucket, offer)
            more_s = (setting.links.num_ranks - 1) * offer.decode_s if setting.collective.leaves_terms else 0.0
            goes_on = len(encoded.offers) == 1 and isinstance(setting.collective, Allgather | Native)
            if goes_on:
                under_way.append((flows.ready, after_s + more_s))
                flows.ready = begun
                return 0.0
            if len(encoded.offers) > 1:
                # If a bucket has several messages, the terms of each are added before the next one is encoded.
                flows.work(self._takes(more_s))
        return after_s

    def _sum(self, bucket: BucketParts, offer: MessageProfile) -> None:
        """Sum a message; if it has elements of several types, each type is summed after the previous one."""
        collective, n = self._setting.collective, self._setting.links.num_ranks
        layout = layout_of(offer, bucket)
        groups = layout.by_type() if collective.carries_wires else [tuple(range(len(offer.leaves)))]
        for group in groups:
            part = dataclasses.replace(offer, leaves=tuple(offer.leaves[index] for index in group))
            layout = layout_of(part, bucket)
            waves = waves_of(collective, n, layout, lengths_of(part))
            assert waves is not None  # `check_predictable` refuses collectives without rounds
            unpack = NOTHING if self._is_bare(part) else part.unpack
            self._flows.run(waves, unpack=unpack, merge=self._merge(part))

    def _is_bare(self, offer: MessageProfile) -> bool:
        """Return whether a message is sent as wire tensors, not in packed form."""
        return self._setting.collective.carries_wires and all(leaf.wire_numel is not None for leaf in offer.leaves)

    def _merge(self, offer: MessageProfile) -> LinearCost:
        """Return the cost of adding a received contribution, which some collectives decode first."""
        if self._setting.collective.decodes and any(leaf.wire_numel is None for leaf in offer.leaves):
            return LinearCost(per_byte_s=offer.decode_s / max(1, offer.nbytes))
        return offer.merge


def check_predictable(collective: Collective) -> None:
    """Check that a collective's sums can be predicted.

    Raises:
        Incompatible: "native does not say what its ranks send, so it cannot be predicted; try ring or tree".
    """
    parts = [collective.within, collective.between] if isinstance(collective, Hierarchical) else [collective]
    silent = [part for part in parts if waves_of(part, 2, Layout.dense(2, key=(0,)), ONE_BYTE) is None]
    if silent:
        name = silent[0].component_name
        raise Incompatible(f"{name} does not say what its ranks send, so it cannot be predicted; try ring or tree")
