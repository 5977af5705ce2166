"""`bench decide`: what it refuses, what it prints, and one whole decision on this machine."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.core import registry
from bench.core.config.run import RunConfig
from bench.core.run_folder import RunFolder
from bench.deciding.api import NOT_TAKEN
from bench.deciding.search import TRAJECTORIES
from tests.testing.invoke import execute, invoke


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is nothing to compare; give --method at least once"),
        (["--method", "topk"], "a decision needs a target; add --target-accuracy"),
        (["--method", "topk@"], "'topk@' is not a method; write a compressor, strategy or optimizer"),
        (["--compressor", "topk"], "bench decide takes methods; write --method and --baseline"),
        (["--method", "topk", "--steps", "5"], "a decision needs whole trainings of --epochs; leave out --steps"),
        (["--method", "topk", "--nnodes", "2"], "it cannot use several machines"),
        (["--method", "topk", "--target-accuracy", "0.9", "--stop-at-target"], "leave out --stop-at-target"),
        (["--method", "topk", "--target-accuracy", "0.9", "--budget", "soon"], "'soon' is not a duration"),
    ],
)
def test_what_cannot_be_decided_is_refused(arguments: list[str], sentence: str) -> None:
    answer = invoke("decide", *arguments)
    assert answer.code == 2
    assert sentence in answer.error
    assert "\n" not in answer.error


def test_the_help_does_not_offer_what_is_always_refused() -> None:
    text = invoke("decide", "--help").out
    assert "--epochs" in text
    assert not [name for name in NOT_TAKEN if re.search(rf"^\W*--{name.replace('_', '-')}\b", text, re.MULTILINE)]


def test_a_folder_without_a_study_is_refused(tmp_path: Path) -> None:
    assert "holds no study.json" in invoke("decide", str(tmp_path)).error


def test_a_decision_is_resumed_and_asked_again_for_another_link(tmp_path: Path) -> None:
    options = ["--model", "linear", "--epochs", "2", "--train-size", "320", "--test-size", "64", "--threads", "1"]
    options += ["--method", "powersgd", "--target-accuracy", "0.2", "--max-seeds", "1", "--json", "--seed", "7"]
    out = tmp_path / "study"
    first = execute("decide", *options, "--out", str(out), cwd=tmp_path)
    assert first.code in (0, 4), first.error
    content = json.loads(first.out)
    assert [each["method"] for each in content["decisions"]] == ["powersgd"]
    assert {check["method"] for check in content["checks"]} <= {"bf16", "powersgd"}
    assert content["decisions"][0]["num_seeds"] == 1
    trained = sorted(path.name for path in (out / TRAJECTORIES).iterdir())
    again = execute("decide", *options, "--out", str(out), cwd=tmp_path)
    repeated = json.loads(again.out)
    assert (repeated["decisions"], repeated["checks"]) == (content["decisions"], content["checks"])
    assert sorted(path.name for path in (out / TRAJECTORIES).iterdir()) == trained
    assert (out / "decision.csv").is_file()
    assert (out / "decision.svg").is_file()
    _is_shown_again(out, content)
    known = json.loads(execute("decide", str(out), "--max-seeds", "1", "--json", cwd=tmp_path).out)
    assert (known["decisions"], known["checks"]) == (content["decisions"], content["checks"])
    assert math.isfinite(known["decisions"][0]["factor"])
    wrong = execute("decide", str(out), "--baseline", "none", cwd=tmp_path)
    assert (wrong.code, "has its methods; leave out --method and --baseline" in wrong.error) == (2, True)


def test_without_predictions_a_profile_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "plugins", lambda _group: {})
    answer = invoke("decide", "--from-profile", "profile.json", "--method", "topk")
    assert (answer.code, answer.out) == (2, "")
    assert answer.error.startswith("--from-profile needs the extension bench.extensions.predict, which is missing here")


def _is_shown_again(out: Path, content: dict[str, Any]) -> None:
    """Check what other commands show of the folder of a decision, or of a folder with nothing else."""
    report = out.parent / "report.html"
    told = invoke("report", str(out.parent), "--out", str(report))
    assert (told.code, told.out.splitlines()[1]) == (0, content["answer"][0]), told.error
    assert report.read_text(encoding="utf-8") == (out / "decision.html").read_text(encoding="utf-8")
    assert f"bench run --again {out}" in report.read_text(encoding="utf-8")
    rows = json.loads(invoke("compare", str(out), "--json").out)["rows"]
    assert [row["method"] for row in rows] == ["bf16", "powersgd"]
    assert rows[1]["factor"] == pytest.approx(content["decisions"][0]["factor"])
    assert invoke("plot", str(out), "--out", str(out.parent / "plots")).code == 0
    assert {"decision.svg", "epochs.svg", "time.svg"} <= {file.name for file in (out.parent / "plots").iterdir()}
    for arguments, sentence in (
        (("compare", str(out), "--metric", "step_time_s"), "is a decision, which has its own rule; leave out --metric"),
        (("report", str(out), str(report)), "is a decision, which is shown alone"),
        (("plot", "pareto", str(out)), "has no picture 'pareto'; choose decision, epochs, time"),
        (("run", "--again", str(out), "--seed", "3"), "with its own options; leave out --seed"),
        (("run", "--again", str(report)), "there is nothing to repeat in"),
    ):
        assert sentence in invoke(*arguments).error
    trained = sorted((out / TRAJECTORIES).glob("*-s7-*"))[0]
    (again,) = json.loads(execute("run", "--again", str(trained), "--json").out)
    repeated = RunFolder(Path(again["folder"]))
    assert repeated.path.parent == trained.parent
    assert RunConfig.from_json(repeated.config) == RunConfig.from_json(RunFolder(trained).config)
    shutil.rmtree(repeated.path)


def test_a_decision_that_is_not_finished_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(json.dumps({"base": {}, "methods": [], "rule": {}}), encoding="utf-8")
    for command in ("report", "compare", "plot"):
        answer = invoke(command, str(tmp_path))
        assert answer.code == 4
        assert f"is not finished; bench decide {tmp_path} continues it" in answer.error
