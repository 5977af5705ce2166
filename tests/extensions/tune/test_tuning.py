"""Tuning: the settings that are tried, the choice among them, and the file with the result."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.core.errors import RunFailed, UsageError
from bench.core.run_folder import RunFolder
from bench.extensions.tune.tuning import choose, print_tuned, tuned_file, tuning_sweep
from bench.launch.sweep_file import PlannedRun, Settings, SweepFile, read_sweep, run_arguments
from bench.launch.sweep_state import PastRun, SweepState
from tests.testing.configs import make_config

ASKED = SweepFile(
    where="methods.toml",
    base={"epochs": 2, "holdout_size": 100, "augment": False, "timeout_s": 20.0},
    seeds=[1, 2],
    matrix={"compressor": ["none", "topk:ratio=0.01"]},
    tune={"lr": [0.1, 0.2, 0.3]},
)


def ended(accuracies: dict[tuple[str, float], float | None], asked: SweepFile = ASKED) -> SweepState:
    """Return the state of the tuning of `asked` after runs with these accuracies; None: the run failed."""
    return ended_with(lambda settings: accuracies[settings["compressor"], settings["lr"]], asked)


def ended_with(accuracy_of: Callable[[Settings], float | None], asked: SweepFile) -> SweepState:
    """Return the state of the tuning of `asked` after runs with an accuracy for each setting; None: the run failed."""
    runs, past = [], {}
    for settings in tuning_sweep(asked, 100).configurations():
        config = make_config(**settings, filled={})
        accuracy = accuracy_of(settings)
        summary: dict[str, Any] = {"status": "ok", "test_accuracy": accuracy}
        if accuracy is None:
            summary = {"status": "failed", "error": "a gradient was not finite"}
        runs.append(PlannedRun(settings=settings, config=config))
        past[config.digest] = PastRun(folder=RunFolder(Path("x")), summary=summary)
    return SweepState(runs=runs[::-1], out=Path(), past=past)


DENSE: dict[tuple[str, float], float | None] = {("none", 0.1): 0.5, ("none", 0.2): 0.9, ("none", 0.3): 0.9}
SPARSE = {("topk:ratio=0.01", 0.1): 0.6, ("topk:ratio=0.01", 0.2): None, ("topk:ratio=0.01", 0.3): None}


def test_every_setting_of_every_configuration_is_tried_with_a_seed_of_its_own() -> None:
    sweep = tuning_sweep(ASKED, 100)
    assert sweep.seeds == [100]
    assert sweep.base["holdout_size"] == 100
    assert sweep.configurations() == [
        {"compressor": compressor, "lr": lr} for compressor in ("none", "topk:ratio=0.01") for lr in (0.1, 0.2, 0.3)
    ]


def test_the_first_of_the_best_is_chosen_and_failures_count_as_tried() -> None:
    dense, sparse = choose(ASKED, ended(DENSE | SPARSE))
    assert (dense.best, dense.accuracy, dense.rates_tried, dense.at_the_end) == ({"lr": 0.2}, 0.9, 3, [])
    assert (sparse.best, sparse.accuracy, sparse.rates_tried, sparse.at_the_end) == ({"lr": 0.1}, 0.6, 3, ["lr"])


def test_a_setting_whose_result_is_not_a_number_is_not_chosen() -> None:
    tuned = choose(ASKED, ended(DENSE | SPARSE | {("none", 0.1): math.nan}))
    assert tuned[0].best == {"lr": 0.2}


def test_settings_that_are_equally_good_are_told_and_are_at_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    tuned = choose(ASKED, ended({key: 0.5 if key in SPARSE else value for key, value in (DENSE | SPARSE).items()}))
    assert [(each.best, each.equally_good, each.at_the_end) for each in tuned] == [
        ({"lr": 0.2}, 2, []),
        ({"lr": 0.1}, 3, []),
    ]
    print_tuned(ASKED, tuned, as_json=False)
    assert capsys.readouterr().err.splitlines() == [
        f"note: compressor = {compressor}: {tied} of 3 settings gave the same accuracy, so none of them is better; the "
        "first was taken"
        for compressor, tied in (("none", 2), ("topk:ratio=0.01", 3))
    ]


LOCAL = dataclasses.replace(
    ASKED,
    matrix={},
    method=[{"strategy": "ddp"}, {"strategy": "local:steps=5"}, {"strategy": "local:outer_lr=0.9"}],
    tune={"lr": [0.1, 0.2, 0.3], "outer_lr": [0.4, 0.7, 1.0]},
)


def test_outer_learning_rates_are_tried_with_strategy_local() -> None:
    tried = tuning_sweep(LOCAL, 100).configurations()
    strategies = ["ddp", *(f"local:outer_lr={outer},steps=5" for outer in ("0.4", "0.7", "1")), "local:outer_lr=0.9"]
    assert sorted((each["strategy"], each["lr"]) for each in tried) == sorted(
        (strategy, lr) for strategy in strategies for lr in (0.1, 0.2, 0.3)
    )


@pytest.mark.parametrize(("best", "is_at_the_end"), [(0.4, True), (0.7, False), (1.0, True)])
def test_a_best_outer_learning_rate_at_the_end_is_warned_of(
    best: float, is_at_the_end: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {"ddp", f"local:outer_lr={best:g},steps=5", "local:outer_lr=0.9"}
    state = ended_with(lambda each: (each["strategy"] in wanted) - abs(each["lr"] - 0.2), LOCAL)
    dense, local, fixed = choose(LOCAL, state)
    assert (dense.best, dense.rates_tried) == (fixed.best, fixed.rates_tried) == ({"lr": 0.2}, 3)
    assert (local.best, local.rates_tried) == ({"lr": 0.2, "outer_lr": best}, 9)
    assert local.chosen == {"strategy": f"local:outer_lr={best:g},steps=5", "lr": 0.2, "rates_tried": 9}
    print_tuned(LOCAL, [dense, local, fixed], as_json=False)
    warning = (
        f"warning: strategy = local:steps=5: the best outer_lr, {best}, is the smallest or largest tried; try values"
    )
    assert capsys.readouterr().err == (f"{warning} beyond it\n" if is_at_the_end else "")


def test_a_configuration_that_failed_with_every_setting_has_no_best() -> None:
    accuracies = DENSE | dict.fromkeys(SPARSE)
    with pytest.raises(RunFailed, match=r"topk:ratio=0.01 failed with every setting, first with: a gradient was not"):
        choose(ASKED, ended(accuracies))


def test_the_written_file_is_a_sweep_on_the_test_set(tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text(tuned_file(ASKED, choose(ASKED, ended(DENSE | SPARSE)), 100), encoding="utf-8")
    sweep = read_sweep(path)
    assert sweep.base == {"epochs": 2, "augment": False, "timeout_s": 20.0}
    assert sweep.seeds == [1, 2]
    assert sweep.configurations() == [
        {"compressor": "none", "lr": 0.2, "rates_tried": 3},
        {"compressor": "topk:ratio=0.01", "lr": 0.1, "rates_tried": 3},
    ]


def test_arguments_of_run() -> None:
    options = {"augment": False, "save_model": True, "timeout_s": 20.0, "lr": 0.1, "seeds": "1,2"}
    assert " ".join(run_arguments(options)) == "--no-augment --save-model --timeout 20.0 --lr 0.1 --seeds 1,2"
    assert run_arguments({"save_model": False}) == []  # there is no --no-save-model


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tune": {}}, r"methods.toml tunes nothing; give --rates"),
        ({"base": {"epochs": 2}}, "holds out no samples, which tuning needs; give --holdout-size"),
        ({"seeds": [99, 100]}, "--tuning-seed 100 is also a seed of the runs after tuning"),
        ({"matrix": {"epochs": [1, 2]}, "base": {"holdout_size": 9}}, "epochs cannot differ between configurations"),
        ({"include": [{"lr": 0.4}]}, "lr cannot differ between configurations"),
        ({"base": {"holdout_size": 9, "lr": 0.1}}, "lr cannot differ between configurations"),
        (
            {"tune": {"outer_lr": [0.4]}},
            "tunes outer_lr, but every configuration has another strategy than local",
        ),
    ],
)
def test_what_would_not_be_fair_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        tuning_sweep(dataclasses.replace(ASKED, **changes), 100)


def test_fewest_bits_per_byte_are_chosen_for_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    state = ended(DENSE | SPARSE)
    bits = {0.1: 2.4, 0.2: 2.1, 0.3: 2.2}
    for run in state.runs:
        state.past[run.config.digest].summary["test_bits_per_byte"] = bits[run.settings["lr"]]
    tuned = choose(ASKED, state)
    assert [each.best for each in tuned] == [{"lr": 0.2}, {"lr": 0.1}]  # top-k failed with the others
    print_tuned(ASKED, tuned, as_json=True)
    assert [each["bits_per_byte"] for each in json.loads(capsys.readouterr().out)] == [2.1, 2.4]
    print_tuned(ASKED, tuned, as_json=False)
    printed = capsys.readouterr().out
    assert "held-out bits per byte" in printed
    assert "2.100" in printed
