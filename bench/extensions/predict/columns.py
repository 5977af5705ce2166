"""A prediction as a row."""

from __future__ import annotations

import dataclasses
from typing import Any

from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.prediction import Prediction
from bench.extensions.predict.request import Asked

OVER_TIME = ("step_time_p95_s", "slowest_window", "fastest_window")
"""what is predicted only where a rate changes over time, the windows only where steps are shorter than the trace"""


def columns(asked: Asked, prediction: Prediction, calibration: Calibration) -> dict[str, Any]:
    """A prediction under the names of the columns of `metrics.csv`."""
    figures = dataclasses.asdict(prediction)
    return {
        **_asked(asked, calibration),
        **{name: value for name, value in figures.items() if name not in OVER_TIME or value},
    }


def same_everywhere(asked: Asked, calibration: Calibration) -> dict[str, Any]:
    """What holds for all predictions of a sweep over the rate of the links, under the same names."""
    swept = ("uplink_bps", "downlink_bps")
    return {name: value for name, value in _asked(asked, calibration).items() if name not in swept}


def _asked(asked: Asked, calibration: Calibration) -> dict[str, Any]:
    return {
        "model": calibration.model,
        "dataset": calibration.dataset,
        "optimizer": calibration.optimizer,
        "batch_size": calibration.batch_size,
        "compressor": asked.compressor,
        "collective": asked.collective,
        "strategy": asked.strategy,
        "trigger": asked.trigger,
        "straggler": asked.straggler_text,
        "world_size": asked.world_size,
        "hosts": len(asked.hosts),
        "ranks_per_host": asked.ranks_per_host,
        "uplink_bps": asked.uplink_bps,
        "downlink_bps": asked.downlink_bps,
        "link_trace": asked.link_trace,
        "latency_s": max(host.latency_s for host in asked.hosts),
        "cpu_share": min(host.cpu_share for host in asked.hosts),
    }
