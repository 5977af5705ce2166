"""A step among ranks that wait for each other, or among ranks that ask a server."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np

from bench.core import spec
from bench.extensions.predict.arrays import Floats
from bench.extensions.predict.asynchronous import predict_async
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.job_links import links_of
from bench.extensions.predict.prediction import Prediction, Setting, predict
from bench.extensions.predict.request import Asked
from bench.extensions.predict.simulated_server import AsyncSetting
from bench.strategies.async_server.async_server import AsyncServer
from collectives.base import Collective


def predicted(calibration: Calibration, asked: Asked) -> Prediction:
    """A step of what was asked for.

    Raises:
        UsageError: it is more than can be simulated, or the file of a trace is gone.
    """
    if not asked.waits:
        return _predicted_async(calibration, asked)
    collective = cast(Collective, spec.build("collectives", asked.collective))
    encoded = calibration.encoded[asked.compressor]
    plain = asked.compressor == "none" and asked.collective == "native" and asked.starts_early
    if plain:  # DDP by itself
        encoded = tuple(dataclasses.replace(bucket, work_s=(0.0,) * len(bucket.work_s)) for bucket in encoded)
    return predict(
        calibration,
        Setting(
            collective=collective,
            encoded=encoded,
            links=links_of(calibration, asked),
            slower=_slower(asked),
            load=asked.load(calibration),
            shared_cores=asked.shared_cores,
            straggler=asked.straggler,
            in_hook=not plain,
            starts_early=asked.starts_early,
        ),
    )


def _predicted_async(calibration: Calibration, asked: Asked) -> Prediction:
    return predict_async(
        calibration,
        AsyncSetting(
            strategy=cast(AsyncServer, spec.build("strategies", asked.strategy)),
            encoded=calibration.encoded[asked.compressor],
            links=links_of(calibration, asked),
            slower=_slower(asked),
            load=asked.load(calibration),
            shared_cores=asked.shared_cores,
            straggler=asked.straggler,
        ),
    )


def _slower(asked: Asked) -> Floats:
    """By which factor each rank computes more slowly, for its host."""
    return np.repeat([1 / host.cpu_share for host in asked.hosts], asked.ranks_per_host)
