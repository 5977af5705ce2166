"""`bench.decide` gives what `bench decide` gives, and raises what it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import bench
from bench.datasets.folders import find_files
from bench.extensions.decide.api import Answer
from tests.extensions.decide.test_decide_command import result_of
from tests.testing.invoke import execute

if TYPE_CHECKING:
    from bench.api import run_options

OPTIONS: run_options.RunOptions = {
    "model": "linear", "epochs": 2, "train_size": 320, "test_size": 64, "threads": 1, "target_accuracy": 0.2, "seed": 7,
}  # fmt: skip


@pytest.mark.long
def test_decide_gives_the_answer_of_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    answer = bench.decide(["powersgd"], max_seeds=1, out=out, quiet=True, **OPTIONS)
    assert capfd.readouterr() == ("", "")
    content = json.loads((out / "decision.json").read_text(encoding="utf-8"))
    assert answer.folder == out
    assert answer.to_dict() == content
    assert answer.sentences == content["answer"]
    assert str(answer).splitlines()[0] == content["answer"][0]
    flags = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    # The command continues the study in this folder, so it also finds the same step times.
    command = execute("decide", "--method", "powersgd", *flags, "--max-seeds", "1", "--out", str(out), "--json")
    of_command = json.loads(command.out)
    assert of_command.keys() == content.keys()
    for name in ("base", "methods", "rule", "decisions", "checks", "target_accuracy", "stopped"):
        assert of_command[name] == content[name], name
    assert not find_files(out)[0]  # a text holds none of the results


def test_methods_are_a_table_with_the_intervals() -> None:
    answer = Answer(folder=Path("study"), result=result_of([50, 51, 50, 49, 52, 50], warnings=["a warning"]))
    (row,) = answer.methods.to_dict("records")
    assert (row["method"], row["verdict"], row["num_seeds"]) == ("m", "faster", 6)
    assert row["low"] < row["factor"] < row["high"]
    assert str(answer).splitlines()[-1] == "warning: a warning"
    few = Answer(folder=Path("study"), result=result_of([50, 51])).methods
    assert few["high"].isna().all()  # not known after two seeds


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: bench.decide(), "there is nothing to compare"),
        (lambda: bench.decide(["topk"]), "a decision needs a target; add --target-accuracy"),
        (lambda: bench.decide(method=["topk"]), "bench.decide has no option 'method' (did you mean 'methods'?)"),  # type: ignore[call-arg]
        (lambda: bench.decide(compressor="topk"), "bench decide takes methods"),  # type: ignore[call-arg]
        (lambda: bench.decide([{"comprssor": "topk"}]), "no option 'comprssor' (did you mean 'compressor'?)"),
        (lambda: bench.decide(["topk"], same=3.0), "--same 3.0 is not possible; give 1.0 to 2.0"),
        (lambda: bench.decide(["topk"], max_seeds=0), "--max-seeds 0 is not possible"),
        (lambda: bench.decide(["topk"], target_accuracy=0.9, batch_size=0), "--batch-size 0 is not possible"),
        (lambda: bench.decide(source="."), "holds no study.json"),
    ],
)
def test_errors_are_raised_as_one_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(bench.UsageError) as caught:
        call()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
