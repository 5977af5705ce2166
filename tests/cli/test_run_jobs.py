"""Real torchrun jobs: their output, and clean endings."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bench.core.schema import METRICS
from bench.launch.jobs.fork_server import KEEP_MEMORY
from tests.testing import invoke as programs
from tests.testing.invoke import decoys, execute, invoke, only_run, processes_of, rows, status
from tests.testing.plugins import install

Starter = Callable[..., subprocess.Popen[str]]
SMALL = ("run", "--model", "linear", "--train-size", "256", "--test-size", "64", "--batch-size", "16", "--lr", "0.005")

pytestmark = pytest.mark.usefixtures("forked_here")


@pytest.fixture
def start() -> Iterator[Starter]:
    """Return a function that starts `bench` as a program; the programs are killed after the test."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        started.append(programs.start(*arguments, **variables))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def wait_for_step(out: Path, step: int, pattern: str = "*") -> Path:
    """Return the run folder as soon as training has reached this step."""
    while True:
        for progress in out.glob(f"{pattern}/progress.jsonl"):
            if f'"step": {step}' in progress.read_text(encoding="utf-8") or progress.stat().st_size > 400:
                return progress.parent
        time.sleep(0.1)


def ranks_of(folder: Path) -> list[psutil.Process]:
    """Return the training processes in rank order."""
    logs = {file: process for process, files in processes_of(folder).items() for file in files}
    return [logs[file] for file in sorted(logs) if file.endswith("/stdout.log")]


PAIRS = {
    "dense": ("none", "native", "async", 2),
    "dense-ring": ("none", "ring", "async", 3),
    "bf16": ("bf16", "native", "sync", 2),
    "group_topk": ("group_topk:ratio=0.05", "ring", "async", 3),
    "alone": ("topk:ratio=0.05", "allgather", "async", 1),
    "server": ("topk:ratio=0.05", "server:downlink=recode", "sync", 4),
}
SWEEP = """
[base]
model = "linear"
train-size = 256
test-size = 64
batch-size = 16
lr = 0.005
epochs = 3
threads = 1
""" + "".join(
    f"""
[[include]]
name = "{name}"
compressor = "{compressor}"
collective = "{collective}"
trigger = "{trigger}"
world-size = {world_size}
"""
    for name, (compressor, collective, trigger, world_size) in PAIRS.items()
)


def test_runs_train_and_record(tmp_path: Path) -> None:
    (tmp_path / "pairs.toml").write_text(SWEEP, encoding="utf-8")
    answer = invoke("sweep", str(tmp_path / "pairs.toml"), "--out", str(tmp_path / "out"))
    assert answer.code == 0, answer.error
    for name, (compressor, _, _, world_size) in PAIRS.items():
        (folder,) = (tmp_path / "out").glob(f"*-{name}-s1-*")
        check(folder, compressor, world_size)


def check(folder: Path, compressor: str, world_size: int) -> None:
    first, _, last = rows(folder)
    assert list(first) == [column.name for column in METRICS]
    assert (first["status"], last["status"]) == ("running", "ok")
    assert [row["replicas_in_sync"] for row in (first, last)] == ["true", "true"]
    assert int(last["samples"]) == int(last["step"]) * 16 * world_size
    assert float(last["test_accuracy"]) > 0.2
    assert float(last["train_loss"]) < float(first["train_loss"])
    assert float(last["train_accuracy"]) > 0.2
    assert (float(last["payload_bytes_per_step"]) == 0) == (world_size == 1)
    is_sparse_sum = "topk" in compressor and world_size > 1
    assert (0.05 < float(last["support_overlap"]) < 1) if is_sparse_sum else (last["support_overlap"] == "")
    assert status(folder)["status"] == "ok"
    layers = rows(folder, "layers.csv")
    assert {row["layer"] for row in layers} == {row["layer"] for row in layers[: len(layers) // 2]}


def test_the_density_window_of_algc_is_seen_in_training(tmp_path: Path) -> None:
    """Checks every compressed layer at every step, warm-up included."""
    answer = invoke(
        *SMALL, "--model", "small_cnn", "--epochs", "5", "--compressor", "algc:min_numel=1000", "--collective",
        "server", "--threads", "1", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert answer.code == 0, answer.error
    layers = rows(only_run(tmp_path / "out"), "layers.csv")
    aimed = [row for row in layers if row["density_wanted"]]
    assert {row["payload"] for row in aimed} == {"Sparse"}
    assert all((row["payload"] == "Dense") != bool(row["density_wanted"]) for row in layers)
    for row in aimed:
        assert float(row["density_wanted"]) * int(row["numel"]) >= 2
        assert 0.5 <= float(row["density_of_wanted_min"]) <= float(row["density_of_wanted_max"]) <= 2
    assert any(float(row["density_of_wanted_max"]) > 1.1 for row in aimed)  # a tracked threshold is not exact
    assert float(aimed[0]["density_wanted"]) > 0.2 > 0.05 > float(aimed[-1]["density_wanted"])


@pytest.mark.long  # `make bench-ci` compares one seed with a reference from another machine
def test_one_seed_gives_the_same_numbers_twice(tmp_path: Path) -> None:
    columns = [column.name for column in METRICS if column.deterministic]
    found = []
    for attempt in ("first", "second"):
        answer = execute(
            *SMALL, "--model", "small_cnn", "--epochs", "2", "--compressor", "group_topk", "--collective", "ring",
            "--out", str(tmp_path / attempt),
        )  # fmt: skip
        assert answer.code == 0, answer.error
        folder = only_run(tmp_path / attempt)
        assert str(folder) in answer.out
        found.append([{name: row[name] for name in columns} for row in rows(folder)])
    assert found[0] == found[1]


def test_a_rank_that_raises_is_named_with_its_error(tmp_path: Path) -> None:
    answer = execute(
        *SMALL, "--epochs", "2", "--compressor", "raising", "--collective", "ring", "--out", str(tmp_path / "out"),
        PYTHONPATH=install(tmp_path),
    )  # fmt: skip
    assert answer.code == 3
    assert "rank 1: ValueError: this compressor is broken" in answer.error
    folder = only_run(tmp_path / "out")
    assert status(folder)["status"] == "failed"
    assert rows(folder)[-1]["error"] == "rank 1: ValueError: this compressor is broken"
    assert not processes_of(folder)


def test_a_killed_rank_is_named(start: Starter, tmp_path: Path) -> None:
    process = start(
        *SMALL, "--epochs", "50", "--compressor", "sleepy", "--collective", "ring", "--out", str(tmp_path / "out"),
        PYTHONPATH=install(tmp_path),
    )  # fmt: skip
    folder = wait_for_step(tmp_path / "out", 9)
    ranks_of(folder)[1].kill()
    _, error = process.communicate()
    assert process.returncode == 3
    assert "rank 1 was killed by SIGKILL" in error
    assert rows(folder)[-1]["status"] == "failed"
    assert not processes_of(folder)


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(other, marks=pytest.mark.long) for other in (signal.SIGTERM, signal.SIGHUP))],
)
def test_an_interrupted_run_keeps_its_rows_and_leaves_nothing(
    number: signal.Signals, start: Starter, tmp_path: Path
) -> None:
    process = start(
        *SMALL, "--epochs", "50", "--compressor", "sleepy", "--collective", "ring", "--out", str(tmp_path / "out"),
        PYTHONPATH=install(tmp_path),
    )  # fmt: skip
    folder = wait_for_step(tmp_path / "out", 9)
    process.send_signal(number)
    _, error = process.communicate()
    assert process.returncode == 130
    assert "the rows so far are kept" in error
    kept = rows(folder)
    assert [row["status"] for row in kept] == ["running"] * (len(kept) - 1) + ["interrupted"]
    assert status(folder)["status"] == "interrupted"
    assert not processes_of(folder)


def test_no_rank_outlives_a_launcher_that_was_killed(start: Starter, tmp_path: Path) -> None:
    process = start(
        *SMALL, "--epochs", "50", "--compressor", "sleepy", "--collective", "ring", "--out", str(tmp_path / "out"),
        PYTHONPATH=install(tmp_path),
    )  # fmt: skip
    folder = wait_for_step(tmp_path / "out", 9)
    process.kill()
    process.communicate()
    while processes_of(folder):
        time.sleep(0.1)


@pytest.mark.long
def test_a_hang_ends_at_the_timeout_and_the_rank_is_named(tmp_path: Path) -> None:
    answer = execute(
        *SMALL, "--epochs", "2", "--compressor", "hanging", "--collective", "ring", "--timeout", "12",
        "--out", str(tmp_path / "out"), PYTHONPATH=install(tmp_path),
    )  # fmt: skip
    assert answer.code == 3
    assert "waited 12 s for rank 1, which is alive but did not take part" in answer.error
    folder = only_run(tmp_path / "out")
    assert status(folder)["status"] == "failed"
    assert not processes_of(folder)


def test_divergence_stops_the_run_and_names_the_step(tmp_path: Path) -> None:
    answer = invoke(
        *SMALL, "--epochs", "5", "--lr", "1e12", "--optimizer", "sgd:weight_decay=1", "--out", str(tmp_path / "out"),
        "--seeds", "1-3", "--threads", "1",
    )  # fmt: skip
    assert answer.code == 3
    assert answer.error.strip().endswith("not run: --seeds 2,3")
    assert "at step" in answer.error
    assert "try a lower --lr" in answer.error
    assert rows(only_run(tmp_path / "out"))[-1]["status"] == "failed"


UNUSED = """
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.used, self.unused = nn.Linear(3072, num_classes), nn.Linear(5, 5)

    def forward(self, x):
        return self.used(x.flatten(1))
"""


@pytest.mark.parametrize("compressor", ["none", pytest.param("topk", marks=pytest.mark.long)])
def test_layers_without_a_gradient_are_named(compressor: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(UNUSED)
    answer = execute(
        *SMALL, "--model", f"{tmp_path}/net.py:Net", "--steps", "1", "--world-size", "1", "--compressor", compressor,
        "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert answer.code == 3
    assert (
        "rank 0: the loss does not depend on unused.weight, unused.bias, so backward() gave no gradient there; use it "
        "in every forward(), remove it, or freeze it with requires_grad_(False); rows" in answer.error
    )


def test_a_users_own_modules_are_not_taken_for_the_packages(tmp_path: Path) -> None:
    answer = execute(*SMALL, "--steps", "2", "--out", "out", cwd=decoys(tmp_path))
    assert answer.code == 0, answer.error


def test_all_seeds_are_trained_by_ranks_of_one_process_and_meet_where_nobody_else_can(
    start: Starter, tmp_path: Path
) -> None:
    process = start(
        *SMALL, "--epochs", "5", "--seeds", "1,2", "--threads", "1", "--compressor", "sleepy", "--collective", "ring",
        "--out", str(tmp_path / "out"), PYTHONPATH=install(tmp_path),
    )  # fmt: skip
    servers, ranks = [], set()
    for seed in (1, 2):
        folder = wait_for_step(tmp_path / "out", 9, pattern=f"*-s{seed}-*")
        here = ranks_of(folder)
        servers += [rank.ppid() for rank in here]
        ranks |= {rank.pid for rank in here}
        listeners = [c.laddr.ip for rank in here for c in rank.net_connections() if c.status == "LISTEN"]
        assert set(listeners) == {"127.0.0.1"}
        assert (folder / "rendezvous").stat().st_mode & 0o777 == 0o700
        told = psutil.Process(servers[0]).environ()
    assert {name: told[name] for name in KEEP_MEMORY} == KEEP_MEMORY
    assert told["OMP_NUM_THREADS"] == told["MKL_NUM_THREADS"] == "1"
    assert process.wait() == 0
    assert (len(ranks), len(servers), len(set(servers))) == (4, 4, 1)
    assert not psutil.pid_exists(servers[0])
    assert not list((tmp_path / "out").glob("*/rendezvous"))


def test_a_lost_server_is_a_failed_run(start: Starter, tmp_path: Path) -> None:
    process = start(
        *SMALL, "--epochs", "50", "--compressor", "sleepy", "--collective", "ring", "--out", str(tmp_path / "out"),
        PYTHONPATH=install(tmp_path),
    )  # fmt: skip
    folder = wait_for_step(tmp_path / "out", 9)
    ranks = ranks_of(folder)
    psutil.Process(ranks[0].ppid()).kill()
    _, error = process.communicate()
    assert process.returncode == 3
    assert "the process that the ranks are forked from was killed by SIGKILL" in error
    assert not processes_of(folder)


def test_a_launcher_that_is_killed_before_any_rank_runs_leaves_nothing(start: Starter, tmp_path: Path) -> None:
    process = start(*SMALL, "--out", str(tmp_path / "out"))
    below = psutil.Process(process.pid)
    while not (servers := below.children()):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    psutil.wait_procs(servers)
