"""Predict the steps of ranks that train alone and exchange differences of their parameters every so many steps.

With one exchange every I steps, of one of F fragments:

    alone      time of a step without an exchange, on the slowest rank
    exchange   time from the slowest rank's arrival until all ranks have decoded the sum of a fragment
    outer      time to update the outer copy, taken to be that of the optimizer's update
    step       alone + (max(0, exchange - delay * alone) + outer) / I

The exchange of a fragment is simulated as that of the whole model with links, and work per byte, that are F times as
fast. Buffers, which are few bytes, are left out, and so is the work of `average=senders` and `clip=median`.
"""

import dataclasses

import numpy as np

from bench.extensions.predict.calibration import BucketParts, Calibration, EncodedBucket, LinearCost, MessageProfile
from bench.extensions.predict.contention import Job
from bench.extensions.predict.prediction import Prediction, SimulatedStep
from collectives.base import Collective
from compressors.local.options import LocalOptions


def predict_local(calibration: Calibration, job: Job, collective: Collective, options: LocalOptions) -> Prediction:
    """Predict the mean step of ranks that all make a given number of steps between two exchanges.

    Args:
        calibration: the measured parts of a step.
        job: the ranks, their links, whose rates are constant, and their work.
        collective: the collective that sums differences; it must describe its rounds.
        options: the steps between exchanges, as a number, the fragments and the delay.
    """
    n, interval = job.links.num_ranks, options.interval
    calibration, job = _in_one_bucket(calibration, job)
    part = _of_fragment(job, options.fragments)
    exchange = SimulatedStep(calibration, part, collective, in_hook=False, starts_early=False)
    updated_s = exchange.computing.factor * calibration.update_s
    alone = exchange.computing.computed_s + updated_s
    alone_s, outer_s = float(alone.max()), float(updated_s.max())
    exchange.silent_anyway_s += (interval - 1) * alone_s
    ends = np.zeros(n)
    for _ in range(exchange.settles_in):
        starts, (ends, _) = ends, exchange.run(ends)
    exchange_s = float((ends - updated_s).max() - (starts + exchange.computed_s).max())
    waited_s = max(0.0, exchange_s - options.delay * alone_s) + outer_s
    cpu_s = exchange.computing.cpu_s + (exchange.worked_s + exchange.busy_s + updated_s) / interval
    carried_s = part.links.carry_byte_s * exchange.sent_over_links / interval
    shared_s = 0.0 if job.shared_cores is None else float((cpu_s + carried_s).sum()) / job.shared_cores
    step_time_s = max(alone_s + waited_s / interval, shared_s)
    if 1.1 * shared_s >= step_time_s:
        bound_by = "cpu"
    elif step_time_s <= 1.1 * alone_s:
        bound_by = "compute"
    else:
        bound_by = "exchange" if 2 * exchange.late_work_s.mean() > exchange.exposed_s.mean() else "network"
    sent = exchange.sent / (options.fragments * interval)
    dense = calibration.dense_nbytes
    return Prediction(
        step_time_s=step_time_s,
        exposed_s=step_time_s - float(alone.mean()),
        encode_s=float(exchange.computing.factor.mean()) * sum(sum(each.work_s) for each in part.encoded) / interval,
        cpu_s_per_step=float(cpu_s.mean()),
        samples_per_s=n * calibration.batch_size / step_time_s,
        payload_bytes_per_step=float(sent.mean()),
        payload_bytes_max_per_step=float(sent.max()),
        messages_per_step=float(exchange.messages.mean()) / interval,
        dense_bytes_per_step=dense,
        compression_ratio=2 * (n - 1) / n * dense / float(sent.mean()),
        bound_by=bound_by,
    )


def _in_one_bucket(calibration: Calibration, job: Job) -> tuple[Calibration, Job]:
    """Return the same step with all parameters in one bucket, because `local` sends a fragment as one message.

    Costs per byte, and how messages grow when they are merged, are those of the longest message.
    """
    buckets = calibration.buckets
    bucket = BucketParts(
        ready_s=buckets[-1].ready_s,
        layers=tuple(layer for each in buckets for layer in each.layers),
        numels=tuple(numel for each in buckets for numel in each.numels),
    )
    crowds = tuple(dataclasses.replace(each, handed_over_s=each.handed_over_s[-1:]) for each in calibration.crowds)
    encoded = EncodedBucket(
        work_s=tuple(map(sum, zip(*(each.work_s for each in job.encoded), strict=True))),
        offers=tuple(map(_joined, zip(*(each.offers for each in job.encoded), strict=True))),
    )
    return (
        dataclasses.replace(calibration, buckets=(bucket,), crowds=crowds, encoded={"": (encoded,)}),
        dataclasses.replace(job, encoded=[encoded]),
    )


def _joined(offers: tuple[MessageProfile, ...]) -> MessageProfile:
    return dataclasses.replace(
        max(offers, key=lambda each: each.nbytes),
        leaves=tuple(leaf for each in offers for leaf in each.leaves),
        layers=tuple(layer for each in offers for layer in each.layers),
        pack_s=sum(each.pack_s for each in offers),
        decode_s=sum(each.decode_s for each in offers),
    )


def _of_fragment(job: Job, fragments: int) -> Job:
    """Return the job with work and links so fast that the whole model takes as long as one fragment."""
    if fragments == 1:
        return job
    links = dataclasses.replace(
        job.links,
        up_rate=job.links.up_rate * fragments,
        down_rate=job.links.down_rate * fragments,
        per_byte_s=job.links.per_byte_s / fragments,
        carry_byte_s=job.links.carry_byte_s / fragments,
    )

    def faster(cost: LinearCost) -> LinearCost:
        return dataclasses.replace(cost, per_byte_s=cost.per_byte_s / fragments)

    def offer_of(offer: MessageProfile) -> MessageProfile:
        return dataclasses.replace(
            offer,
            merge=faster(offer.merge),
            unpack=faster(offer.unpack),
            pack_s=offer.pack_s / fragments,
            decode_s=offer.decode_s / fragments,
        )

    encoded = [
        EncodedBucket(
            work_s=tuple(seconds / fragments for seconds in bucket.work_s), offers=tuple(map(offer_of, bucket.offers))
        )
        for bucket in job.encoded
    ]
    return dataclasses.replace(job, links=links, encoded=encoded)
