"""Profiles in `bench list runs`, and how `bench run --again` repeats them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.core.run_folder import write_json
from bench.report import artifacts
from tests.testing.invoke import invoke


def test_a_profile_is_listed_with_the_command_that_repeats_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profile = {"script": "train.py", "arguments": ["--lr", "0.1"], "world_size": 4, "steps": 9, "warmup_steps": 3}
    write_json(Path("profile.json"), profile | {"encoded": {"none": [], "topk:ratio=0.01": []}})
    write_json(Path("other.json"), {"script": "train.py"})
    (listed,) = json.loads(invoke("list", "runs", ".", "--json").out)["runs"]
    command = (
        "bench profile --world-size 4 --steps 9 --warmup-steps 3 --compressors none,topk:ratio=0.01 "
        "--out profile.json train.py --lr 0.1"
    )
    assert (listed["kind"], listed["command"]) == ("profile", command)
    assert "train.py, which does not exist here" in invoke("run", "--again", "profile.json").error
    Path("train.py").touch()
    kind, found = artifacts.at(Path("profile.json")) or pytest.fail("not found")
    again = command.replace("profile.json", "profile-2.json")  # the first profile is kept
    assert ["bench", *kind.again(found.path)] == again.split()
