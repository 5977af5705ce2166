"""A rough estimate in place of a calibration."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bench.extensions.predict.estimate import ENCODE_NS, H200_MS, estimated
from bench.extensions.predict.options import PredictConfig
from bench.extensions.predict.ranking import ranked
from bench.extensions.predict.request import check, predicted, request_from_options

NUMEL, HIDDEN = 193_178, 128  # of small_cnn, for ten classes


def asked(**options: object) -> PredictConfig:
    return PredictConfig(**{"model": "small_cnn", "step_time": "20ms", "hosts": 4} | options)  # type: ignore[arg-type]


def test_typical_costs_of_encoding_are_those_of_the_reference() -> None:
    with Path("results/reference/encode-resnet18.csv").open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file) if row["path"] == "native"}
    measured = {
        name: 1e9 * float(rows[name]["seconds"]) / int(rows[name]["numel"]) for name in ENCODE_NS if name in rows
    }
    assert set(ENCODE_NS) - set(measured) == {"powersgd"}
    assert ENCODE_NS | measured == pytest.approx(ENCODE_NS, abs=0.01)
    with Path("results/reference/encode-h200.csv").open(newline="") as file:
        on_gpu = {row["name"]: 1e3 * float(row["seconds"]) for row in csv.DictReader(file) if row["path"] == "triton"}
    assert set(H200_MS) == set(ENCODE_NS)
    known = {name: ms for name, ms in on_gpu.items() if name in H200_MS}
    assert H200_MS | known == pytest.approx(H200_MS, abs=0.01)


def test_a_gpu_encodes_faster_but_starts_kernels_for_each_layer() -> None:
    cpu, gpu = (
        {name: sum(sum(bucket.work_s) for bucket in buckets) for name, buckets in known.encoded.items()}
        for device in ("cpu", "cuda")
        for known in [estimated(PredictConfig(parameters="20M", step_time="250ms", device=device))]
    )
    assert all(gpu[name] < cpu[name] for name in cpu)
    assert gpu["topk"] > 19 * 0.9e-3 > gpu["group_topk"]  # 19 matrices


def test_a_step_takes_what_was_given_and_what_its_bytes_take() -> None:
    config = asked(compressor="bf16", collective="ring", bandwidth="10mbit")
    known = estimated(config)
    alone_s = known.batch_s + known.forward_s + known.backward_s + known.update_s
    assert alone_s == pytest.approx(0.02)
    assert known.numel == NUMEL
    assert estimated(asked(compressor="bf16", classes=100)).numel == NUMEL + 90 * (HIDDEN + 1)
    assert known.buckets[-1].ready_s == pytest.approx(known.backward_s)
    step = predicted(known, check(config, known))
    assert step.payload_bytes_per_step == pytest.approx(2 * 3 / 4 * 2 * NUMEL, rel=1e-3)
    assert step.step_time_s > 0.02 + 8 * step.payload_bytes_per_step / 10e6 - known.update_s
    assert step.bound_by == "network"


def test_all_methods_whose_cost_is_known_are_ranked() -> None:
    config = asked(bandwidth="10mbit")
    ways, left_out = ranked(estimated(config), request_from_options(config))
    assert {way.request.compressor.partition(":")[0] for way in ways} == set(ENCODE_NS)
    assert left_out == {}


def test_ranks_on_one_host_compute_as_fast_as_the_time_that_was_given() -> None:
    crowded = asked(compressor="none", collective="ring", hosts=1, ranks_per_host=64)
    known = estimated(crowded)
    assert predicted(known, check(crowded, known)).step_time_s < 0.1
