"""Fast starts: help, lists, comparisons and completion import neither torch nor other heavy packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.testing.fake_rows import fake_seeds, topk_seeds, write_runs
from tests.testing.invoke import REPOSITORY, commands

HEAVY = ("torch", "torchvision", "numpy", "pandas", "scipy", "sklearn", "matplotlib")
SAY_LOADED = f"""
loaded = {{name.partition(".")[0] for name in sys.modules}}
print("loaded:", *(name for name in {HEAVY} if name in loaded), file=sys.stderr)
"""
PROBE = f"""
import sys
from bench.cli.app import main
sys.argv[0] = "bench"
try:
    main()
finally:
{textwrap.indent(SAY_LOADED, "    ")}
"""


def probed(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `bench`, which reports at its end the heavy packages that it imported."""
    return subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def bench(*arguments: str, **variables: str) -> tuple[str, set[str]]:
    """Run `bench`; return its output and the heavy packages that it imported."""
    done = probed(*arguments, **variables)
    done.check_returncode()
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("loaded:"))
    return done.stdout, set(line.split()[1:])


EACH_REFUSAL = """
import contextlib, io, json, sys
from bench.cli.app import main
told = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["bench", *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
        except SystemExit as end:
            told.append([end.code, said.getvalue()])
json.dump(told, sys.stdout)
"""


def assert_refused_where_torch_is_broken(sentences: dict[str, str], folder: Path) -> None:
    """Run commands while neither they nor their processes can import torch; see `assert_refused_without_torch`."""
    (folder / "torch.py").write_text("raise ImportError('torch was imported')", encoding="utf-8")
    assert_refused_without_torch(sentences, PYTHONPATH=f"{folder}:{REPOSITORY}")


def assert_refused_without_torch(sentences: dict[str, str], **variables: str) -> None:
    """Run commands in one process; each must be refused with its sentence, and before any heavy import."""
    done = subprocess.run(
        [sys.executable, "-c", EACH_REFUSAL + SAY_LOADED, json.dumps([line.split() for line in sentences])],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "loaded:\n"
    for (line, sentence), (code, said) in zip(sentences.items(), json.loads(done.stdout), strict=True):
        assert (code, sentence in said) == (2, True), (line, said)


EACH_HELP = """
import contextlib, sys
from bench.cli.app import main
for command in ([], *([name] for name in sys.argv[1:])):
    sys.argv = ["bench", *command, "--help"]
    with contextlib.suppress(SystemExit):
        main()
"""


def test_help_imports_nothing_heavy() -> None:
    names = list(commands())
    assert {"run", "compare", "plot", "list"} <= set(names)
    done = subprocess.run(
        [sys.executable, "-c", EACH_HELP + SAY_LOADED, *names], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("Usage: bench") == 1 + len(names)
    assert done.stderr == "loaded:\n"


@pytest.mark.parametrize("arguments", [("--version",), ("list",), ("list", "models", "--json")], ids=" ".join)
def test_listing_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    out, loaded = bench(*arguments)
    assert out
    assert loaded == set()


def test_completion_imports_nothing_heavy() -> None:
    out, loaded = bench(_BENCH_COMPLETE="complete_bash", COMP_WORDS="bench run --compressor group", COMP_CWORD="3")
    assert out.split() == ["group_topk"]
    assert loaded == set()


def test_comparing_imports_no_torch(tmp_path: Path) -> None:
    write_runs(tmp_path, [*fake_seeds([100, 110, 120]), *topk_seeds([200, 210, 220])])
    out, loaded = bench("compare", str(tmp_path))
    assert "topk" in out
    assert not loaded & {"torch", "torchvision", "sklearn", "matplotlib"}


def test_what_numbers_alone_show_is_refused_without_torch() -> None:
    assert_refused_without_torch({
        "run --batch-size 0": "--batch-size 0 is not possible",
        "run --epochs 1 --steps 1": "leave out --steps or --epochs",
        "run --hosts 2 --world-size 3": "--world-size 3 contradicts 2 virtual hosts",
        "run --node-rank 1": "--node-rank 1 does not exist",
        "run --straggler rank=2,slowdown=2": "names none of the 2 ranks",
    })  # fmt: skip


def test_a_wrong_component_is_refused_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.toml").write_text(
        "[base]\ncompressor = 'topk'\n[matrix]\ncollective = ['ring', 'native']", encoding="utf-8"
    )
    assert_refused_where_torch_is_broken({
        "run --compressor topk:ratoi=0.1": "topk has no option 'ratoi' (did you mean 'ratio'?)",
        "run --compressor nope": "there is no compressor 'nope'",
        "run --dry-run --collective nope": "there is no collective 'nope'",
        "run --compressor topk --collective native": "topk sends Sparse payloads: native adds",
        "run --compressor topk:momentum_correction=true --optimizer adam": "adam has no momentum to hand over",
        "run --compressor hylo:gamma=2": "gamma=2 is not possible",
        "run --optimizer sgd:nesterov=true,momentum=0": "nesterov=true needs momentum above 0",
        "run --model resnet19": "there is no model 'resnet19'",
        "run --dataset synthetic:train_size=0": "train_size=0 is not possible",
        "run --strategy async_server --compressor powersgd": "use strategy ddp or compressor none",
        "run --batch-size 5000": "is larger than a rank's shard",
        "sweep wrong.toml": "collective = native: topk sends Sparse payloads",
    }, tmp_path)  # fmt: skip


WITH_AND_WITHOUT = """
import sys
from bench.core import registry, spec
from bench.launch.without_torch import without_torch

def text(kind, name):
    return spec.full_text(spec.build(kind, name))

components = [(kind, name) for kind in registry.KINDS for name in registry.entries(kind)]
without = {each: without_torch(text, *each) for each in components}
assert "torch" not in sys.modules
print(*(each for each in components if without[each] != text(*each)))
"""


@pytest.mark.long
def test_placeholders_build_what_torch_builds() -> None:
    done = subprocess.run([sys.executable, "-c", WITH_AND_WITHOUT], capture_output=True, text=True, check=True)
    assert done.stdout == "('strategies', 'placed')\n"  # which lists torch's activations when it is imported


def test_a_plan_with_kernels_that_there_are_not_is_refused_without_torch() -> None:
    assert_refused_without_torch({"run --dry-run": "GRADWIRE_KERNELS=fast: "}, GRADWIRE_KERNELS="fast")


def test_a_job_is_launched_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out, loaded = bench("run", "--dataset", "digits", "--steps", "1", "--train-size", "200", "--test-size", "20")
    assert out
    assert "torch" not in loaded
