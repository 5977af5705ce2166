"""Predict the steps of `--strategy local`: ranks train alone, and exchange parameter differences at intervals.

The model is divided into F equal fragments. Every I steps, ranks exchange one fragment:

    alone      time of a step without an exchange, on the slowest rank
    exchange   time from when the last rank has made its I steps until all ranks have decoded the sum of a fragment
    outer      time of the outer step on a fragment, taken to be the time of the optimizer's update / F
    step       alone + (max(0, exchange - delay * alone) + outer) / I

With steps=auto, each rank has its own number of steps between exchanges, as a run would plan it. A step of the run then
stands for as many steps as there are ranks, whichever ranks make them: I is the mean over ranks, and I * alone the time
until the last rank has made its steps.

To simulate the exchange of a fragment, the messages of the whole model are kept, and all times per byte are divided by
F. TCP's windows are not scaled, so on links with a latency the predicted exchange of a fragment is too long. The
prediction leaves out buffers, which are few bytes, the first steps of `start_after`, and the work of `average=senders`
and `clip=median`. An exchange in the background is assumed not to slow down steps, unless the cores are the limit.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from bench.extensions.predict.calibration import BucketParts, Calibration, EncodedBucket, LinearCost, MessageProfile
from bench.extensions.predict.contention import Computing, Job
from bench.extensions.predict.links import Floats
from bench.extensions.predict.prediction import Prediction, SimulatedStep
from collectives.base import Collective
from collectives.schedule.waves import Ints
from gradwire.local.by_speed import COMPUTE_PER_EXCHANGE, planned_steps
from gradwire.local.options import LocalOptions

MANY_STEPS = 10**9  # number of steps that remain; the prediction is for the middle of a long run


def predict_local(calibration: Calibration, job: Job, collective: Collective, options: LocalOptions) -> Prediction:
    """Predict the mean step of ranks that train alone, and exchange parameter differences after several steps.

    Args:
        calibration: the measured parts of a step.
        job: the ranks, their links, whose rates are constant, and their work.
        collective: the collective that sums differences; it must describe its rounds of messages.
        options: the steps between exchanges, the number of fragments (parts of the model) and the delay.
    """
    n = job.links.num_ranks
    calibration, job = _in_one_bucket(calibration, job)
    job = _of_fragment(job, options.fragments)
    computing = Computing.of_ranks(calibration, job)
    updated_s = computing.factor * calibration.update_s
    alone = computing.computed_s + updated_s
    outer_s = float(updated_s.max()) / options.fragments

    def exchanged_after(steps: Ints) -> tuple[SimulatedStep, float]:
        """Simulate an exchange after `steps` steps of each rank; return the simulation, and the exchange's seconds."""
        silent_s = float(((steps - 1) * alone).min())
        step = SimulatedStep(calibration, job, collective, in_hook=False, starts_early=False, idle_s=silent_s)
        ends = np.zeros(n)
        for _ in range(step.settles_in):
            starts = ends + (steps - 1) * alone
            ends, _ = step.run(starts)
        return step, float((ends - updated_s).max() - (starts + step.computed_s).max())

    if options.steps == "auto":
        _, exchange_s = exchanged_after(_steps_by_speed(alone, options.seconds))
        steps = _steps_by_speed(alone, max(options.seconds, COMPUTE_PER_EXCHANGE * (exchange_s + outer_s)))
    else:
        steps = np.full(n, options.interval)
    simulated, exchange_s = exchanged_after(steps)
    interval, trained_s = float(steps.mean()), steps * alone
    alone_s = float(trained_s.max()) / interval
    waited_s = max(0.0, exchange_s - options.delay * alone_s) + outer_s
    exchanged_cpu_s = simulated.worked_s + simulated.busy_s + calibration.update_s / options.fragments
    cpu_s = (computing.cpu_s * steps + exchanged_cpu_s) / interval
    carried_s = job.links.carry_byte_s * simulated.sent_over_links / interval
    shared_s = 0.0 if job.shared_cores is None else float((cpu_s + carried_s).sum()) / job.shared_cores
    step_time_s = max(alone_s + waited_s / interval, shared_s)
    sent = simulated.sent / (options.fragments * interval)
    dense, nbytes = calibration.dense_nbytes, float(sent.mean())
    return Prediction(
        step_time_s=step_time_s,
        exposed_s=step_time_s - float(trained_s.mean()) / interval,
        encode_s=float(computing.factor.mean()) * sum(sum(each.work_s) for each in job.encoded) / interval,
        cpu_s_per_step=float(cpu_s.mean()),
        samples_per_s=n * calibration.batch_size / step_time_s,
        payload_bytes_per_step=nbytes,
        payload_bytes_max_per_step=float(sent.max()),
        messages_per_step=float(simulated.messages.mean()) / interval,
        dense_bytes_per_step=dense,
        compression_ratio=2 * (n - 1) / n * dense / nbytes if nbytes else None,
        bound_by=simulated.bound_by(step_time_s, alone_s=alone_s + outer_s / interval, shared_s=shared_s),
    )


def _steps_by_speed(step_s: Floats, seconds: float) -> Ints:
    """Return each rank's number of steps until an exchange, int [ranks], as planned in the middle of a long run.

    Args:
        step_s: seconds of a step on each rank, float [ranks].
        seconds: shortest time until the exchange, in seconds.
    """
    return np.array(planned_steps(step_s.tolist(), seconds, left=MANY_STEPS * len(step_s)))


def _in_one_bucket(calibration: Calibration, job: Job) -> tuple[Calibration, Job]:
    """Return the calibration and the job with one bucket of all parameters, which `local` sends together.

    Costs per byte, and the growth of messages when they are merged, are taken from the longest message.
    """
    buckets = calibration.buckets
    bucket = BucketParts(
        ready_s=buckets[-1].ready_s,
        layers=tuple(layer for each in buckets for layer in each.layers),
        numels=tuple(numel for each in buckets for numel in each.numels),
    )
    crowds = tuple(dataclasses.replace(each, handed_over_s=each.handed_over_s[-1:]) for each in calibration.crowds)
    # A bucket may have fewer messages than others: just one, if all of the bucket's layers are sent uncompressed.
    before = itertools.zip_longest(*(each.work_s[:-1] for each in job.encoded), fillvalue=0.0)
    offers = itertools.zip_longest(*(each.offers for each in job.encoded))
    encoded = EncodedBucket(
        work_s=(*map(sum, before), sum(each.work_s[-1] for each in job.encoded)),
        offers=tuple(_joined([offer for offer in row if offer is not None]) for row in offers),
    )
    return (
        dataclasses.replace(calibration, buckets=(bucket,), crowds=crowds, encoded={}, first_epoch={}),
        dataclasses.replace(job, encoded=[encoded]),
    )


def _joined(offers: Sequence[MessageProfile]) -> MessageProfile:
    return dataclasses.replace(
        max(offers, key=lambda each: each.nbytes),
        leaves=tuple(leaf for each in offers for leaf in each.leaves),
        layers=tuple(layer for each in offers for layer in each.layers),
        pack_s=sum(each.pack_s for each in offers),
        decode_s=sum(each.decode_s for each in offers),
    )


def _of_fragment(job: Job, fragments: int) -> Job:
    """Return the job with `fragments` times faster work and links; the whole model then takes as long as a fragment."""
    if fragments == 1:
        return job
    links = dataclasses.replace(
        job.links,
        up_rate=job.links.up_rate * fragments,
        down_rate=job.links.down_rate * fragments,
        per_byte_s=job.links.per_byte_s / fragments,
        carry_byte_s=job.links.carry_byte_s / fragments,
    )

    def scaled(cost: LinearCost) -> LinearCost:
        return dataclasses.replace(cost, per_byte_s=cost.per_byte_s / fragments)

    def scaled_message(offer: MessageProfile) -> MessageProfile:
        return dataclasses.replace(
            offer,
            merge=scaled(offer.merge),
            unpack=scaled(offer.unpack),
            pack_s=offer.pack_s / fragments,
            decode_s=offer.decode_s / fragments,
        )

    encoded = [
        EncodedBucket(
            work_s=tuple(seconds / fragments for seconds in bucket.work_s),
            offers=tuple(map(scaled_message, bucket.offers)),
        )
        for bucket in job.encoded
    ]
    return dataclasses.replace(job, links=links, encoded=encoded)
