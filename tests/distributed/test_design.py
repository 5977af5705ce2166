"""docs/design.md lists the paths of a gradient and of an option; what is traced calls every function of the tables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import attach
from tests.testing.ranks import run_ranks

ROOT = Path(__file__).parents[2]
LISTED = re.compile(
    r"^\| `((?:gradwire|compressors|collectives|bench)/\S+\.py)` \| (`\w+`(?:, `\w+`)*) \|", re.MULTILINE
)


def listed_functions(of: str) -> set[tuple[str, str]]:
    """Return (file, function) of every function in the table of a path, such as that of a gradient."""
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    table = page.split(f"### The path of {of}")[1].split("###")[0]
    return {(path, name.strip("`")) for path, names in LISTED.findall(table) for name in names.split(", ")}


def files_beside() -> set[str]:
    """Return the files that the paragraph after the table names."""
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    return set(re.findall(r"`(\S+\.py)`", page.split("Beside the path stand")[1].split("\n\n")[0]))


def called_functions(rank: int) -> set[tuple[str, str]]:
    """Return (file, function) of everything that a step of topk on its default collective calls in our libraries."""
    called: set[tuple[str, str]] = set()
    is_recording = threading.Event()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and is_recording.is_set() and code.co_filename.startswith(str(ROOT)):
            called.add((str(Path(code.co_filename).relative_to(ROOT)), code.co_name))

    threading.setprofile(note)  # attach starts the exchange thread
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = attach(model, "topk:ratio=0.05,warmup_epochs=0")
    sys.setprofile(note)
    try:
        for step in range(4):
            if step == 3:  # all buffers exist now
                is_recording.set()
            model(torch.randn(16, 64)).square().mean().backward()
            if hook.step_ok():
                optimizer.step()
            optimizer.zero_grad()
        is_recording.clear()
    finally:
        sys.setprofile(None)
        hook.close()
    return called


def test_a_step_calls_every_function_on_a_gradients_way(tmp_path: Path) -> None:
    listed = listed_functions("a gradient")
    files = {file for file, _ in listed}
    assert 10 < len(files) <= 16
    called, _ = run_ranks(called_functions, 2, tmp_path)
    assert listed <= called, f"listed, but not called: {sorted(listed - called)}"
    libraries = ("gradwire/", "compressors/", "collectives/")
    assert {file for file, _ in called if file.startswith(libraries)} == files | files_beside()


# Every Python process of the command runs this program first; it writes each function of ours that is called.
NOTES_CALLS = """
import os, sys, threading
from pathlib import Path

seen = set()

def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code not in seen and code.co_filename.startswith(os.environ["ROOT"] + "/bench/"):
        seen.add(code)
        with Path(os.environ["CALLED"]).open("a") as file:
            file.write(f"{code.co_filename[len(os.environ['ROOT']) + 1:]} {code.co_name}" + chr(10))

sys.setprofile(note)
threading.setprofile(note)
"""


def test_a_command_calls_every_function_on_an_options_way(tmp_path: Path) -> None:
    listed = listed_functions("an option")
    assert 10 < len({file for file, _ in listed}) <= 14
    (tmp_path / "sitecustomize.py").write_text(NOTES_CALLS, encoding="utf-8")
    called = tmp_path / "called"
    arguments = ("run", "--model", "linear", "--steps", "2", "--batch-size", "8", "--train-size", "64")
    done = subprocess.run(
        [sys.executable, "-m", "bench", *arguments, "--test-size", "16"],
        cwd=tmp_path,
        env=os.environ | {"CALLED": str(called), "ROOT": str(ROOT), "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {tuple(line.split()) for line in called.read_text(encoding="utf-8").splitlines()}
    of_bench = {each for each in listed if each[0].startswith("bench/")}
    assert of_bench <= found, f"listed, but not called: {sorted(of_bench - found)}"
