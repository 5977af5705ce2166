"""`bench decide`: what it refuses, what it prints, and one whole decision on this machine."""

import json
import math
import re
from pathlib import Path

import pytest

from bench.extensions.decide.api import NOT_TAKEN
from bench.extensions.decide.decision import DecisionRule, decide
from bench.extensions.decide.output import picture, rows_of, sentences, to_dict
from bench.extensions.decide.search import TRAJECTORIES, LinkCheck, StudyResult
from bench.extensions.decide.study import Study
from tests.extensions.decide.test_decision import evidence
from tests.testing.invoke import execute, invoke

RULE = DecisionRule(alpha=0.05, num_candidates=1, same=1.03, accuracy_margin=0.01)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is nothing to compare; give --method at least once"),
        (["--method", "topk"], "a decision needs a target; add --target-accuracy"),
        (["--method", "topk@"], "'topk@' is not a method; write a compressor, strategy or optimizer"),
        (["--compressor", "topk"], "bench decide takes methods; write --method and --baseline"),
        (["--method", "topk", "--steps", "5"], "a decision needs whole trainings, of --epochs; leave out --steps"),
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


def result_of(steps: list[int], **changes: object) -> StudyResult:
    """Return the result of comparing 100 steps of the baseline with these steps of one method, seed by seed."""
    baseline, candidate = evidence([100, 104, 98, 102, 100, 99][: len(steps)]), evidence(steps)
    values = {
        "study": Study(base={}, methods=[{"compressor": "bf16"}, {"compressor": "topk"}], rule={}),
        "target": 0.95,
        "rule": RULE,
        "evidence": [baseline, candidate],
        "decisions": [decide(baseline, candidate, RULE)],
        "checks": [],
        "faster_up_to": {},
        "rates_tried": [],
        "stopped": "",
        "next_seed_s": None,
        "warnings": [],
    }
    return StudyResult(**values | changes)  # type: ignore[arg-type]


def test_the_first_sentence_is_the_answer() -> None:
    yes = sentences(result_of([50, 51, 50, 49, 52, 50]))[0]
    assert yes.startswith("Yes: m reaches 95 % 2.00x [")
    assert "decided after 6 seeds; accuracy 0.0 [0.0, 0.0] points, within the margin." in yes
    assert sentences(result_of([200, 201, 203, 199, 205, 200]))[0].startswith("No: no method reaches 95 % sooner")
    still_open = sentences(result_of([50, 51], stopped="after 2 seeds (--max-seeds)", next_seed_s=4.0))
    assert still_open[0] == "Open: m reaches 95 % 2.02x as soon as m on this link, not decided after 2 seeds."
    assert still_open[1] == "Open after 2 seeds (--max-seeds): m, at about 4 s per further seed."


def test_a_composed_time_that_is_wrong_is_told() -> None:
    check = LinkCheck(method="m", seed=1, composed_s=12.0, measured_s=10.0, is_same_training=True)
    assert check.deviation == pytest.approx(0.2)
    assert "Check: a whole run of m on the link took 10 s, and its composed time is 12 s (+20.0%)." in sentences(
        result_of([50, 51], checks=[check])
    )


def test_files_hold_both_parts_of_a_composed_time() -> None:
    result = result_of([50, 51])
    row = rows_of(result)[-1]
    assert (row["origin"], row["steps"]) == ("composed", 51)
    assert row["steps"] * row["mean_step_time_s"] == pytest.approx(row["time_to_target_s"])
    content = to_dict(result)
    assert content["decisions"][0]["high"] is None  # not known after two seeds
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert picture(result).alt == " ".join(sentences(result))


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
    known = json.loads(execute("decide", str(out), "--max-seeds", "1", "--json", cwd=tmp_path).out)
    assert (known["decisions"], known["checks"]) == (content["decisions"], content["checks"])
    assert math.isfinite(known["decisions"][0]["factor"])
    wrong = execute("decide", str(out), "--baseline", "none", cwd=tmp_path)
    assert (wrong.code, "has its methods; leave out --method and --baseline" in wrong.error) == (2, True)
