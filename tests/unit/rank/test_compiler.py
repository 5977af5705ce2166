"""torch's compiler is imported only by ranks that compile something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
from bench.rank.process import process_group

def is_loaded():
    return "torch._dynamo.utils" in sys.modules

with process_group(torch.device("cpu"), 60):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(is_loaded())
    doubled = torch.compile(lambda x: 2 * x, backend="eager")
    print(doubled(torch.ones(1)).item(), is_loaded())
"""


@pytest.mark.slow
def test_the_compiler_is_imported_when_something_is_compiled(tmp_path: Path) -> None:
    rank = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "BENCH_INIT_METHOD": f"file://{tmp_path / 'store'}",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | rank, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "2.0", "True"]
