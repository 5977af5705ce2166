"""The example that users copy runs as it says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.rank import partition
from bench.rank.data import order
from gradwire import attach
from tests.testing.invoke import execute, only_run
from tests.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("forked_here")

SCRIPT = Path(__file__).parents[2] / "examples" / "train_digits.py"
SAID = re.compile(r"(\w+) on (\w+): accuracy ([\d.]+)% after 6 steps; each rank sent ([\d,]+) bytes per step")


@pytest.mark.parametrize(
    ("compressor", "collective"),
    [("group_topk", "allgather"), pytest.param("sign", "allgather", marks=pytest.mark.long)],
)
def test_the_example_trains_under_torchrun(compressor: str, collective: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
            *(str(SCRIPT), "--compressor", compressor, "--steps", "6"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (said,) = SAID.findall(done.stdout)
    assert said[:2] == (compressor, collective)
    assert 0 < int(said[3].replace(",", "")) < 605_224 / 2


@pytest.mark.long
def test_the_fsdp_example_trains_under_torchrun() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
            *(str(SCRIPT.with_name("train_fsdp.py")), "--compressor", "group_topk:ratio=0.01,warmup_epochs=0"),
            *("--epochs", "1", "--accumulate", "2"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (said,) = re.findall(r"after 10 steps; each rank sent ([\d,]+) bytes .* \(its shard has ([\d,]+)\)", done.stdout)
    sent, shard = (int(number.replace(",", "")) for number in said)
    assert 0 < sent < shard / 30


def example(name: str = "train_digits") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPT.with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(rank: int, folder: str, stop_at: int | None) -> torch.Tensor:
    """Return the weights after six steps; `stop_at`: the step after which new objects load a checkpoint."""
    script = example()
    for start, stop in [(0, 6)] if stop_at is None else [(0, stop_at), (stop_at, 6)]:
        torch.manual_seed(1 + start)  # a new process draws other weights, which the checkpoint replaces
        model = DistributedDataParallel(nn.Linear(8, 4))
        compressor = "topk:ratio=0.2,momentum_correction=true"
        hook = attach(model, compressor, "allgather", momentum=0.9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if start:
            assert script.load(Path(folder), model, optimizer, hook) == start
        for step in range(start, stop):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            assert hook.step_ok()
            optimizer.step()
            optimizer.zero_grad()
        if stop < 6:
            script.save(Path(folder), stop, model, optimizer, hook)
        hook.close()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def both(rank: int, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    return trained(rank, folder, None), trained(rank, folder, 4)


def test_what_its_checkpoint_goes_on_with_is_bit_for_bit_what_would_have_come(tmp_path: Path) -> None:
    for whole, resumed in run_ranks(both, 2, tmp_path, args=(str(tmp_path / "checkpoints"),)):
        assert torch.equal(whole, resumed)


def batches_of(rank: int, x: torch.Tensor, y: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of one epoch as `bench run --batch-size 16 --seeds 7` gives them to one of two ranks."""
    shard = partition.iid(len(y), 2, 7)[rank]
    indices = order(shard, seed=7, rank=rank, epoch=0)
    return [(x[batch], y[batch]) for batch in indices[: len(indices) // 16 * 16].split(16)]


def trained_by_dion(rank: int) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    script = example("train_dion")
    torch.manual_seed(7 + rank)  # Dion copies the weights of rank 0
    model = script.network(10)
    (x, y), _ = script.digits()
    script.train(model, batches_of(rank, x, y))
    return model.state_dict()  # type: ignore[no-any-return]


def test_dion_in_a_script_is_dion_in_bench_bit_for_bit(tmp_path: Path) -> None:
    script = SCRIPT.with_name("train_dion.py")
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 40
    answer = execute(
        "run", "--model", f"{script}:network", "--dataset", f"{script}:digits", "--optimizer", "dion", "--lr", "0.05",
        "--schedule", "constant", "--batch-size", "16", "--epochs", "1", "--seeds", "7",
        "--threads", "1", "--device", "cpu", "--save-model", "--out", str(tmp_path / "runs"),
    )  # fmt: skip
    assert answer.code == 0, answer.error
    expected = torch.load(only_run(tmp_path / "runs") / "model.pt", weights_only=True)
    for weights in run_ranks(trained_by_dion, 2, tmp_path):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
