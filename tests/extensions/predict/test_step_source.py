"""`bench decide --from-profile`: predicted speed without accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.deciding.speed import HIGHEST_BPS
from tests.extensions.predict.calibrations import NUMEL, written_profile
from tests.testing.invoke import invoke


@pytest.mark.long
def test_the_first_sentence_says_that_accuracy_was_not_measured(tmp_path: Path) -> None:
    asked = ["decide", "--from-profile", written_profile(tmp_path), "--hosts", "2", "--bandwidth", "10mbit"]
    answer = invoke(*asked, "--method", "topk@allgather", "--method", "none@ring")
    assert answer.code == 0, answer.error
    assert answer.out.startswith("Accuracy was not measured")
    assert 'attach(model, "topk", "allgather"' in answer.out
    told = json.loads(invoke(*asked, "--method", "topk@allgather", "--method", "none@ring", "--json").out)
    bf16, topk, none = told["methods"]
    assert (topk["verdict"], none["verdict"], told["accuracy"]) == ("faster", "slower", None)
    assert topk["first_epoch_payload_bytes_per_step"] > 10 * topk["payload_bytes_per_step"]
    assert (bf16["first_epoch_step_time_s"], topk["first_epoch_step_time_s"] > topk["step_time_s"]) == (None, True)
    assert "first epoch: a step at the start of the density warm-up" in answer.out
    assert topk["factor"] == pytest.approx(bf16["step_time_s"] / topk["step_time_s"])
    assert none["step_time_s"] > 2 * NUMEL * 4 * 8 / 10e6
    assert told["step_as_it_is_s"] == pytest.approx(none["step_time_s"], rel=0.2)
    edge = topk["faster_up_to_bps"]
    assert 10e6 < edge < HIGHEST_BPS
    assert none["faster_up_to_bps"] is None
    above = invoke(*asked[:-1], f"{2 * edge / 1e6:.0f}mbit", "--method", "topk@allgather", "--json")
    assert (above.code, json.loads(above.out)["methods"][1]["verdict"]) == (4, "open")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("", "there is nothing to compare"),
        ("--method topk --target-accuracy 0.9", "leave out --target-accuracy"),
        ("--method topk --jitter 1ms", "leave out --jitter"),
        ("--method topk --max-seeds 3", "leave out --max-seeds"),
        ("--method muon", "cannot predict strategies or optimizers; leave out muon"),
        ("--method qsgd", "qsgd is not in the profile"),
    ],
)
def test_what_a_profile_cannot_answer_is_refused(options: str, sentence: str, tmp_path: Path) -> None:
    answer = invoke("decide", "--from-profile", written_profile(tmp_path), *options.split())
    assert answer.code == 2
    assert sentence in answer.error
