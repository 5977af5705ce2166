"""Rows of trainings on links that are composed of a training without the link and step times."""

from __future__ import annotations

import pytest

from bench.core.config.run import RunConfig
from bench.deciding.step_times import LinkStepTimes
from bench.deciding.trajectory import trajectory_of
from bench.launch.plan import plan
from bench.launch.sweep_file import SweepFile
from benchmarks.published.composing import EVAL_EVERY, composed_rows, studies_of
from tests.unit.deciding.test_decision import run_of


def test_each_link_of_a_sweep_is_a_study() -> None:
    file = SweepFile(
        where="",
        base={"hosts": 4, "epochs": 3},
        matrix={"bandwidth": ["1mbit", "2mbit"]},
        method=[{"compressor": "none"}, {"compressor": "topk"}],
    )
    slow, fast = studies_of(file)
    assert slow.base == {"hosts": 4, "epochs": 3, "eval_every": EVAL_EVERY, "bandwidth": "1mbit"}
    assert fast.base["bandwidth"] == "2mbit"
    assert slow.methods == fast.methods == [{"compressor": "none"}, {"compressor": "topk"}]
    assert "eval_every" not in studies_of(SweepFile(where="", base={"epochs": 3}))[0].base


def test_times_are_those_of_the_link_and_accuracies_those_of_the_training() -> None:
    run = run_of([0.5, 0.9, 0.95], seed=3)  # 10 steps of 1000 bytes, then 20 of 100
    times = LinkStepTimes(nbytes=[100.0, 1000.0], seconds=[[[0.01, 0.1]], [[0.03, 0.1]]])
    config = plan(RunConfig(compressor="topk", seed=3))
    rows = composed_rows(trajectory_of(run, 0.9), config, times, 0.9)
    start_s = trajectory_of(run, 0.9).start_s
    assert [row["train_time_s"] - start_s for row in rows] == pytest.approx([1.0, 1.2, 1.4])
    assert [row["time_to_target_s"] for row in rows] == [None, rows[1]["train_time_s"], rows[1]["train_time_s"]]
    assert [row["test_accuracy"] for row in rows] == [0.5, 0.9, 0.95]
    assert {(row["config_id"], row["seed"], row["compressor"]) for row in rows} == {(config.config_id, 3, "topk")}
