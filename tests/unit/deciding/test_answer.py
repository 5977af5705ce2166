"""The answer to a decision: sentences, a table, a picture and files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bench.deciding.answer import Answer, LinkCheck
from bench.deciding.decision import Evidence, best_of, decide
from bench.deciding.folder import write
from bench.deciding.page import page_of
from bench.deciding.study import Study
from bench.report.plots.style import applied
from bench.report.statistics import Effect
from tests.unit.deciding.test_decision import DENSE, FAST, NOISE, RULE, evidence, text_evidence


def result_of(steps: list[int], **changes: Any) -> Answer:
    """Return the result of comparing 100 steps of the baseline with these steps of one method, seed by seed."""
    baseline, candidate = evidence([100, 104, 98, 102, 100, 99][: len(steps)]), evidence(steps)
    return answer_of(baseline, candidate, 0.95, **changes)


def answer_of(baseline: Evidence, candidate: Evidence, target: float, **changes: Any) -> Answer:
    values: dict[str, Any] = {
        "folder": Path("study"),
        "study": Study(base={}, methods=[{"compressor": "bf16"}, {"compressor": "topk"}], rule={}),
        "target": target,
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
    return Answer(**values | changes)


def test_the_first_sentence_is_the_answer() -> None:
    yes = result_of([50, 51, 50, 49, 52, 50]).sentences[0]
    assert yes.startswith("Yes: m reaches 95 % accuracy 2.00x [")
    assert "decided after 6 seeds; final accuracy 0.0 [0.0, 0.0] points, within the margin." in yes
    no = result_of([200, 201, 203, 199, 205, 200]).sentences[0]
    assert no.startswith("No: no method reaches 95 % accuracy sooner")
    still_open = result_of([50, 51], stopped="after 2 seeds (--max-seeds)", next_seed_s=4.0).sentences
    assert still_open[0] == "Open: m reaches 95 % accuracy 2.02x as soon as m on this link, not decided after 2 seeds."
    assert still_open[1] == "Open after 2 seeds (--max-seeds): m, at about 4 s per further seed."


def test_a_composed_time_that_is_wrong_is_told() -> None:
    check = LinkCheck(method="m", seed=1, composed_s=12.0, measured_s=10.0, is_same_training=True)
    assert check.deviation == pytest.approx(0.2)
    assert "Check: a whole run of m on the link took 10 s, and the time composed of step times is 12 s (+20.0%)." in (
        result_of([50, 51], checks=[check]).sentences
    )


def test_files_hold_both_parts_of_a_composed_time() -> None:
    result = result_of([50, 51])
    row = result.rows()[-1]
    assert (row["origin"], row["steps"]) == ("composed", 51)
    assert row["steps"] * row["mean_step_time_s"] == pytest.approx(row["time_to_target_s"])
    content = result.to_dict()
    assert content["decisions"][0]["high"] is None  # not known after two seeds
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert result.picture().alt.endswith(" ".join(result.sentences))


def text_result(bits: float) -> Answer:
    """Return the result of comparing a method that ends with these bits per byte with a baseline that ends with 2."""
    candidate = text_evidence(FAST, [bits * noise for noise in NOISE])
    return answer_of(text_evidence(DENSE, 2.0, "bf16"), candidate, 2.1)


def test_methods_are_a_table_with_the_intervals() -> None:
    answer = result_of([50, 51, 50, 49, 52, 50], warnings=["a warning"])
    (row,) = answer.methods.to_dict("records")
    assert (row["method"], row["verdict"], row["num_seeds"]) == ("m", "faster", 6)
    assert row["low"] < row["factor"] < row["high"]
    assert str(answer).splitlines()[-1] == "warning: a warning"
    few = result_of([50, 51]).methods
    assert few["high"].isna().all()  # not known after two seeds


def test_a_method_with_too_many_bits_is_not_the_best() -> None:
    lossy, kept = (dataclasses.replace(text_result(bits).decisions[0], method=str(bits)) for bits in (2.1, 2.0))
    assert (
        best_of([dataclasses.replace(lossy, factor=Effect(value=9.0, low=None, high=None, p=None)), kept]).method
        == "2.0"
    )


def test_the_answer_is_in_bits_per_byte() -> None:
    yes = text_result(2.008).sentences[0]
    assert yes.startswith("Yes: m reaches 2.1 bits per byte 2.00x [")
    assert "; final bits per byte +0.4 [+0." in yes
    assert yes.endswith("] %, within the margin.")
    but = text_result(2.1).sentences[0]
    assert but.startswith("Yes, but worse in bits per byte: m reaches 2.1 bits per byte")
    assert but.endswith("] %, above the margin.")


def test_files_are_in_bits_per_byte() -> None:
    result = text_result(2.1)
    content = result.to_dict()
    assert content["target_bits_per_byte"] == 2.1
    assert content["decisions"][0]["bits_per_byte"] == pytest.approx(0.05, abs=1e-3)
    assert not any("accuracy" in name for name in (*content, *content["decisions"][0]))
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert result.rows()[0]["test_bits_per_byte"] == 2.0
    with applied():
        axes = result.picture().figure.axes[0]
    assert axes.get_title(loc="left").startswith("Time to 2.1 bits per byte against bf16: ")
    assert result.methods["bits_per_byte_verdict"].tolist() == ["above"]


def test_a_picture_of_one_seed_has_ticks_and_names_only_what_it_shows() -> None:
    base = {"hosts": 2, "bandwidth": "10mbit", "latency": "5ms"}
    study = Study(base=base, methods=[{"compressor": "bf16"}, {"compressor": "topk"}], rule={})
    with applied():
        figure = result_of([80], study=study).picture().figure
        figure.draw_without_rendering()
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    assert sum(low <= tick <= high for tick in axes.get_xticks()) >= 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one seed", "within 1.03x: same time"]
    title = axes.get_title(loc="left").replace("\n", " ")
    assert title == "Time to 95 % accuracy against m: small_cnn on digits, 2 hosts, 10 Mbit/s, latency 5ms"


def test_long_names_leave_room_for_the_picture() -> None:
    result = text_result(2.1)
    name = "local:steps=4 muon group_topk:group_size=4096,ratio=0.1,values=two_magnitudes,warmup_epochs=0"
    result = dataclasses.replace(result, decisions=[dataclasses.replace(result.decisions[0], method=name)])
    with applied():
        figure = result.picture().figure
        figure.draw_without_rendering()
    assert figure.axes[0].get_position().width > 0.4


def test_a_decision_of_whole_runs_is_written_although_no_steps_were_timed(tmp_path: Path) -> None:
    both = (evidence(DENSE), evidence(FAST))
    runs = [dataclasses.replace(each, step_times=None, whole_runs=each.trajectories) for each in both]
    answer = answer_of(*runs, 0.95, folder=tmp_path)
    write(answer, page_of(answer))
    assert (tmp_path / "decision.html").exists()
    assert json.loads((tmp_path / "decision.json").read_text())["answer"] == answer.sentences
