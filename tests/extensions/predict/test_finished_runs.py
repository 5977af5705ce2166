"""Finished runs that predictions are compared with: the selection of runs, and the messages about the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.core.rows import RowWriter
from bench.core.run_folder import write_json
from bench.extensions.predict.validation import as_rows, cells_of, compare, finished_runs
from bench.hosts.cluster import Cluster, HostLink, Trace
from tests.extensions.predict.calibrations import calibration
from tests.testing.configs import make_config

KNOWN = calibration()


def config(*hosts: HostLink, **changes: Any) -> RunConfig:
    cluster = Cluster(hosts=hosts) if hosts else Cluster.uniform(2)
    named = {"model": "small_cnn", "bucket_mb": 1.0, "collective": "ring", "ranks_per_host": 1, "hosts": 2}
    return make_config(**named | {"cluster": cluster.to_dict()} | cluster.columns() | changes)


def keep(folder: Path, name: str, of: RunConfig, *step_times_s: float | None, **row: Any) -> None:
    """Write a run that ended well, with one evaluation for each step time."""
    path = folder / f"{name}-s{of.seed}-{of.digest}"
    path.mkdir(parents=True)
    write_json(path / "config.json", dataclasses.asdict(of))
    write_json(path / "status.json", {"status": "ok"})
    writer = RowWriter(path / "metrics.csv")
    origin = {"cpu": f"{KNOWN.cpu} ({KNOWN.cores} cores)", "kernels": KNOWN.kernels}
    for step_time_s in step_times_s:
        writer.append({"run_id": path.name, "step_time_s": step_time_s} | origin | row)


def held_against(folder: Path, tell: Callable[[str], None] = lambda said: None) -> list[dict[str, Any]]:
    agenda = finished_runs(KNOWN, folder, tell)
    return as_rows(compare(cells_of(KNOWN, agenda.runs), agenda), KNOWN)


def test_all_seeds_of_a_configuration_are_one_cell_and_the_newest_of_each_counts(tmp_path: Path) -> None:
    of_seed = [config(seed=seed) for seed in (1, 2, 3)]
    keep(tmp_path, "20260101T000000-a", of_seed[0], 9.0)
    for number, each in enumerate(of_seed):
        keep(tmp_path / "deeper", "20260102T000000-b", each, 1.0 + number)
    said: list[str] = []
    (cell,) = held_against(tmp_path, said.append)
    assert (cell["runs"], cell["step_time_s"]) == (3, 2.0)
    assert said == ["note: 1 of 4 runs are left out: repeated by a newer run (1)"]


def test_the_last_time_that_is_known_counts(tmp_path: Path) -> None:
    keep(tmp_path, "a", config(), 2.0, None)
    (cell,) = held_against(tmp_path)
    assert cell["step_time_s"] == 2.0


def test_with_steps_by_speed_a_step_is_one_of_each_rank_and_not_one_of_rank_0(tmp_path: Path) -> None:
    of = config(strategy="local:steps=auto,seconds=2")
    keep(tmp_path, "a", of, 0.4, samples_per_s=2 * of.batch_size / 0.5)
    (cell,) = held_against(tmp_path)
    assert cell["step_time_s"] == 0.5


def test_a_run_without_timed_steps_has_no_error(tmp_path: Path) -> None:
    keep(tmp_path, "a", config(), None)
    (cell,) = held_against(tmp_path)
    assert (cell["runs"], cell["step_time_s"], cell["error"]) == (1, None, None)


@pytest.mark.parametrize(
    ("changes", "row", "reason"),
    [
        ({"profile": 3}, {}, "slowed down by --profile"),
        ({"device": "cuda"}, {}, "steps on GPUs cannot be predicted"),
        ({"jitter_s": 0.001}, {}, "links with jitter cannot be predicted"),
        ({"loss_ratio": 0.1}, {}, "links with loss cannot be predicted"),
        ({"batch_size": 64}, {}, "batch_size is 64, but was calibrated with 32"),
        ({"compressor": "dgc"}, {}, "dgc is not in the calibration, which holds none, bf16, topk"),
        (
            {"compressor": "topk", "collective": "allgather", "steps": None, "epochs": 4, "eval_every": 2},
            {},
            "topk sends more in the first 3 epochs, and the timed steps of this run begin in these epochs",
        ),
        ({"augment": False}, {}, "augment is False, but was calibrated with True"),
        ({}, {"cpu": "another (2 cores)"}, f"made with cpu another (2 cores), calibrated with {KNOWN.cpu} ("),
        ({}, {"kernels": "other"}, f"made with kernels other, calibrated with {KNOWN.kernels}"),
    ],
)
def test_what_the_model_does_not_know_is_left_out(
    tmp_path: Path, changes: dict[str, Any], row: dict[str, Any], reason: str
) -> None:
    keep(tmp_path, "a", config(), 1.0)
    keep(tmp_path, "b", config(seed=7, **changes), 1.0, **row)
    said: list[str] = []
    (cell,) = held_against(tmp_path, said.append)
    assert cell["runs"] == 1
    assert said[0].startswith(f"note: 1 of 2 runs are left out: {reason}")
    assert said[0].endswith("(1)")


def test_a_trace_that_is_gone_takes_no_other_run_along(tmp_path: Path) -> None:
    path = tmp_path / "bursts"
    path.write_text("1\n2\n5\n")
    trace = Trace.of(path)
    host = HostLink(name="a", uplink_trace=trace, downlink_trace=trace)
    keep(tmp_path, "a", config(), 1.0)
    keep(tmp_path, "b", config(host, dataclasses.replace(host, name="b")), 1.0)
    assert len(held_against(tmp_path)) == 2
    path.unlink()
    said: list[str] = []
    assert len(held_against(tmp_path, said.append)) == 1
    assert "cannot be read" in said[0]


def test_cells_are_named_by_what_differs(tmp_path: Path) -> None:
    slow = [HostLink(name=name, uplink_bps=1e7, downlink_bps=1e7) for name in "ab"]
    keep(tmp_path, "a", config(*slow, bandwidth="10mbit"), 1.0)
    keep(tmp_path, "b", config(compressor="bf16"), 1.0)
    assert sorted(cell["settings"] for cell in held_against(tmp_path)) == [
        "compressor = bf16, collective = ring",
        "compressor = none, collective = ring, bandwidth = 10mbit",
    ]


def test_a_folder_without_runs_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="holds no finished run that this calibration can predict; give a folder of runs"
    ):
        held_against(tmp_path)
