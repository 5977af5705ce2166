"""Runs on a text: bits per byte take the place of accuracy in tables, verdicts, targets, gates and reports."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from bench.core import registry
from bench.core.errors import UsageError
from bench.report.comparison import Comparison
from bench.report.comparison_table import answer_table
from bench.report.gates import Gate, check, check_reference
from bench.report.page import page
from bench.report.quality import ACCURACY, BITS_PER_BYTE, metrics, quality_of, yardsticks
from bench.report.store import collect_runs
from bench.report.tables import to_text
from bench.report.targets import BYTES, TIME, Need, Target, find_target, needs
from bench.report.verdict import caveats, implausible, in_lines
from tests.testing.fake_results import fake_text_run, results
from tests.testing.fake_rows import fake_row, fake_seeds, stored, text_seeds, topk_seeds
from tests.testing.plugins import install_entry_points
from tests.unit.report.compared import cells, compared

SPEED, TWICE = [1000.0, 1010.0, 990.0], [2000.0, 2010.0, 1990.0]
BITS = [2.100, 2.102, 2.098]
TOPK = {"compressor": "topk:ratio=0.01", "collective": "allgather"}


def against_dense(tmp_path: Path, bits: list[float], speed: list[float] = TWICE, **options: Any) -> Comparison:
    rows = [*text_seeds(SPEED, BITS), *text_seeds(speed, bits, **TOPK)]
    return compared(tmp_path, rows, **options)


def test_the_rows_say_what_measures_them() -> None:
    (text,) = text_seeds([1.0], [2.0])
    assert quality_of([text]) is quality_of([{"target_bits_per_byte": 2.0}]) is BITS_PER_BYTE
    assert quality_of([fake_row()]) is quality_of([]) is ACCURACY
    assert quality_of([text, text | {"target_accuracy": 0.6}]) is ACCURACY  # a text's bytes, as the user asked


def test_bits_per_byte_are_compared_by_ratio() -> None:
    ours, theirs = [2.0, 2.1, 2.2], [1.9, 2.0, 2.0]
    effect = BITS_PER_BYTE.effect(theirs, ours)
    reference = stats.ttest_ind([math.log(bits) for bits in ours], [math.log(bits) for bits in theirs], equal_var=False)
    interval = reference.confidence_interval(0.95)
    assert effect is not None
    assert effect.value == pytest.approx(math.prod(ours) ** (1 / 3) / math.prod(theirs) ** (1 / 3) - 1.0)
    assert (effect.low, effect.high) == pytest.approx((math.expm1(interval.low), math.expm1(interval.high)))
    assert effect.p == pytest.approx(reference.pvalue)


@pytest.mark.parametrize(
    ("bits", "verdict", "said"),
    [
        ([2.104, 2.106, 2.102], "same", "Faster, no worse in bits per byte: topk 2.00x"),
        ([2.142, 2.144, 2.140], "worse", "Faster, at some cost: topk 2.00x, bits per byte 2 % higher"),
        ([2.058, 2.060, 2.056], "better", "Faster, no worse in bits per byte: topk 2.00x"),
        ([2.08, 2.18, 2.13], "unclear", "Faster, bits per byte unclear: topk 2.00x (+1.4 %)"),
    ],
)
def test_fewer_bits_are_better(tmp_path: Path, bits: list[float], verdict: str, said: str) -> None:
    comparison = against_dense(tmp_path, bits)
    assert comparison.rows[1].accuracy.verdict == verdict
    assert in_lines(comparison) == [said]


def test_bits_per_byte_can_be_the_metric(tmp_path: Path) -> None:
    rows = [*text_seeds(SPEED, BITS), *text_seeds(SPEED, [2.058, 2.060, 2.056], **TOPK)]
    rows += text_seeds(SPEED, [1.950, 1.952, 1.948], compressor="powersgd")
    rows += text_seeds(SPEED, [2.2, 2.202, 2.198], compressor="sign")
    comparison = compared(tmp_path, rows, metric="test_bits_per_byte", sort="test_bits_per_byte")
    assert in_lines(comparison) == [
        "Lower bits per byte: powersgd -7.1 %, topk -2.0 %",
        "Higher bits per byte: sign +4.8 %",
    ]
    assert [row.group.short for row in comparison.candidates] == ["powersgd", "topk", "sign"]
    table = answer_table(comparison)
    assert table.title == "test bits per byte: every row against none + native"
    assert [column.heading for column in table.columns[1:3]] == ["bits per byte\n± sd", "% vs none\n[95% CI]"]


def test_the_short_table_shows_bits_and_their_change(tmp_path: Path) -> None:
    table = answer_table(against_dense(tmp_path, [2.142, 2.144, 2.140]))
    assert table.columns[4].heading == "bits per byte\n(% vs none)"
    assert [row[4].text for row in table.rows] == ["2.100", "2.142 (+2.0)"]
    assert all(len(line.rstrip()) <= 80 for line in to_text(table, 80).splitlines())


def test_cells_and_raw_values_are_in_bits_per_byte(tmp_path: Path) -> None:
    row = cells(against_dense(tmp_path, [2.142, 2.144, 2.140]), 1)
    assert row["bits per byte ± sd"] == "2.142 ± 0.002"
    assert row["bits per byte vs baseline % [95% CI]"] == "+2.0 [+1.8, +2.2] worse"
    assert not any("accuracy" in heading for heading in row)


def test_the_yardsticks_stand_below_the_table(tmp_path: Path) -> None:
    line = "the whole held-out text: gzip 1.97, bz2 1.71, xz 1.58 bits per byte"
    assert line in answer_table(against_dense(tmp_path, BITS)).notes
    assert yardsticks([*text_seeds([1.0], [2.0]), *text_seeds([1.0], [2.0], gzip_bits_per_byte=2.5)]) == (
        "the whole held-out text: bz2 1.71, xz 1.58 bits per byte"  # two texts after gzip
    )
    assert yardsticks([fake_row()]) == ""


def test_images_and_texts_are_not_compared(tmp_path: Path) -> None:
    images = fake_seeds(SPEED, [0.98] * 3, target_accuracy=None)
    for rows in ([*images, *text_seeds(TWICE, BITS, **TOPK)], [*text_seeds(SPEED, BITS), *topk_seeds(TWICE)]):
        comparison = compared(tmp_path, rows)
        assert comparison.rows[1].accuracy.effect is None
        assert answer_table(comparison).rows[1][4].text == "-"
        assert in_lines(comparison)[0].startswith(
            "Compare only rows with the same work: these differ in model, dataset"
        )


def test_the_baseline_says_what_is_compared(tmp_path: Path) -> None:
    stray = text_seeds(SPEED, BITS, compressor="qsgd", target_accuracy=0.6)
    rows = [*text_seeds(SPEED, BITS), *text_seeds(TWICE, BITS, **TOPK), *stray]
    comparison = compared(tmp_path, rows)
    assert comparison.quality is BITS_PER_BYTE
    assert all(row.accuracy.effect is not None for row in comparison.rows[1:])


def test_targets_of_a_text(tmp_path: Path) -> None:
    rows = text_seeds(SPEED, BITS)
    group = compared(tmp_path, rows).baseline
    assert find_target("2.105", group, BITS_PER_BYTE) == Target(2.105, BITS_PER_BYTE)
    assert [Target(bits, BITS_PER_BYTE).title for bits in (2.1, 2.105)] == ["2.1 bits per byte", "2.105 bits per byte"]
    best = find_target("best-2", group, BITS_PER_BYTE)
    assert best.value == pytest.approx(2.1 * 1.02)
    assert best.meaning == (
        "best-2 is 2.142: 2 % above the mean final bits per byte of none + native, 2.100 over 3 seeds"
    )
    for wrong in ("0", "8.1", "few"):
        with pytest.raises(
            UsageError,
            match=r"is not a target; write the bits per byte to reach, above 0 and at most 8, or best-1: 1 % above",
        ):
            compared(tmp_path, rows, metric=TIME, targets=[wrong])


def test_a_target_is_reached_from_above(tmp_path: Path) -> None:
    run = fake_text_run([3.0, 2.4, 2.1, 2.0], target=None, payload_bytes_per_step=100.0)
    group = compared(tmp_path, run).baseline
    assert needs(group, TIME, Target(2.4, BITS_PER_BYTE)) == [Need(seed=1, amount=4.0, budget=8.0)]
    assert needs(group, TIME, Target(1.9, BITS_PER_BYTE)) == [Need(seed=1, amount=None, budget=8.0)]
    own = compared(tmp_path, fake_text_run([3.0, 2.4, 2.1, 2.0], payload_bytes_per_step=100.0)).baseline
    assert needs(own, BYTES, Target()) == [Need(seed=1, amount=3000.0, budget=4000.0)]
    assert needs(own, TIME, Target()) == [Need(seed=1, amount=6.0, budget=8.0)]


def test_the_time_to_bits_per_byte_is_a_metric(tmp_path: Path) -> None:
    rows = [row for seed in (1, 2, 3) for row in fake_text_run([3.0, 2.5, 2.3, 2.1], seed=seed)]
    rows += [row for seed in (1, 2) for row in fake_text_run([2.5, 2.1, 2.1, 2.1], seed=seed, **TOPK)]
    rows += fake_text_run([2.5, 2.4, 2.3, 2.2], seed=3, **TOPK)
    comparison = compared(tmp_path, rows, metric=TIME)
    assert comparison.rows[1].gain.verdict == "unclear"  # one seed missed
    assert cells(comparison, 1)["time to target [95% CI]"] == "≥5.33 s (2/3)"  # 4, 4 and the miss's 8
    assert any(sentence.startswith("missed the target bits per byte: topk (1 of 3") for sentence in caveats(comparison))
    again = compared(tmp_path, rows, metric=TIME, targets=["2.45"])
    assert cells(again, 0)["time to 2.45 bits per byte [95% CI]"].startswith("6 s")


def test_a_method_that_learns_suspiciously_fast_is_told(tmp_path: Path) -> None:
    def run(seed: int, bits: list[float], **values: Any) -> list[dict[str, Any]]:
        rows = fake_text_run(bits, seed=seed, **values)
        return [row | {"samples": 100 * number + seed} for number, row in enumerate(rows, 1)]

    rows = [row for seed in (1, 2, 3) for row in run(seed, [3.0, 2.5, 2.3, 2.0])]
    rows += [row for seed in (1, 2, 3) for row in run(seed, [2.0, 2.0, 2.0, 2.0], **TOPK)]
    (warning,) = implausible(compared(tmp_path, rows, metric=TIME))
    assert warning.startswith("topk needed 3.9")


def test_the_gate_on_bits_per_byte(tmp_path: Path) -> None:
    comparison = against_dense(tmp_path, [2.142, 2.144, 2.140])
    (sentence,) = check(comparison, [Gate.parse("bits_per_byte:+1%")]).crossed
    assert sentence.endswith("bits per byte +2.0 % crosses bits_per_byte:+1%")
    assert check(comparison, [Gate.parse("bits_per_byte:3%")]).crossed == []
    assert check(against_dense(tmp_path, [2.0, 2.001, 1.999]), [Gate.parse("bits_per_byte:1%")]).crossed == []
    with pytest.raises(UsageError, match=r"compared in bits per byte; write --fail-on bits_per_byte:\+1% instead"):
        check(comparison, [Gate.parse("accuracy:-0.5")])
    with pytest.raises(UsageError, match=r"compared in accuracy; write --fail-on accuracy:-0\.5 instead"):
        check(compared(tmp_path, fake_seeds(SPEED)), [Gate.parse("bits_per_byte:1%")])


@pytest.mark.parametrize(
    ("change", "is_allowed"),
    [
        ({"test_bits_per_byte": 2.001}, False),
        ({"test_bits_per_byte": 2.05, "cpu": "other"}, True),
        ({"test_bits_per_byte": 2.07, "cpu": "other"}, False),
        ({"test_accuracy": 0.4}, True),
    ],
)
def test_bits_per_byte_must_repeat(tmp_path: Path, change: dict[str, Any], is_allowed: bool) -> None:
    before, after = (
        collect_runs(stored(tmp_path, [row | values for row in text_seeds([1.0], [2.0])])) for values in ({}, change)
    )
    found = check_reference(after, before).crossed
    assert [sentence.partition(" was")[0] for sentence in found] == (
        [] if is_allowed else ["demo seed 1: test_bits_per_byte"]
    )


def test_a_report_asks_and_answers_in_bits_per_byte(tmp_path: Path) -> None:
    rows = [*text_seeds(SPEED, BITS), *text_seeds(TWICE, [2.142, 2.144, 2.140], **TOPK)]
    content = page(results(tmp_path, rows), [], [])
    assert content.question.endswith("finish sooner, with no worse bits per byte?")
    (section,) = content.sections
    assert section.answer == (
        "Perhaps: topk:ratio=0.01 + allgather is faster than none + native, but worse in bits per byte, or that is "
        "unclear."
    )
    assert section.evidence[0].endswith("; bits per byte worse, +2.0 [+1.8, +2.2] %.")
    untimed = [row | {"samples_per_s": None} for row in rows]
    (section,) = page(results(tmp_path, untimed), [], []).sections
    assert section.answer == "No: no row is better in bits per byte than none + native."


@pytest.fixture
def regression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Install a package with a metric of its own, and return rows of models that have no accuracy."""
    (tmp_path / "regression.py").write_text(
        "from bench.report.quality import Metric\nMSE = Metric(column='test_loss', noun='mean squared error')\n"
        "NOWHERE = Metric(column='nowhere', noun='error')\nTEXT = 'text'\n",
        encoding="utf-8",
    )
    install_entry_points(tmp_path, "regression", {
        "bench.metrics": {"mse": "regression:MSE", "nowhere": "regression:NOWHERE", "text": "regression:TEXT"}
    })  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    caches = (registry._added, metrics, registry.warn_once)
    for cache in caches:
        cache.cache_clear()
    yield [
        *_with_loss(fake_seeds(SPEED), [0.0210, 0.0211, 0.0209]),
        *_with_loss(topk_seeds(TWICE), [0.0231, 0.0232, 0.0230]),
    ]
    for cache in caches:
        cache.cache_clear()


def _with_loss(rows: list[dict[str, Any]], losses: list[float]) -> list[dict[str, Any]]:
    unknown = dict.fromkeys(("test_accuracy", "target_accuracy", "time_to_target_s"))
    return [row | unknown | {"test_loss": loss} for row, loss in zip(rows, losses, strict=True)]


def test_a_package_adds_a_metric_by_one_declaration(tmp_path: Path, regression: list[dict[str, Any]]) -> None:
    comparison = compared(tmp_path, regression)
    assert in_lines(comparison) == ["Faster, at some cost: topk 2.00x, mean squared error 10 % higher"]
    assert answer_table(comparison).columns[4].heading == "mean squared error\n(% vs none)"
    alone = compared(tmp_path, regression, metric="test_loss", sort="test_loss")
    assert in_lines(alone) == ["Higher mean squared error: topk +10.0 %"]
    best = find_target("best-1", comparison.baseline, comparison.quality)
    assert best.meaning.startswith("best-1 is 0.021: 1 % above the mean final mean squared error of none + native")
    (sentence,) = check(comparison, [Gate.parse("loss:+5%")]).crossed
    assert sentence.endswith("mean squared error +10.0 % crosses loss:+5%")
    question = page(results(tmp_path, regression), [], []).question
    assert question.endswith("finish sooner, with no worse mean squared error?")


@pytest.mark.usefixtures("regression")
def test_a_metric_that_cannot_be_used_is_left_out_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert [metric.noun for metric in metrics()] == ["bits per byte", "accuracy", "mean squared error"]
    warnings = capsys.readouterr().err
    assert "left out: the metric error, because metrics.csv has no column nowhere" in warnings
    assert "left out: 'text' of regression 1.0 in the group bench.metrics is no Metric" in warnings
