"""The example that users copy runs as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_digits.py"
SAID = re.compile(r"(\w+) on (\w+): accuracy ([\d.]+)% after 6 steps; each rank sent ([\d,]+) bytes per step")


@pytest.mark.parametrize(("compressor", "collective"), [("group_topk", "ring"), ("sign", "allgather")])
def test_the_example_trains_under_torchrun(compressor: str, collective: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
            *(str(SCRIPT), "--compressor", compressor, "--steps", "6"),
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (said,) = SAID.findall(done.stdout)
    assert said[:2] == (compressor, collective)
    assert 0 < int(said[3].replace(",", "")) < 605_224 / 2
