"""Real jobs of a host and its device processes, next to jobs of equal replicas; refusals before any job starts."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.extensions.place.devices import CXL, TWO_HOSTS, device_file
from tests.testing.invoke import execute, invoke, only_run, processes_of, rows, start

SMALL = (
    "--train-size", "320", "--test-size", "64", "--batch-size", "8", "--steps", "12", "--eval-every", "6",
    "--threads", "1", "--save-model",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("forked_here")


def train(out: Path, *options: str) -> list[dict[str, str]]:
    """Run a job, and return its rows."""
    answer = invoke("run", *SMALL, *options, "--out", str(out))
    assert answer.code == 0, answer.error
    return rows(only_run(out))


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the trained parameters and buffers of a run."""
    state: dict[str, torch.Tensor] = torch.load(run / "model.pt", weights_only=True)
    return state


def assert_same_weights(ours: Path, theirs: Path) -> None:
    """Fail unless parameters and running statistics are equal bit for bit."""
    expected = weights(theirs)
    assert weights(ours).keys() == expected.keys()
    for name, tensor in weights(ours).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_model_larger_than_the_way_to_its_devices_is_loaded(tmp_path: Path) -> None:
    """The channel between two processes buffers 4 MiB; devices read only after they have looked for a checkpoint."""
    (row,) = train(
        tmp_path, "--model", "vgg11:width=16,hidden=1024", "--strategy", f"placed:by=data,devices={CXL}",
        "--steps", "2", "--eval-every", "0", "--warmup-steps", "1", "--train-size", "64",
    )  # fmt: skip
    assert row["state_bytes_per_step"] == "0.0"
    assert float(row["cpu_s_per_step"]) > 0


def test_layers_on_four_devices_train_as_one_process_does(tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", "--world-size", "1")
    placed = train(tmp_path / "placed", "--strategy", f"placed:devices={CXL},activations=turns")
    assert_same_weights(only_run(tmp_path / "placed"), only_run(tmp_path / "alone"))
    for name in ("samples", "train_loss", "test_loss", "test_accuracy"):
        assert [row[name] for row in placed] == [row[name] for row in alone], name
    assert {row["replicas_in_sync"] for row in placed} == {"true"}
    assert {(row["world_size"], row["replicas"]) for row in placed} == {("5", "1")}
    links = rows(only_run(tmp_path / "placed"), "links.csv")
    last = {(row["source"], row["to"]): float(row["activation_bytes"]) for row in links if row["step"] == "12"}
    assert set(last) == {
        ("host", "fpga0"), ("host", "gpu0"), ("fpga0", "asic0"), ("asic0", "fpga0"), ("fpga0", "dpu0"),
        ("dpu0", "fpga0"), ("dpu0", "gpu0"), ("gpu0", "dpu0"), ("gpu0", "asic0"), ("asic0", "gpu0"),
    }  # fmt: skip
    between_devices = sum(nbytes for (source, _), nbytes in last.items() if source != "host")
    assert between_devices == float(placed[-1]["activation_bytes_per_step"])
    assert last["host", "fpga0"] == 64 + 4 * 8 * 3 * 32 * 32


REPLICAS = """
[base]
train-size = 320
test-size = 64
batch-size = 8
steps = 12
eval-every = 6
threads = 1
save-model = true
[[include]]
name = "ranks"
world-size = 2
collective = "pool"
[[include]]
name = "async"
strategy = "placed:by=data,devices=TWO"
[[include]]
name = "sync"
strategy = "placed:by=data,devices=TWO"
trigger = "sync"
[[include]]
name = "pools"
strategy = "placed:by=both,devices=FOUR"
[[include]]
name = "pools-host"
strategy = "placed:by=both,merge=host,devices=FOUR"
[[include]]
name = "two-hosts"
strategy = "placed:by=both,devices=HOSTS"
"""


@pytest.mark.long
def test_replicas_on_devices_train_as_ranks_on_the_pool_do(tmp_path: Path) -> None:
    devices = {"TWO": device_file(tmp_path, gpu=2), "FOUR": device_file(tmp_path, gpu=2, fpga=2), "HOSTS": TWO_HOSTS}
    file = tmp_path / "replicas.toml"
    file.write_text(re.sub("|".join(devices), lambda word: str(devices[word[0]]), REPLICAS), encoding="utf-8")
    answer = execute("sweep", str(file), "--out", str(tmp_path / "out"))
    assert answer.code == 0, answer.error
    folders = {name: next(tmp_path.glob(f"out/*-{name}-s1-*")) for name in re.findall('name = "(.*)"', REPLICAS)}
    ranks = rows(folders["ranks"])[-1]
    for name in ("async", "sync", "pools", "pools-host", "two-hosts"):
        row = rows(folders[name])[-1]
        assert_same_weights(folders[name], folders["ranks"])
        assert (row["replicas_in_sync"], row["replicas"], row["samples"]) == ("true", "2", ranks["samples"])
        assert float(row["train_loss"]) == pytest.approx(float(ranks["train_loss"]))
        assert float(row["test_loss"]) == pytest.approx(float(ranks["test_loss"]))
    links = {(row["source"], row["to"]) for row in rows(folders["two-hosts"], "links.csv")}
    assert {to for source, to in links if source == "left"} >= {"fpga0", "fpga1"}  # it deals to both hosts' pools
    assert not any({source[-1], to[-1]} == {"0", "1"} for source, to in links)  # no replica spans two hosts


def test_a_killed_device_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    process = start(
        "run", "--model", "linear", "--train-size", "320", "--test-size", "64", "--batch-size", "8", "--epochs", "5000",
        "--strategy", f"placed:by=data,devices={device_file(tmp_path, gpu=2)}",
        "--out", str(tmp_path / "out"),
    )  # fmt: skip
    while not (list(tmp_path.glob("out/*/metrics.csv")) and len(rows(only_run(tmp_path / "out"))) > 1):
        assert process.poll() is None
        time.sleep(0.05)
    folder = only_run(tmp_path / "out")
    (victim,) = (p for p in processes_of(folder) if has_open(p, "/2/stdout.log") and not has_open(p, "/1/stdout.log"))
    victim.send_signal(signal.SIGKILL)
    _, error = process.communicate()
    assert process.returncode == 3
    assert "device gpu1 (rank 2) was killed by SIGKILL" in error
    assert rows(folder)[-1]["status"] == "failed"
    assert not processes_of(folder)


def has_open(process: psutil.Process, part: str) -> bool:
    """Return whether the process has a file open whose path contains this part."""
    return any(part in file.path for file in process.open_files())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["placed"], "placed needs a device file; write placed:devices=examples/cxl.toml"),
        (["placed:devices=UNKNOWN"], "the catalogue has no link 'cxl9x16'"),
        (["placed:devices=ON_CUDA"], "gpu0 asks for the torch device 'cuda:0', and placed computes on the CPU only"),
        (["placed:devices=nowhere.toml"], "the device file nowhere.toml cannot be read"),
        ([f"placed:devices={CXL},by=layer"], "by=layer is not possible"),
        ([f"placed:devices={CXL}", "--world-size", "3"], "--world-size 3 contradicts"),
        ([f"placed:by=data,devices={CXL}", "--collective", "server:root=4"], "root=4 is none of the 4 ranks"),
    ],
)
def test_what_placed_refuses_is_one_sentence(options: list[str], sentence: str, tmp_path: Path) -> None:
    unknown = tmp_path / "unknown.toml"
    unknown.write_text('[[device]]\nrole = "gpu"\nlink = "cxl9x16"\n', encoding="utf-8")
    on_cuda = tmp_path / "cuda.toml"
    on_cuda.write_text('[[device]]\nrole = "gpu"\ntorch_device = "cuda:0"\nlink = "cxl2x16"\n', encoding="utf-8")
    options = [option.replace("UNKNOWN", str(unknown)).replace("ON_CUDA", str(on_cuda)) for option in options]
    answer = invoke("run", "--device", "cpu", "--strategy", *options, "--out", str(tmp_path / "out"))
    assert (answer.code, sentence in answer.error) == (2, True), answer.error
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_images_of_another_size_are_dealt_like_others(tmp_path: Path) -> None:
    options = (
        "--model", "resnet18:stem=imagenet", "--dataset", "synthetic:size=64,classes=20", "--steps", "2",
        "--train-size", "32", "--test-size", "8", "--batch-size", "4", "--threads", "1", "--save-model",
    )  # fmt: skip
    for name, more in (
        ("placed", ("--strategy", f"placed:devices={CXL}")),
        ("ddp", ("--world-size", "1")),
    ):
        answer = execute("run", *options, *more, "--out", str(tmp_path / name))
        assert answer.code == 0, answer.error
    assert_same_weights(only_run(tmp_path / "placed"), only_run(tmp_path / "ddp"))


@pytest.mark.long
def test_an_optimizer_that_exchanges_moments_does_so_among_devices(tmp_path: Path) -> None:
    options = ("--optimizer", "max_adabelief", "--collective", "ring")
    (*_, row) = train(
        tmp_path / "placed", *options, "--strategy", f"placed:by=data,devices={device_file(tmp_path, gpu=2)}"
    )
    (*_, expected) = train(tmp_path / "ddp", *options, "--world-size", "2")
    assert_same_weights(only_run(tmp_path / "placed"), only_run(tmp_path / "ddp"))
    assert row["payload_bytes_per_step"] == expected["payload_bytes_per_step"]
