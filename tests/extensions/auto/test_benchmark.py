"""`benchmarks/auto.py`: its summary of rows, and continuing an existing file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import auto
from benchmarks.auto import METHODS, Row, measure_all, read, scene_of, summary, write_trace

STEP_S = {"auto": 0.103, "bf16": 0.2, "topk": 0.1}


def rows_of(part: str, link: str, model: str, *, turns: int = 3) -> list[Row]:
    """Return rounds of methods that each have their own step time, one tenth slower in every other round."""
    rows: list[Row] = []
    for method in METHODS:
        step_s = STEP_S.get(method, 0.3)
        for turn in range(-1, turns):
            seconds = 10 * step_s * (1.1 if turn % 2 else 1.0)
            chosen = "topk on allgather" if method == "auto" else ""
            figures: dict[str, Any] = {"turn": turn, "steps": 10, "seconds": seconds, "step_s": seconds / 10}
            rows.append({"part": part, "link": link, "model": model, "method": method, "chosen": chosen, **figures})
    return rows


def test_a_link_says_how_far_auto_is_behind_the_best_pair_and_what_its_first_choice_cost() -> None:
    (line,) = summary(rows_of("links", "10mbit", "small_cnn"))
    assert "auto 103.0 ms, best topk 100.0 ms, ratio 1.030" in line
    assert "auto / bf16 0.515 [0.515, 0.515]" in line
    assert "the first choice took 10 steps, 1 of them lost" in line
    assert line.endswith("chose topk on allgather")


def test_traces_are_held_against_each_other_over_all_of_the_time() -> None:
    fast, slow = (rows_of("traces", trace, "small_cnn", turns=2) for trace in ("fast", "slow"))
    *_, last = summary([*fast, *slow])
    assert last.startswith("over all traces, geometric mean: topk 105.0 ms, auto 108.2 ms, bf16 210.0 ms")


def trained(method: str, seed: int, accuracy: float) -> Row:
    link = auto.ACCURACY_LINKS[method]
    row: Row = {"part": "accuracy", "link": link, "model": "resnet20", "method": method, "turn": seed}
    return {**row, "accuracy": accuracy}


def test_accuracy_is_a_difference_of_means_over_seeds() -> None:
    """4.303 is the 97.5th percentile of Student's t with two degrees of freedom."""
    rows = [
        trained(method, seed, 0.9 + 0.01 * seed - (0.002 * seed if method == "auto" else 0))
        for method in auto.PAIRED for seed in (1, 2, 3)
    ]  # fmt: skip
    half = 4.303 * 0.2 / 3**0.5
    assert list(summary(rows)) == [
        "resnet20, accuracy: auto 91.60 %, bf16 92.00 %, -0.40 points "
        f"[{-0.4 - half:+.2f}, {-0.4 + half:+.2f}] over 3 seeds"
    ]
    assert list(summary(rows[::3])) == ["resnet20, accuracy: auto 90.80 %, bf16 91.00 %, -0.20 points"]


def test_seeds_that_a_file_holds_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def accuracy(model: str, method: str, seed: int) -> Row:
        asked.append(seed)
        return trained(method, seed, 0.9) | {"model": model}

    monkeypatch.setattr(auto, "accuracy", accuracy)
    for seeds in ([1, 2], [2, 3], [2]):
        measure_all(tmp_path / "auto.csv", ["accuracy"], ["resnet20"], seeds)
    assert asked == [1, 1, 2, 2, 3, 3]
    assert [row["turn"] for row in read(tmp_path / "auto.csv")] == ["1", "1", "2", "2", "3", "3"]


def test_scenes_that_a_file_holds_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, str, str]] = []

    def turns(part: str, link: str, model: str, folder: Path) -> list[Row]:
        measured.append((part, link, model))
        return [{**row, "accuracy": ""} for row in rows_of(part, link, model)]

    monkeypatch.setattr(auto, "turns", turns)
    measure_all(tmp_path / "auto.csv", ["links"], ["small_cnn"], [1])
    measure_all(tmp_path / "auto.csv", ["links", "traces"], ["small_cnn"], [1])
    links = [("links", link, "small_cnn") for link in auto.LINKS]
    assert measured == links + [("traces", trace, "small_cnn") for trace in auto.TRACES]
    assert list(dict.fromkeys(map(scene_of, read(tmp_path / "auto.csv")))) == measured


def test_a_trace_lets_as_many_frames_pass_as_its_rate_says(tmp_path: Path) -> None:
    write_trace(tmp_path / "two.trace", auto.TRACES["two rates"])
    frames = [int(line) for line in (tmp_path / "two.trace").read_text().split()]
    assert frames == sorted(frames)
    in_20_s = sum(frame <= 20_000 for frame in frames)
    assert in_20_s == pytest.approx(20 * 5e6 / auto.FRAME_BITS, rel=0.001)
    assert len(frames) - in_20_s == pytest.approx(20 * 200e6 / auto.FRAME_BITS, rel=0.001)
