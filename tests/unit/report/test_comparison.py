"""Rows of a comparison: their contents, and the pairs that are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.core.errors import UsageError
from bench.report.comparison import compare
from bench.report.comparison_table import comparison_table
from bench.report.gates import Gate, GateResult, check
from bench.report.verdict import cautions, caveats
from tests.testing.fake_rows import fake_row, fake_seeds, stored, topk_seeds
from tests.unit.report.compared import DENSE, TOPK, cells, compared, titles


def test_one_row_per_configuration_and_the_direction_is_baseline_to_candidate(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [*TOPK, *DENSE])
    assert titles(comparison) == ["none + native", "topk:ratio=0.01 + allgather"]
    assert comparison_table(comparison).title == "samples/s: every row against none + native (above 1x is faster)"
    assert cells(comparison, 0)["speed-up vs none [95% CI]"] == "1.00x"
    assert cells(comparison, 1)["speed-up vs none [95% CI]"] == "1.31x [1.25, 1.37]"
    assert cells(comparison, 1)["verdict"] == "faster"

    exchanged = compared(tmp_path, [*TOPK, *DENSE], baseline="topk")
    assert titles(exchanged) == ["topk:ratio=0.01 + allgather", "none + native"]
    assert cells(exchanged, 1)["speed-up vs topk [95% CI]"] == "0.76x [0.73, 0.80]"
    assert cells(exchanged, 1)["verdict"] == "slower"


def test_time_metrics_do_not_flip_the_direction(tmp_path: Path) -> None:
    rows = [fake_row(seed=s, step_time_s=0.2 + s / 1000) for s in (1, 2, 3)]
    rows += [fake_row(seed=s, step_time_s=0.1 + s / 1000, compressor="bf16") for s in (1, 2, 3)]
    comparison = compared(tmp_path, rows, metric="step_time_s", baseline="none")
    assert cells(comparison, 1)["verdict"] == "faster"
    assert cells(comparison, 1)["speed-up vs none [95% CI]"].startswith("1.98x")


def test_accuracy_as_the_metric_is_judged_in_points(tmp_path: Path) -> None:
    rows = [*fake_seeds([1.0] * 3, [0.97, 0.971, 0.972]), *topk_seeds([1.0] * 3, [0.93, 0.931, 0.932])]
    comparison = compared(tmp_path, rows, metric="test_accuracy")
    assert comparison.rows[1].gain.verdict == "lower"
    assert "speed-up vs none [95% CI]" not in cells(comparison, 1)


def test_labels_hold_what_differs_and_nothing_else(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [*fake_seeds([1.0, 2.0]), *fake_seeds([1.0, 2.0], lr=0.1)])
    assert titles(comparison) == ["none + native, lr=0.05", "none + native, lr=0.1"]


def test_the_strategy_is_named_where_one_is_not_ddp(tmp_path: Path) -> None:
    asynchronous = fake_seeds([1.0, 2.0], collective="server", strategy="async_server:mode=asp", config_id="a")
    assert titles(compared(tmp_path, asynchronous)) == ["none + server + async_server:mode=asp"]
    both = titles(compared(tmp_path, [*DENSE, *asynchronous]))
    assert both == ["none + native + ddp", "none + server + async_server:mode=asp"]
    local = fake_seeds([1.0, 2.0], strategy="local:steps=5", config_id="l")
    assert titles(compared(tmp_path, [*local, *DENSE])) == ["none + native + ddp", "none + native + local:steps=5"]


def test_configurations_that_no_setting_tells_apart_are_told_apart_by_name_or_digest(tmp_path: Path) -> None:
    same = [fake_row(config_id="aaa"), fake_row(config_id="bbb", run_id="b")]
    assert titles(compared(tmp_path, same)) == ["none + native, config_id=aaa", "none + native, config_id=bbb"]
    same[1]["name"] = "longer-warmup"
    assert titles(compared(tmp_path, same))[1] == "none + native, name=longer-warmup"


@pytest.mark.parametrize(
    ("metric", "expected"), [("samples_per_s", "bf16"), ("time_to_target_s", "bf16"), ("test_accuracy", "none")]
)
def test_speed_is_compared_with_16_bits_where_there_are_and_all_else_with_fp32(
    tmp_path: Path, metric: str, expected: str
) -> None:
    rows = [*DENSE, *TOPK, *fake_seeds([1300.0, 1310.0, 1290.0], compressor="bf16")]
    comparison = compared(tmp_path, rows, metric=metric)
    assert comparison.baseline.title == f"{expected} + native"
    assert "compression vs fp32" in cells(comparison, 0)
    if expected == "bf16":
        assert "speed-up vs bf16 [95% CI]" in cells(comparison, 0)


def test_grouping_by_other_columns(tmp_path: Path) -> None:
    rows = [
        *fake_seeds([1000.0, 1010.0], git_sha="old"),
        *fake_seeds([500.0, 505.0], git_sha="new", started_at="2026-04"),
    ]
    comparison = compared(tmp_path, rows, by=["git_sha"], baseline="old")
    assert titles(comparison) == ["git_sha=old", "git_sha=new"]
    assert comparison.rows[1].gain.verdict == "slower"
    assert list(cautions(comparison)) == []


def test_unknown_or_undirected_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no column 'sample_per_s' .did you mean 'samples_per_s'"):
        compared(tmp_path, DENSE, metric="sample_per_s")
    with pytest.raises(UsageError, match="no column 'modle'"):
        compared(tmp_path, DENSE, by=["modle"])
    with pytest.raises(UsageError, match="host cannot be compared"):
        compared(tmp_path, DENSE, metric="host")
    with pytest.raises(UsageError, match="no finished run has a value in encode_s"):
        compared(tmp_path, DENSE, metric="encode_s")


def test_failed_runs_stay_in_the_table_and_never_in_the_figures(tmp_path: Path) -> None:
    failed = topk_seeds([9999.0], [0.1], status="failed", error="rank 1 was killed by SIGKILL")[0] | {
        "seed": 4,
        "run_id": "x",
    }
    comparison = compared(tmp_path, [*DENSE, *TOPK, failed])
    row = cells(comparison, 1)
    assert (row["seeds"], row["samples/s [95% CI]"]) == ("3/4 ok", "1577 [1495, 1659]")
    assert any("seed 4 failed and does not count: rank 1 was killed by SIGKILL (x)" in s for s in caveats(comparison))


@pytest.mark.parametrize("status", ["interrupted", "running"])
def test_a_run_that_was_stopped_is_listed_below_the_table_and_changes_nothing_in_it(
    tmp_path: Path, status: str
) -> None:
    """A stopped run of another configuration added a failed row, a column for each of its settings, and long names."""
    stopped = fake_row(
        status=status, run_id="stopped", lr=0.1, batch_size=8, threads=4, samples_per_s=None, test_accuracy=None
    )
    again = topk_seeds([1600.0], run_id="again", status=status)[0]
    without = compared(tmp_path, [*DENSE, *TOPK])
    comparison = compared(tmp_path, [*DENSE, *TOPK, stopped, again])
    assert comparison_table(comparison) == comparison_table(without)
    (sentence,) = [text for text in caveats(comparison) if text not in caveats(without)]
    how = {"interrupted": "was interrupted", "running": "is still running, or was killed"}[status]
    assert sentence == f"not in the table, because they did not finish: none + native, seed 1, {how} (stopped)"


def test_runs_of_which_none_was_finished_are_shown_all_the_same(tmp_path: Path) -> None:
    comparison = compared(tmp_path, fake_seeds([1.0, 2.0], status="interrupted"))
    assert cells(comparison, 0)["seeds"] == "0/2 ok"
    assert comparison.unfinished == []


def test_a_configuration_that_was_only_stopped_cannot_be_judged_by_a_gate(tmp_path: Path) -> None:
    stopped = topk_seeds([1600.0], run_id="stopped", status="interrupted", compressor="sign", config_id="s")
    gate = Gate.parse("bytes:+1%")
    (sentence,) = check(compared(tmp_path, [*DENSE, *TOPK, *stopped]), [gate]).unmeasured
    assert sentence == "bytes:+1% cannot be judged for sign + allgather, seed 1: it was interrupted"
    more = topk_seeds([1600.0], run_id="stopped", status="interrupted")[0] | {"seed": 9}
    assert check(compared(tmp_path, [*DENSE, *TOPK, more]), [gate]) == GateResult()


def test_names_hold_what_tells_rows_apart_and_data_every_setting_that_differs(tmp_path: Path) -> None:
    sparse = topk_seeds([1.0], lr=0.1, bucket_mb=4.0)
    fast = fake_seeds([1.0], lr=0.2, uplink_bps=1e9, bucket_mb=1.0, config_id="fast")
    comparison = compared(tmp_path, [*fake_seeds([1.0], bucket_mb=1.0), *sparse, *fast])
    assert titles(comparison) == [
        "none + native, lr=0.05",
        "topk:ratio=0.01 + allgather, lr=0.1",
        "none + native, lr=0.2",
    ]
    assert [row.group.short for row in comparison.rows] == ["none, lr=0.05", "topk", "none, lr=0.2"]
    raw = {key for cell in comparison_table(comparison).rows[0] for key in cell.raw}
    assert {"lr", "bucket_mb", "uplink_bps"} <= raw


def test_two_timers_that_contradict_each_other_say_nothing(tmp_path: Path) -> None:
    rows = fake_seeds([1.0, 2.0], step_time_s=0.0683, exposed_s=0.0882)
    assert cells(compared(tmp_path, rows), 0)["exposed per step"] == "-"
    rows[0]["exposed_s"] = 0.06
    assert cells(compared(tmp_path, rows), 0)["exposed per step"] == "60 ms"


def test_a_configuration_without_a_finished_run_is_failed(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [*DENSE, *topk_seeds([1.0, 2.0], status="timeout")])
    assert comparison.rows[1].gain.verdict == "failed"
    assert cells(comparison, 1)["seeds"] == "0/2 ok"


def test_a_file_without_optional_columns_is_compared_by_what_it_has(tmp_path: Path) -> None:
    needed = ("run_id", "config_id", "seed", "compressor", "collective", "status", "samples_per_s")
    rows = [{name: row[name] for name in needed} for row in [*DENSE, *TOPK]]
    comparison = compared(tmp_path, rows)
    assert comparison.rows[1].gain.verdict == "faster"
    assert cells(comparison, 1)["accuracy % ± sd"] == "-"
    assert list(caveats(comparison)) == []


DIVERGED = {
    "status": "failed",
    "error": "the loss is nan at step 7",
    "error_kind": "Diverged",
}


def test_seeds_that_diverged_allow_no_praise_of_the_others_accuracy(tmp_path: Path) -> None:
    lost = [
        row | DIVERGED | {"seed": seed, "run_id": f"lost-{seed}"} for row, seed in zip(TOPK, (4, 5, 6), strict=True)
    ]
    dense = fake_seeds([1204.0, 1190.0, 1221.0], [0.970, 0.971, 0.969])
    topk = topk_seeds([1577.0, 1544.0, 1610.0], [0.970, 0.971, 0.969])
    sound, (_, row) = compared(tmp_path, [*dense, *topk]), compared(tmp_path, [*dense, *topk, *lost]).rows
    assert (sound.rows[1].accuracy.verdict, row.accuracy.verdict) == ("same", "unclear")
    assert row.gain.verdict == "faster"
    (sentence,) = check(compared(tmp_path, [*dense, *topk, *lost]), [Gate.parse("accuracy:1")]).crossed
    assert sentence.endswith("3 of 6 seeds diverged, which crosses accuracy:1")
    assert check(sound, [Gate.parse("accuracy:1")]) == GateResult()


def test_counts_of_the_wire_are_exact_whatever_their_unit(tmp_path: Path) -> None:
    """Three equal seeds each: bytes and the ratio of bytes have the same verdict."""
    rows = [*fake_seeds([1.0] * 3), *topk_seeds([1.0] * 3)]
    for metric in ("payload_bytes_per_step", "compression_ratio"):
        comparison = compare(stored(tmp_path, rows), metric=metric)
        assert (comparison.rows[1].gain.verdict, comparison.rows[1].gain.p) == ("better", 0.0), metric


def test_the_anytime_rule_compares_common_seeds_and_needs_more_of_them(tmp_path: Path) -> None:
    speeds = {"none": [100.0, 101.0, 99.0, 100.0, 102.0], "topk": [150.0, 152.0, 149.0, 151.0, 153.0]}
    rows = [
        fake_row(seed=seed, samples_per_s=speed, compressor=name)
        for name, of_seeds in speeds.items()
        for seed, speed in enumerate(of_seeds)
    ]
    fixed, anytime = (compared(tmp_path, rows, rule=rule).rows[1].gain for rule in ("fixed", "anytime"))
    assert fixed.verdict == anytime.verdict == "faster"
    assert fixed.effect is not None
    assert anytime.effect is not None
    assert anytime.effect.value == pytest.approx(fixed.effect.value)
    few = [row for row in rows if row["seed"] < 3]
    verdicts = [compared(tmp_path, few, rule=rule).rows[1].gain.verdict for rule in ("fixed", "anytime")]
    assert verdicts == ["faster", "unclear"]
    others = [row if row["compressor"] == "none" else row | {"seed": row["seed"] + 3} for row in rows]
    shared = compared(tmp_path, others, rule="anytime").rows[1].gain.effect
    assert shared is not None
    assert shared.value == pytest.approx((150.0 * 152.0 / (100.0 * 102.0)) ** 0.5)  # seeds 3 and 4
