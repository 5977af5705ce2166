"""`bench list runs`: the progress of runs and decisions, what made them, and which of them can be resumed."""

from __future__ import annotations

import dataclasses
import json
import os
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
    found = {"command": ["/somewhere/bench", "run", "--epochs", "2"], "system": "", "python": "", "packages": {}}
    write_json(folders[0].environment, found)
    (tmp_path / "study").mkdir()
    write_json(tmp_path / "study" / "study.json", {"base": {}, "methods": [], "rule": {}})
    for age, path in enumerate([tmp_path / "study", *(folder.path for folder in folders)]):
        os.utime(path, (1e9 - age, 1e9 - age))
    with locked(folders[2].path):
        told = json.loads(invoke("list", "runs", str(tmp_path), "--json").out)["runs"]
    assert [run.pop("run") for run in told] == ["study", *(folder.run_id for folder in folders)]  # newest first
    assert [tuple(run.values()) for run in told] == [
        ("decision", "unfinished", None, None, f"bench decide {tmp_path / 'study'}"),
        ("run", "ok", 9, None, "bench run --epochs 2"),
        ("run", "interrupted", 9, 5, ""),
        ("run", "running", None, None, ""),
        ("run", "killed", None, 5, ""),
    ]
    assert "bench run --resume" in invoke("list", "runs", str(tmp_path)).out
    assert invoke("list", "models", str(tmp_path)).code == 2
    assert invoke("list", "runs", str(tmp_path / "none")).code == 4
