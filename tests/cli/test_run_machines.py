"""Several machines: one launcher on each, here two on the loopback, started as README.md says."""

from __future__ import annotations

import csv
import socket
import time
from pathlib import Path

import pytest

from tests.testing.invoke import decoys, invoke, only_run, processes_of, rows, start, status
from tests.testing.plugins import install

pytestmark = pytest.mark.usefixtures("forked_here")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_two_launchers_train_one_model_and_machine_0_holds_the_results(tmp_path: Path) -> None:
    """Each rank keeps only its own samples there, and trains as ranks that share one copy do."""
    command = (
        "run", "--world-size", "4", "--threads", "1", "--model", "linear", "--train-size", "256", "--test-size", "64",
        "--batch-size", "8", "--steps", "20", "--compressor", "topk", "--collective", "ring",
        "--partition", "dirichlet:alpha=0.5",
    )  # fmt: skip
    place = decoys(tmp_path)
    where = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    machines = [start(*command, *where, "--node-rank", str(rank), "--out", str(rank), cwd=place) for rank in range(2)]
    try:
        said = [machine.communicate()[1] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    assert [machine.returncode for machine in machines] == [0, 0], said
    folders = [only_run(tmp_path / str(rank)) for rank in range(2)]
    assert [status(folder)["status"] for folder in folders] == ["ok", "ok"]
    row = rows(folders[0])[-1]
    assert (row["status"], row["step"], row["samples"], row["replicas_in_sync"]) == ("ok", "20", "640", "true")
    assert (row["hosts"], row["ranks_per_host"], row["world_size"]) == ("2", "2", "4")
    assert not (folders[1] / "metrics.csv").exists()
    here = invoke(*command, "--out", str(tmp_path / "here"))
    assert here.code == 0, here.error
    expected = rows(only_run(tmp_path / "here"))[-1]
    same = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "payload_bytes_per_step", "label_skew")
    assert {name: row[name] for name in same} == {name: expected[name] for name in same}
    with (folders[0] / "partition.csv").open(encoding="utf-8") as file:
        counts = [(int(each["rank"]), int(each["samples"])) for each in csv.DictReader(file)]
    assert [sum(samples for rank, samples in counts if rank == own) for own in range(4)] == [64] * 4


@pytest.mark.long
@pytest.mark.timeout(240)
def test_machines_whose_data_differ_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\n\n\ndef load():\n"
        "    return [(np.random.default_rng().random((64, 3, 32, 32)), np.arange(64) % 3)] * 2\n",
        encoding="utf-8",
    )
    command = (
        "run", "--world-size", "2", "--threads", "1", "--model", "linear", "--dataset", "own.py:load", "--steps", "2",
        "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--timeout", "30",
    )  # fmt: skip
    machines = [start(*command, "--node-rank", str(node), "--out", str(node), cwd=tmp_path) for node in range(2)]
    said = [machine.communicate(timeout=200)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [3, 3], said
    assert "ranks loaded different data with one seed; own.py:load must draw from torch, numpy.random or" in said[0]


@pytest.mark.long
def test_a_machine_that_is_lost_returns_by_the_same_command(tmp_path: Path) -> None:
    # The compressor sleeps while it encodes, so that the run outlasts the return.
    command = (
        "run", "--world-size", "2", "--threads", "1", "--model", "small_cnn", "--train-size", "256", "--test-size",
        "64", "--steps", "800", "--eval-every", "100", "--strategy", "elastic:steps=5,quorum=1", "--compressor",
        "sleepy", "--timeout", "60", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
    )  # fmt: skip
    told = {"PYTHONPATH": install(tmp_path)}
    first, second, again = (
        [*command, "--node-rank", node, "--out", str(tmp_path / name)]
        for node, name in (("0", "first"), ("1", "second"), ("1", "again"))
    )
    machines = [start(*first, **told), start(*second, **told)]
    try:
        while not any(file.stat().st_size for file in (tmp_path / "first").glob("*/progress.jsonl")):
            time.sleep(0.1)  # until the first step
        for process in processes_of(only_run(tmp_path / "second")):
            if "torch.distributed.run" not in (line := process.cmdline()) and "bench.rank.worker" in line:
                process.kill()
        _, error = machines[1].communicate()
        assert machines[1].returncode == 3
        assert "rank 1 was killed by SIGKILL" in error
        machines.append(start(*again, **told))
        _, error = machines[2].communicate()
        assert machines[2].returncode == 0, error
        _, error = machines[0].communicate()
        assert machines[0].returncode == 0, error
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    last = rows(only_run(tmp_path / "first"))[-1]
    assert (last["status"], last["replicas_in_sync"], last["ranks_lost"], last["ranks_returned"]) == (
        "ok", "true", "1", "1",
    )  # fmt: skip
