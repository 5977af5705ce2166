"""The components in docs/extend, installed as a separate package, behave as the pages say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.invoke import execute
from tests.testing.plugins import install_entry_points

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs/extend").glob("*.md"))
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
FILES = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
SHOWN = re.findall(r"Put this file into `([\w/]+)/(\w+)\.py`:\n\n```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [
    (line.strip(), output.splitlines())
    for block in re.findall(r"^```console\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    for line, output in re.findall(r"^\$ (bench (?:run|data) .*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files shown; with it as PYTHONPATH, a package of the components is installed."""
    folder = tmp_path_factory.mktemp("shown")
    (folder / "shown").mkdir()
    points: dict[str, dict[str, str]] = {}
    for place, module, code in SHOWN:
        (folder / "shown" / f"{module}.py").write_text(code, encoding="utf-8")
        (name,) = (name for name in re.findall(r"^class (\w+)", code, re.MULTILINE) if name.lower() == _bare(module))
        points.setdefault(f"bench.{place.rpartition('/')[2]}", {})[module] = f"shown.{module}:{name}"
    install_entry_points(folder, "shown", points)
    for name, code in FILES:
        (folder / name).write_text(code, encoding="utf-8")
    return folder


def _bare(module: str) -> str:
    return module.replace("_", "")


def test_a_component_of_every_kind_is_shown() -> None:
    assert {place for place, _, _ in SHOWN} == {"compressors", "collectives", "bench/optimizers"}
    assert [name for name, _ in FILES] == ["net.py", "data.py"]
    assert len(COMMANDS) >= 3
    assert any(output[0].startswith("bench: ") for _, output in COMMANDS)


@pytest.mark.parametrize(("module", "code"), [shown[1:] for shown in SHOWN], ids=[shown[1] for shown in SHOWN])
def test_it_is_written_in_the_common_style(module: str, code: str, tmp_path: Path) -> None:
    file = tmp_path / f"{module}.py"
    file.write_text(code, encoding="utf-8")
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--config", str(ROOT / "pyproject.toml"), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("line", "output"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_command_prints_what_is_shown(line: str, output: list[str], installed: Path) -> None:
    answer = execute(*shlex.split(line)[1:], cwd=installed, PYTHONPATH=str(installed))
    if output[0].startswith("bench: "):
        assert answer.code == (3 if "data prepare" in line else 2)
        assert answer.error.splitlines()[-1] == " ".join(output)
    else:
        assert answer.code == 0, answer.error
        printed = {" ".join(row.split()) for row in answer.out.splitlines()}
        assert {" ".join(row.split()) for row in output} - {"", "..."} <= printed


@pytest.mark.slow
def test_all_train_together(installed: Path, tmp_path: Path) -> None:
    answer = execute(
        "run", "--model", "net.py:build:inputs=20", "--dataset", "data.py:load", "--compressor", "round_robin:slices=4",
        "--collective", "star", "--optimizer", "lion", "--steps", "3", "--out", str(tmp_path / "out"),
        cwd=installed, PYTHONPATH=str(installed),
    )  # fmt: skip
    assert answer.code == 0, answer.error


@pytest.mark.slow
def test_attach_finds_an_installed_component_by_its_name(installed: Path, tmp_path: Path) -> None:
    (spec,) = re.findall(r'`attach\(ddp, "(round_robin:slices=\d+)", "ring"\)`', TEXT)
    program = f"""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from gradwire import attach

dist.init_process_group("gloo", init_method="file://{tmp_path / "store"}", rank=0, world_size=1)
ddp = DistributedDataParallel(torch.nn.Linear(100, 100))
attach(ddp, "{spec}", "ring")
ddp(torch.ones(1, 100)).sum().backward()
print(ddp.module.weight.grad.count_nonzero().item())
dist.destroy_process_group()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": f"{installed}:{ROOT}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 100 * 100 // int(spec.rpartition("=")[2])
