"""examples/notebook.ipynb: every cell has its output, and the code runs, here with fewer samples, epochs and seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.hosts.support import hosts_supported
from tests.testing.invoke import REPOSITORY

SHORTER = {
    '"epochs": 2,': '"epochs": 1, "train_size": 400, "test_size": 100, "threads": 1,',
    "SEEDS = [1, 2, 3]": "SEEDS = [1]",
    "target_accuracy=0.8": "target_accuracy=0.05, max_seeds=1",
}


def code_cells() -> list[dict[str, Any]]:
    content = json.loads((REPOSITORY / "examples/notebook.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def test_every_cell_was_executed_in_order() -> None:
    assert [cell["execution_count"] for cell in code_cells()] == list(range(1, len(code_cells()) + 1))
    assert all(cell["outputs"] for cell in code_cells()[1:])
    assert not [each for cell in code_cells() for each in cell["outputs"] if each["output_type"] == "error"]


@pytest.mark.long
def test_its_code_runs(tmp_path: Path) -> None:
    are_supported, reason = hosts_supported()
    if not are_supported:
        pytest.skip(reason)
    code = "\n".join("".join(cell["source"]) for cell in code_cells())
    for text, shorter in SHORTER.items():
        assert text in code
        code = code.replace(text, shorter)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "bench.run has no option 'epoch' (did you mean 'epochs'?)" in done.stdout
