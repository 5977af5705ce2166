"""Decisions about runs on a text, whose target and final quality are in bits per byte."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.core.config.run import RunConfig
from bench.core.errors import NothingToCompare, UsageError
from bench.core.schema import METRICS_BY_NAME
from bench.extensions.decide.api import Answer
from bench.extensions.decide.decision import Evidence, best_of, decide
from bench.extensions.decide.output import picture, print_answer, rows_of, sentences, to_dict
from bench.extensions.decide.search import StudyResult
from bench.extensions.decide.study import Method, Study
from bench.extensions.decide.trajectory import trajectory_of
from bench.report.plots.style import applied
from bench.report.store import Run
from tests.extensions.decide.test_decide_command import RULE
from tests.extensions.decide.test_decision import TIMES
from tests.extensions.decide.test_search import Fakes, fakes, run_search  # noqa: F401 (a fixture)
from tests.testing.fake_results import fake_text_run


def text_run(bits: list[float], seed: int = 1, **values: Any) -> Run:
    rows = fake_text_run(bits, seed=seed, payload_bytes_per_step=100.0, **values)
    return Run(rows=[dict.fromkeys(METRICS_BY_NAME) | row for row in rows])


def evidence(steps: list[int], bits: float | list[float], method: str = "m") -> Evidence:
    """Return trainings of a text with these numbers of steps of 100 bytes and these final bits per byte."""
    ends = bits if isinstance(bits, list) else [bits] * len(steps)
    found = [trajectory_of(text_run([each], seed), 2.1) for seed, each in enumerate(ends)]
    return Evidence(
        method=method,
        trajectories=[
            dataclasses.replace(each, intervals=[(0, number, 100.0)], num_to_target=1)
            for each, number in zip(found, steps, strict=True)
        ],
        step_times=TIMES,
    )


DENSE, FAST = [100, 104, 98, 102, 100, 99], [50, 51, 50, 49, 52, 50]
NOISE = [1.0, 1.001, 0.999, 1.0, 1.001, 0.999]


def result_of(bits: float) -> StudyResult:
    """Return the result of comparing a method that ends with these bits per byte with a baseline that ends with 2."""
    baseline = evidence(DENSE, 2.0, "bf16")
    candidate = evidence(FAST, [bits * noise for noise in NOISE])
    base = {"target_bits_per_byte": 2.1}
    return StudyResult(
        study=Study(base=base, methods=[{"compressor": "bf16"}, {"compressor": "topk"}], rule={}),
        target=2.1,
        rule=RULE,
        evidence=[baseline, candidate],
        decisions=[decide(baseline, candidate, RULE)],
        checks=[],
        faster_up_to={},
        rates_tried=[],
        stopped="",
        next_seed_s=None,
        warnings=[],
    )


def test_a_trajectory_ends_at_few_enough_bits() -> None:
    found = trajectory_of(text_run([3.0, 2.4, 2.1, 2.0]), 2.4)
    assert (found.num_to_target, sum(found.steps.values()), found.accuracy) == (2, 20, 2.0)
    assert trajectory_of(text_run([3.0, 2.4]), 2.3).num_to_target is None


@pytest.mark.parametrize(
    ("bits", "verdict"), [(2.01, "within"), (1.9, "within"), (2.04, "above"), ([1.9, 2.2] * 3, "open")]
)
def test_the_margin_is_one_per_cent_more_bits(bits: float | list[float], verdict: str) -> None:
    assert decide(evidence(DENSE, 2.0), evidence(FAST, bits), RULE).accuracy_verdict == verdict


def test_the_change_is_a_ratio_of_geometric_means() -> None:
    theirs, ours = [2.0, 2.2, 2.1, 2.0, 2.1, 2.2], [2.1, 2.2, 2.1, 2.0, 2.2, 2.2]
    decision = decide(evidence(DENSE, theirs), evidence(FAST, ours), RULE)
    ratio = (math.prod(ours) / math.prod(theirs)) ** (1 / 6)
    assert decision.accuracy == pytest.approx(ratio - 1.0)
    assert decision.accuracy_low < ratio - 1.0 < decision.accuracy_high


def test_a_method_with_too_many_bits_is_not_the_best() -> None:
    lossy, kept = (dataclasses.replace(result_of(bits).decisions[0], method=str(bits)) for bits in (2.1, 2.0))
    assert best_of([dataclasses.replace(lossy, factor=9.0), kept]).method == "2.0"


def test_the_answer_is_in_bits_per_byte() -> None:
    yes = sentences(result_of(2.008))[0]
    assert yes.startswith("Yes: m reaches 2.10 bits per byte 2.00x [")
    assert "; bits per byte +0.4 [+0." in yes
    assert yes.endswith("] %, within the margin.")
    but = sentences(result_of(2.1))[0]
    assert but.startswith("Yes, but with more bits per byte: m reaches 2.10 bits per byte")
    assert but.endswith("] %, above the margin.")


def test_table_and_files_are_in_bits_per_byte() -> None:
    result = result_of(2.1)
    console = Console(width=120, record=True, force_jupyter=False)
    print_answer(result, console)
    printed = console.export_text()
    assert "bits per byte: per cent more than bf16" in printed
    assert "+5.0 above" in printed
    content = to_dict(result)
    assert content["target_bits_per_byte"] == 2.1
    assert content["decisions"][0]["bits_per_byte"] == pytest.approx(0.05, abs=1e-3)
    assert not any("accuracy" in name for name in (*content, *content["decisions"][0]))
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert rows_of(result)[0]["test_bits_per_byte"] == 2.0
    axes = picture(result).figure.axes[0]
    assert "Time to 2.10 bits per byte" in (axes.get_title(), axes.get_title(loc="left"))
    assert Answer(folder=Path("study"), result=result).methods["bits_per_byte_verdict"].tolist() == ["above"]


def test_long_names_leave_room_for_the_picture() -> None:
    result = result_of(2.1)
    name = "local:steps=4 muon group_topk:group_size=4096,ratio=0.1,values=two_magnitudes,warmup_epochs=0"
    result = dataclasses.replace(
        result, evidence=[result.evidence[0], dataclasses.replace(result.evidence[1], method=name)]
    )
    with applied():
        figure = picture(result).figure
        figure.draw_without_rendering()
    assert figure.axes[0].get_position().width > 0.4


def test_a_study_of_a_text_has_one_target_in_bits_per_byte() -> None:
    study = Study(base={"target_bits_per_byte": 2.1}, methods=[{}, {}], rule={})
    study.check()
    assert study.quality.name == "bits_per_byte"
    with pytest.raises(UsageError, match="all methods must share target_bits_per_byte"):
        dataclasses.replace(study, methods=[{}, {"target_bits_per_byte": 2.0}]).check()


def test_a_baseline_that_misses_the_bits_ends_the_search(
    fakes: Fakes,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fakes.missed = ("bf16",)
    ended = iter([2.31, 2.3, 2.35])
    whole = Fakes._trajectory

    def found(self: Fakes, config: RunConfig, folder: str) -> Any:
        return dataclasses.replace(
            whole(self, config, folder), accuracy=next(ended) if config.compressor == "bf16" else 2.0
        )

    monkeypatch.setattr(Fakes, "_trajectory", found)
    configs = [RunConfig(compressor=name, target_bits_per_byte=2.1) for name in ("bf16", "topk")]
    with pytest.raises(NothingToCompare) as caught:
        run_search(
            tmp_path,
            study=Study(base={"target_bits_per_byte": 2.1}, methods=[{}, {}], rule={}),
            methods=[Method(name=each.compressor, trajectory=each, on_link=each) for each in configs],
        )
    assert str(caught.value) == (
        "bf16 reached 2.10 bits per byte with none of 3 seeds so far, and ended with 2.30 bits per byte at best; raise "
        "--target-bits-per-byte, or give more --epochs"
    )
