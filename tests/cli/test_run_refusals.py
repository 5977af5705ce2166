"""Refusals of `bench run`: one sentence that says what to do, exit code 2, and no process started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.testing.invoke import invoke

pytestmark = pytest.mark.usefixtures("planned_here")

REFUSALS = [
    (["--compressor", "topkk"], "there is no compressor 'topkk' (did you mean 'topk'?)"),
    (["--compressor", "muon"], "there is no compressor 'muon' (muon is an optimizer)"),
    (["--model", "resnet19"], "there is no model 'resnet19'"),
    (["--compressor", "topk:ration=0.1"], "has no option 'ration' (did you mean 'ratio'?)"),
    (["--compressor", "topk:ratio=2"], "ratio=2 is not possible"),
    (["--compressor", "topk:ratio"], "'topk:ratio' is malformed"),
    (["--compressor", "topk:ratio=0.1,ratio=0.2"], "gives ratio twice"),
    (["--compressor", "topk", "--collective", "native"], "allgather"),
    (["--batch-size", "5000"], "--batch-size 5000 is larger than a rank's shard"),
    (["--train-size", "100000"], "ask for 1 to 1347"),
    (["--lr", "nan"], "--lr nan is not possible"),
    (["--lr-scaling", "cubic"], "write none, linear or linear:base=N"),
    (["--seeds", "1,x"], "--seeds 1,x is not a list of seeds"),
    (["--seeds", "1,1"], "a seed twice"),
    (["--seeds", "1,5-3"], "--seeds 1,5-3 has a range that ends before it begins"),
    (["--seed", "7", "--seeds", "1,2"], "--seed and --seeds contradict each other; leave out --seed or --seeds"),
    (["--name", "a/b"], "--name 'a/b'"),
    (["--nnodes", "2", "--rdzv-endpoint", "nowhere"], "is not HOST:PORT"),
]


def assert_refused(arguments: list[str], sentence: str, out: Path) -> None:
    """Fail unless `bench run` prints exactly this sentence and leaves no folder."""
    answer = invoke("run", *arguments, "--out", str(out))
    assert answer.code == 2
    assert sentence in answer.error
    assert "\n" not in answer.error
    assert not out.exists()


@pytest.mark.parametrize(("arguments", "sentence"), REFUSALS, ids=[" ".join(a) for a, _ in REFUSALS])
def test_refusal(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    assert_refused(arguments, sentence, tmp_path / "out")


def test_world_size_zero_is_refused() -> None:
    answer = invoke("run", "--world-size", "0")
    assert answer.code == 2
    assert "world-size" in answer.error


def test_an_embedding_with_sparse_gradients_is_refused(tmp_path: Path) -> None:
    net = tmp_path / "net.py"
    net.write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Embedding(9, 2, sparse=True))\n"
    )
    sentence = "Embedding 0 makes sparse gradients, which do not fit in buckets; give it sparse=False"
    assert_refused(["--model", f"{net}:build"], sentence, tmp_path / "out")


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        endpoint = f"localhost:{taken.getsockname()[1]}"
        answer = invoke("run", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--out", str(tmp_path / "out"))
    assert answer.code == 2
    assert "choose another port" in answer.error


def test_an_output_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    answer = invoke("run", "--epochs", "1", "--out", str(tmp_path / "file"))
    assert answer.code == 2
    assert "--out" in answer.error


def test_absent_cifar10_names_the_ways_out(tmp_path: Path) -> None:
    answer = invoke("run", "--dataset", "cifar10:url=http://127.0.0.1:9/", "--data-dir", str(tmp_path))
    assert answer.code == 2
    assert "digits" in answer.error
    assert "synthetic" in answer.error


def test_dry_run_prints_the_plan_and_the_torchrun_line_and_runs_nothing(tmp_path: Path) -> None:
    answer = invoke("run", "--compressor", "topk", "--steps", "5", "--dry-run", "--out", str(tmp_path / "out"))
    assert answer.code == 0
    assert "torch.distributed.run" in answer.out
    assert "OMP_NUM_THREADS=" in answer.out
    assert "allgather" in answer.out
    assert not (tmp_path / "out").exists()
