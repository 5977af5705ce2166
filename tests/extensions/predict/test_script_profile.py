"""`bench profile`: what is recorded of a script's steps, what is predicted from it, and one sentence for bad input."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from bench.extensions.predict import recorder
from bench.extensions.predict.script_profile import Profile, profile_of, profiled_steps
from gradwire.exchange.packed_state import load_state
from tests.extensions.predict.calibrations import written
from tests.testing.invoke import execute, invoke
from tests.testing.ranks import run_ranks

WARMUP, STEPS = 2, 3
# Trains two layers in buckets of one layer each, evaluates, and accumulates over two batches.
SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(1)
ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(50, 60), torch.nn.Linear(60, 70)), bucket_cap_mb=0.01)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(int(sys.argv[1])):
    if step == 3:
        with torch.no_grad():
            ddp(torch.randn(4, 50))
    with ddp.no_sync():
        ddp(torch.randn(4, 50)).square().mean().backward()
    ddp(torch.randn(4, 50)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if len(sys.argv) > 2:
    raise RuntimeError(sys.argv[2])
sizes = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
weights = torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])
torch.save((sizes, weights), f"{sys.argv[0]}.{dist.get_rank()}")
"""


def saved(folder: Path, source: str = SCRIPT) -> Path:
    path = folder / "train.py"
    path.write_text(source, encoding="utf-8")
    return path


def trained_twice(rank: int, script: Path, folder: Path) -> Any:
    """Return the sizes of DDP's buckets and the weights of the script alone, and the weights while it is recorded."""
    os.environ["RANK"] = str(rank)
    recorder.sys.argv = [str(script), str(WARMUP + STEPS + 1)]
    runpy.run_path(str(script), run_name="__main__")
    sizes, alone = torch.load(f"{script}.{rank}")
    recorder.main(folder, WARMUP, STEPS, script, [str(WARMUP + STEPS + 1)])
    return sizes, alone.numpy(), torch.load(f"{script}.{rank}")[1].numpy()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return the folder of three ranks' records, and what each rank returned."""
    folder = tmp_path_factory.mktemp("recorded")
    return folder, run_ranks(trained_twice, 3, folder, args=(saved(folder), folder))


def test_a_recorded_script_computes_the_same_bits(recorded: tuple[Path, list[Any]]) -> None:
    for _, alone, watched in recorded[1]:
        assert alone.tobytes() == watched.tobytes()


def test_buckets_are_those_of_ddp_and_moments_are_in_order(recorded: tuple[Path, list[Any]]) -> None:
    folder, results = recorded
    for rank, (sizes, *_) in enumerate(results):
        found = load_state(folder / f"rank-{rank}.safetensors", torch.device("cpu"))
        numels = [sum(found["layers"][index]["numel"] for index in bucket) for bucket in found["buckets"]]
        assert [4 * numel for numel in numels] == [int(size) for size in sizes.split(", ")]
        assert len(numels) > 1
        assert [[each.numel() for each in bucket] for bucket in found["gradients"]] == [
            [found["layers"][index]["numel"] for index in bucket] for bucket in found["buckets"]
        ]
        assert (len(found["steps"]), found["samples"], found["optimizer"]) == (STEPS, 8, "sgd")
        for step in found["steps"]:
            assert (len(step["ready"]), step["micro_steps"]) == (len(numels), 2)
            parts = [step["updated_before"], step["forward"], step["backward"], *step["ready"], step["exchanged"]]
            for moments in zip(*parts, step["updated"], strict=True):  # wall-clock time, then CPU time
                assert list(moments) == sorted(moments)


def test_parts_are_medians_of_the_slowest_rank() -> None:
    def step(begin: float, slowness: float) -> dict[str, Any]:
        at = {"updated_before": 0, "forward": 1, "backward": 3, "exchanged": 9, "updated": 10}
        moments: dict[str, Any] = {name: (begin + 2 * value, slowness * value) for name, value in at.items()}
        return moments | {"ready": [(begin + 8, slowness * 4), (begin + 12, slowness * 6)]}

    ranks = [[step(0, 1), step(20, 1), step(40, 9)], [step(0, 2), step(20, 1), step(40, 1)]]
    times = {"batch_s": 2, "forward_s": 4, "ready_s": [2, 6], "update_s": 8, "exposed_s": 6, "step_s": 20}
    assert profiled_steps(ranks, is_cpu_time=True) == times
    assert profiled_steps(ranks, is_cpu_time=False) == times | {"update_s": 2}


@pytest.mark.long
def test_a_profile_predicts_and_ranks(recorded: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder, _ = recorded
    names = ["none", "bf16", "topk"]
    found = profile_of(folder, folder / "train.py", ["6"], names, lambda _: None)
    path = tmp_path / "profile.json"
    found.write(path)
    assert Profile.read(path) == found
    assert (found.micro_steps, set(found.first_epoch)) == (2, {"topk"})
    for first, later in zip(found.first_epoch["topk"], found.encoded["topk"], strict=True):
        assert first.offers[0].nbytes > 2 * later.offers[0].nbytes
    assert found.batch_s + found.forward_s + found.backward_s + found.update_s > 0
    asked = ["predict", "--from-profile", str(path), "--hosts", "4", "--latency", "0ms"]
    told = json.loads(invoke(*asked, "--bandwidth", "1mbit", "--json").out)
    assert {row["compressor"] for row in told["ranking"]} == set(names)
    assert told["ranking"][0]["compressor"] == "topk"
    nbytes = 4 * sum(sum(bucket.numels) for bucket in found.buckets)
    sent_s = 2 * 3 / 4 * nbytes * 8 / 1e6
    assert sent_s < told["step_as_it_is_s"] < 1.2 * sent_s + found.step_s
    assert any(note.startswith(f"From a profile of {found.script} on 3 ranks") for note in told["notes"])
    said = invoke(*asked, "--bandwidth", "1mbit").out
    assert said.startswith("train.py, 2 micro-steps in a step, 7,330 parameters\n")
    assert "topk:warmup_epochs=0, or do not call hook.set_epoch in your script" in said
    assert "train.py as it is, without compression: a step of" in said
    one = invoke(*asked, "--bandwidth", "1mbit", "--compressor", "topk").out
    assert "a step of train.py without changes takes" in one
    curve = invoke(*asked, "--compressor", "topk", "--sweep", "bandwidth=1mbit..10gbit")
    assert "compression pays" in curve.out
    assert "first epoch" in curve.out
    missing = invoke(*asked, "--compressor", "qsgd")
    assert missing.error.startswith("qsgd is not in the profile, which holds none, bf16, topk")
    assert missing.error.endswith("name it in bench profile --compressors")


MADE = "ddp = DistributedDataParallel("
REFUSED = {
    "ended after 3 steps, but 5 are needed": SCRIPT.replace("range(int(sys.argv[1]))", "range(4)"),
    "does not use DistributedDataParallel": "print('no model')",
    "wraps two models in DistributedDataParallel": SCRIPT.replace(MADE, f"{MADE}torch.nn.Linear(2, 2)); {MADE}"),
    "exchanges gradients several times before an update": SCRIPT.replace("with ddp.no_sync():", "if True:"),
    "trains parameters in torch.float64": SCRIPT.replace("(60, 70))", "(60, 70)).double()"),
}


def refusals(rank: int, script: Path, folder: Path) -> list[str]:
    os.environ["RANK"] = str(rank)
    of_ddp = [(DistributedDataParallel, "__init__"), (DistributedDataParallel, "register_comm_hook")]
    patched: list[tuple[Any, str]] = [*of_ddp, (torch.autograd, "backward")]
    originals = [getattr(owner, name) for owner, name in patched]
    sentences = []
    for source in REFUSED.values():
        script.write_text(source, encoding="utf-8")
        recorder.main(folder, WARMUP, STEPS, script, ["100"])
        sentences.append(load_state(folder / f"rank-{rank}.safetensors", torch.device("cpu"))["refusal"])
        for (owner, name), original in zip(patched, originals, strict=True):
            setattr(owner, name, original)
    return sentences


@pytest.mark.long
def test_scripts_that_cannot_be_profiled(tmp_path: Path) -> None:
    (found,) = run_ranks(refusals, 1, tmp_path, args=(tmp_path / "train.py", tmp_path))
    for sentence, expected in zip(found, REFUSED, strict=True):
        assert sentence.startswith(expected)


HOOK = """
calls = 0
def own(state, bucket):
    global calls
    calls += 1
    future = torch.futures.Future()
    future.set_result(bucket.buffer() * 0)
    return future
ddp.register_comm_hook(None, own)
optimizer ="""


def watched(rank: int, script: Path, folder: Path) -> tuple[Any, Any]:
    os.environ["RANK"] = str(rank)
    recorder.main(folder, WARMUP, STEPS, script, [str(WARMUP + STEPS + 1)])
    return load_state(folder / f"rank-{rank}.safetensors", torch.device("cpu"))["gradients"], torch.load(
        f"{script}.{rank}"
    )[1]


@pytest.mark.long
def test_a_hook_of_the_script_still_decides_what_is_exchanged(tmp_path: Path) -> None:
    script = saved(tmp_path, SCRIPT.replace("\noptimizer =", HOOK))
    ((gradients, weights),) = run_ranks(watched, 1, tmp_path, args=(script, tmp_path))
    torch.manual_seed(1)
    layers = torch.nn.Linear(50, 60), torch.nn.Linear(60, 70)
    assert torch.equal(weights, torch.cat([each.detach().flatten() for layer in layers for each in layer.parameters()]))
    assert all(gradient.any() for bucket in gradients for gradient in bucket)


def test_files_and_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    other = written(tmp_path)
    assert "is not a profile: script: Field required" in invoke("predict", "--from-profile", other).error
    absent = invoke("predict", "--from-profile", str(tmp_path / "none.json"))
    assert "make one with bench profile" in absent.error
    flags = ["--model", "resnet20"], ["--calibration", other], ["--step-time", "1s"], ["--classes", "5"]
    for option in (*flags, ["--strategy", "local"]):
        answer = invoke("predict", "--from-profile", other, *option)
        assert (answer.code, answer.error.endswith(f"leave out {option[0]}")) == (2, True)
    assert invoke("profile", str(tmp_path / "absent.py")).error.startswith(f"there is no script {tmp_path}/absent.py")
    answer = invoke("profile", "--compressors", "auto", str(saved(tmp_path)))
    assert answer.error.startswith("auto works through DDP's own hook")


@pytest.mark.long
def test_a_script_is_recorded_and_ended_or_its_error_is_shown(tmp_path: Path) -> None:
    script, out = saved(tmp_path), tmp_path / "profile.json"
    asked = ["profile", "--steps", "3", "--warmup-steps", "2", "--compressors", "bf16", "--out", str(out), str(script)]
    answer = execute(*asked, "1000000")
    assert answer.code == 0, answer.error
    assert "recorded 3 steps and ended" in answer.error
    assert "train.py: a step of 2 ranks on this machine takes" in answer.out
    assert "s, in 2 micro-steps\n  batch" in answer.out
    assert (Profile.read(out).world_size, Profile.read(out).arguments) == (2, ("1000000",))
    answer = execute(*asked, "1", "the script's own words")
    assert answer.code == 3
    assert "RuntimeError: the script's own words" in answer.error
    assert answer.error.endswith(f"{script} failed with exit code 1; its error is above\n")
