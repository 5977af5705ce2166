"""`bench list runs`: the progress of runs, and which of them can be resumed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from bench.core.files import locked
from bench.core.run_folder import RunFolder, write_json
from tests.testing.checkpoints import add_checkpoint
from tests.testing.configs import make_config
from tests.testing.invoke import invoke


def test_runs_are_listed_with_what_they_can_go_on_from(tmp_path: Path) -> None:
    config = make_config(checkpoint_every=5)
    folders = [RunFolder.create(tmp_path, name, config.digest, 1) for name in ("done", "stopped", "under-way", "lost")]
    for folder, status in zip(folders, ("ok", "interrupted", None, None), strict=True):
        write_json(folder.config, dataclasses.asdict(config))
        add_checkpoint(folder, config, step=5)
        if status:
            write_json(folder.status, {"status": status, "step": 9})
    with locked(folders[2].path):
        told = json.loads(invoke("list", "runs", "--out", str(tmp_path), "--json").out)["runs"]
    listed = {run.pop("run"): run for run in told}
    assert [listed[folder.run_id] for folder in folders] == [
        {"status": "ok", "step": 9, "resumable": None},
        {"status": "interrupted", "step": 9, "resumable": 5},
        {"status": "running", "step": None, "resumable": None},
        {"status": "killed", "step": None, "resumable": 5},
    ]
    assert "bench run --resume" in invoke("list", "runs", "--out", str(tmp_path)).out
    assert invoke("list", "models", "--out", str(tmp_path)).code == 2
    assert invoke("list", "runs", "--out", str(tmp_path / "none")).code == 4
