"""Predict the step that a request describes, and return the prediction as columns of `metrics.csv`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from bench.core import spec
from bench.core.counters import FRAME_BYTES, FRAME_HEADER_BYTES
from bench.extensions.predict.asynchronous import predict_async
from bench.extensions.predict.calibration import FORWARDED, FRAMES, LOCAL, SEGMENTS, Calibration
from bench.extensions.predict.links import Floats, Links, TraceClock
from bench.extensions.predict.prediction import Prediction, Setting, predict
from bench.extensions.predict.request import PredictionRequest, slowest
from bench.extensions.predict.server_simulation import AsyncSetting
from bench.hosts.cluster import Trace, has_real_frames
from bench.strategies.async_server import AsyncServer
from collectives.base import Collective

# Bytes of a full Ethernet frame / bytes of TCP payload in it; TCP headers have timestamps.
FRAME_PER_PAYLOAD = FRAME_BYTES / (FRAME_BYTES - FRAME_HEADER_BYTES)
# Bytes of acknowledgements per byte of messages: one header without payload per two frames (RFC 1122, 4.2.3.2).
ACK_SHARE = FRAME_HEADER_BYTES / (2 * FRAME_BYTES)
MS_PER_S = 1e3


def links_of(calibration: Calibration, request: PredictionRequest) -> Links:
    """Return the job's links; rates are bytes of TCP payload per second, without the headers of frames.

    Raises:
        UsageError: the file of a trace is missing, or has changed.
    """
    way = _way(calibration, request)
    framed, acked = (1.0, 0.0) if way == SEGMENTS else (FRAME_PER_PAYLOAD, ACK_SHARE)
    costs = calibration.messages.get(way, calibration.messages[LOCAL])

    def rates(figures: Sequence[float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([math.inf if bps is None else bps / 8 / framed for bps in figures])

    return Links(
        host_of=np.repeat(np.arange(len(request.hosts)), request.ranks_per_host),
        up_rate=rates([host.mean_rates[0] for host in request.hosts]),
        down_rate=rates([host.mean_rates[1] for host in request.hosts]),
        up_paces=_paces([host.uplink_trace for host in request.hosts]),
        down_paces=_paces([host.downlink_trace for host in request.hosts]),
        latency_s=np.array([host.latency_s for host in request.hosts]),
        ack_share=acked,
        message_s=costs.message_s + calibration.around_message_s,
        per_byte_s=costs.per_byte_s,
        wake_s=costs.wake_s,
        crowded_wake_s=_crowded_wake_s(calibration, request),
        carry_byte_s=costs.carry_byte_s,
        carriers=1 if way == FORWARDED else request.shared_cores or 1,  # the forwarder is one thread
    )


def _crowded_wake_s(calibration: Calibration, request: PredictionRequest) -> float:
    """Return the seconds until a waiting rank wakes up, which grow linearly with the load above one thread per core."""
    if request.shared_cores is None:
        return 0.0
    known = calibration.crowds[-1].load
    return calibration.crowded_wake_s * max(0.0, request.load(calibration) - 1) / (known - 1) if known > 1 else 0.0


def _way(calibration: Calibration, request: PredictionRequest) -> str:
    """Return how messages travel, a key of `Calibration.messages`.

    LOCAL stands for links between machines, and for a single host. Between virtual hosts that share cores, a thread
    forwards the frames of links with a trace or a delay, if that was measured. Otherwise the kernel carries messages
    as real frames or as large segments.
    """
    if request.shared_cores is None or len(request.hosts) == 1:
        return LOCAL
    if FORWARDED in calibration.messages and (request.link_trace or any(host.latency_s for host in request.hosts)):
        return FORWARDED
    return FRAMES if request.link_trace or has_real_frames(request.hosts) else SEGMENTS


def _paces(traces: Sequence[Trace | None]) -> list[TraceClock | None]:
    """Read each trace once, and return the clock of each link, None for a link without a trace.

    Raises:
        UsageError: the file of a trace is missing, or has changed.
    """
    read = {trace: TraceClock(np.array(trace.opportunities()) / MS_PER_S) for trace in dict.fromkeys(traces) if trace}
    return [None if trace is None else read[trace] for trace in traces]


def predicted(calibration: Calibration, request: PredictionRequest) -> Prediction:
    """Predict a step of a request.

    Raises:
        UsageError: it is too large to be simulated, or the file of a trace is missing or has changed.
    """
    if not request.waits:
        return _predicted_async(calibration, request)
    collective = cast(Collective, spec.build("collectives", request.collective))
    encoded = calibration.encoded[request.compressor]
    plain = request.compressor == "none" and request.collective == "native" and request.starts_early
    if plain:  # DDP by itself
        encoded = tuple(dataclasses.replace(bucket, work_s=(0.0,) * len(bucket.work_s)) for bucket in encoded)
    return predict(
        calibration,
        Setting(
            collective=collective,
            encoded=encoded,
            links=links_of(calibration, request),
            slower=_slower(request),
            load=request.load(calibration),
            shared_cores=request.shared_cores,
            straggler=request.straggler,
            in_hook=not plain,
            starts_early=request.starts_early,
        ),
    )


def _predicted_async(calibration: Calibration, request: PredictionRequest) -> Prediction:
    return predict_async(
        calibration,
        AsyncSetting(
            strategy=cast(AsyncServer, spec.build("strategies", request.strategy)),
            encoded=calibration.encoded[request.compressor],
            links=links_of(calibration, request),
            slower=_slower(request),
            load=request.load(calibration),
            shared_cores=request.shared_cores,
            straggler=request.straggler,
        ),
    )


def _slower(request: PredictionRequest) -> Floats:
    """Return the factor by which each rank computes more slowly because of its host, float [ranks]."""
    return np.repeat([1 / host.cpu_share for host in request.hosts], request.ranks_per_host)


# Predicted only if a rate changes over time; the windows only if steps are also shorter than the trace.
OVER_TIME = ("step_time_p95_s", "slowest_window", "fastest_window")


def columns(request: PredictionRequest, prediction: Prediction, calibration: Calibration) -> dict[str, Any]:
    """Return a request and its prediction, by the names of the columns of `metrics.csv`."""
    figures = dataclasses.asdict(prediction)
    return {
        **_request_columns(request, calibration),
        **{name: value for name, value in figures.items() if name not in OVER_TIME or value},
    }


def same_everywhere(request: PredictionRequest, calibration: Calibration) -> dict[str, Any]:
    """Return the columns that are equal in all predictions of a sweep over link rates."""
    swept = ("uplink_bps", "downlink_bps")
    return {name: value for name, value in _request_columns(request, calibration).items() if name not in swept}


def _request_columns(request: PredictionRequest, calibration: Calibration) -> dict[str, Any]:
    return {
        "model": calibration.model,
        "dataset": calibration.dataset,
        "optimizer": calibration.optimizer,
        "batch_size": calibration.batch_size,
        "compressor": request.compressor,
        "collective": request.collective,
        "strategy": request.strategy,
        "trigger": request.trigger,
        "straggler": request.straggler_text,
        "world_size": request.world_size,
        "hosts": len(request.hosts),
        "ranks_per_host": request.ranks_per_host,
        "uplink_bps": slowest(host.mean_rates[0] for host in request.hosts),
        "downlink_bps": slowest(host.mean_rates[1] for host in request.hosts),
        "link_trace": request.link_trace,
        "latency_s": max(host.latency_s for host in request.hosts),
        "cpu_share": min(host.cpu_share for host in request.hosts),
    }
