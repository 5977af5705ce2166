"""Every component stands in a run whose numbers must repeat, and every change of such a number is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.core import registry
from bench.core.config.syntax import Partition
from benchmarks import same_numbers
from benchmarks.same_numbers import LISTS, listed

ROOT = Path(__file__).parents[3]
IN_CI, OTHERS = (listed(ROOT / file) for file in LISTS)
IN_CI_TOO = ("collectives", "strategies", "optimizers", "datasets")
NEVER = {
    "auto",  # chooses by measured times
    "cifar10", "cifar100",  # are downloaded
    "resnet34",  # resnet18 with more of the same blocks
}  # fmt: skip
NOT_IN_CI = {
    "site", "stdlib",  # the text of other versions is another
    "glyphs",  # another version of Pillow may draw other pixels
    "elastic",  # `local` among the ranks that are there
}  # fmt: skip
DEFAULTS = {"compressor": "none", "collective": "native", "strategy": "ddp", "optimizer": "sgd"}


def named(runs: list[dict[str, Any]], option: str) -> set[str]:
    """Return the names of the components that runs give for an option; ``function`` is a user's own."""
    texts = [run.get(option) or DEFAULTS[option] for run in runs]
    return {"function" if ".py:" in text else text.partition(":")[0] for text in texts}


@pytest.mark.parametrize("kind", registry.KINDS.values(), ids=lambda kind: kind.name)
def test_every_component_is_in_a_run_that_must_repeat(kind: registry.ComponentKind) -> None:
    known = {name for name, entry in registry.entries(kind.name).items() if not entry.provider} - NEVER
    known |= {"function"} if kind.name in registry.FROM_FUNCTIONS else set()
    assert named(IN_CI + OTHERS, kind.singular) == known
    if kind.name in IN_CI_TOO:
        assert named(IN_CI, kind.singular) == known - NOT_IN_CI


def test_every_preset_of_a_strategy_and_every_partition_is_in_a_run_that_must_repeat() -> None:
    strategies = "\n".join(run.get("strategy", "") for run in IN_CI + OTHERS)
    presets = {preset for entry in registry.entries("strategies").values() for preset in entry.presets}
    assert not [preset for preset in presets if f":preset={preset}" not in strategies]
    for runs in (IN_CI, OTHERS):
        partitions = [Partition.parse(run.get("partition", "iid")) for run in runs]
        for field in dataclasses.fields(Partition):
            assert len({getattr(each, field.name) is None for each in partitions}) == 2


LIST = """
[base]
dataset = "digits"
[[include]]
name = "one"
[[include]]
name = "two"
"""
CELLS = {"name": "one", "status": "ok", "lr": "0.1", "step_time_s": "1.0", "test_loss": "0.25"}


@pytest.fixture(autouse=True)
def _two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the list have two runs, and write both of them before and after."""
    (tmp_path / "list.toml").write_text(LIST, encoding="utf-8")
    monkeypatch.setattr(same_numbers, "LISTS", (tmp_path / "list.toml",))
    monkeypatch.chdir(tmp_path)
    for out in ("before", "after"):
        for name in ("one", "two"):
            (tmp_path / out / name).mkdir(parents=True)
            write_row(tmp_path / out / name, CELLS | {"name": name})
            torch.save({"weight": torch.ones(2)}, tmp_path / out / name / "model.pt")


def write_row(folder: Path, cells: dict[str, str]) -> None:
    text = f"{','.join(cells)}\n{','.join(cells.values())}\n"
    (folder / "metrics.csv").write_text(text, encoding="utf-8")


def test_times_and_options_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    write_row(Path("after/one"), CELLS | {"lr": "0.2", "step_time_s": "2.0", "new": "1"})
    assert same_numbers.compare(Path("before"), Path("after")) == 0
    assert capsys.readouterr().out == "all 2 runs are equal\n"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda one: write_row(one, CELLS | {"test_loss": "0.2500001"}), "test_loss: 0.25 -> 0.2500001 (row 0)"),
        (lambda one: write_row(one, CELLS | {"status": "failed"}), "no finished run in after"),
        (lambda one: (one / "metrics.csv").unlink(), "no finished run in after"),
        (lambda one: write_row(one, {"name": "one", "status": "ok", "loss": "0.25"}), "no column test_loss; "),
        (lambda one: torch.save({"weight": torch.tensor([1.0, 1.0000001])}, one / "model.pt"), "other weights"),
        (lambda one: torch.save({"other": torch.ones(2)}, one / "model.pt"), "other weights"),
        (lambda one: (one / "model.pt").unlink(), "other weights"),
        (lambda one: (one / "layers.csv").write_text("layer\nbias\n", encoding="utf-8"), "layers.csv is missing on"),
    ],
)
def test_a_number_that_differs_or_is_missing_is_found(
    capsys: pytest.CaptureFixture[str], change: Callable[[Path], object], found: str
) -> None:
    change(Path("after/one"))
    assert same_numbers.compare(Path("before"), Path("after")) == 1
    (line, count) = capsys.readouterr().out.splitlines()
    assert line.startswith("one: ")
    assert found in line
    assert count == "1 of 2 runs differ"


def test_a_run_that_failed_on_both_sides_is_not_equal(capsys: pytest.CaptureFixture[str]) -> None:
    for out in ("before", "after"):
        write_row(Path(out) / "one", CELLS | {"status": "failed"})
    assert same_numbers.compare(Path("before"), Path("after")) == 1
    assert "one: no finished run in before and after\n" in capsys.readouterr().out
