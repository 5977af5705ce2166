"""The fastest collective is found without a prediction of each."""

from __future__ import annotations

from typing import Any

import pytest

from bench.extensions.predict import fastest as module
from bench.extensions.predict.options import PredictConfig
from bench.extensions.predict.ranking import on_each_collective
from bench.extensions.predict.request import least_step_s, predicted, request_from_options
from tests.extensions.predict.calibrations import calibration


@pytest.mark.parametrize(
    "asked",
    [
        {"hosts": 2, "bandwidth": "20mbit"},
        {"hosts": 5, "bandwidth": "1gbit", "latency": "10ms"},
        {"hosts": 4, "uplink": "5mbit", "downlink": "100mbit", "latency": "40ms", "straggler": "rank=1,slowdown=2"},
        {"hosts": 3, "ranks_per_host": 2, "bandwidth": "50mbit", "trigger": "sync"},
        {"hosts": 4, "bandwidth": "20mbit", "shared_cores": 2},
        {"hosts": 4, "bandwidth": "20mbit", "strategy": "local:steps=4"},
    ],
)
@pytest.mark.parametrize("compressor", ["none", "bf16", "topk"])
def test_a_left_out_collective_is_slower(
    compressor: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = calibration()
    job = request_from_options(PredictConfig(compressor=compressor, **asked))
    ways = on_each_collective(known, job)
    all_of_them = [predicted(known, way) for way in ways]
    tried = []
    monkeypatch.setattr(module, "predicted", lambda known, way: tried.append(way) or predicted(known, way))
    best = module.fastest(known, ways)
    first = max(range(len(ways)), key=lambda index: all_of_them[index].samples_per_s)
    assert (best.request, best.prediction) == (ways[first], all_of_them[first])
    for way, prediction in zip(ways, all_of_them, strict=True):
        assert least_step_s(known, way) <= prediction.step_time_s
    has_bounds = not {"shared_cores", "strategy"} & asked.keys()
    assert (len(tried) < len(ways)) == has_bounds
