"""Sweeps of which only the steps are timed: a row per block, and further blocks for claims that are undecided."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.core.config.run import RunConfig
from bench.deciding.step_times import LinkStepTimes
from bench.launch.plan import plan
from bench.launch.sweep_file import SweepFile
from benchmarks.published import timing
from benchmarks.published.claims import Claim, above
from benchmarks.published.figures import SweepRuns, faster
from benchmarks.published.sweeps import Sweep

SWEEP = Sweep(name="made_up", quick={}, timed=True)
CONFIGS = [plan(RunConfig(compressor=compressor, steps=5)) for compressor in ("none", "topk", "powersgd")]


def claim(bound: float) -> Claim:
    """Return the claim that top-k is faster than dense gradients by a factor."""
    measure = faster({"compressor": "topk"}, {"compressor": "none"})
    return Claim(text="", source="", setup="", sweep="made_up", measure=measure, claimed=above(bound))


def test_blocks_are_added_while_a_claim_is_undecided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measured(configs: dict[str, RunConfig], *_: Any, **__: Any) -> dict[str, LinkStepTimes]:
        asked.append(len(configs))
        seconds = {"none": 0.2, "topk": 0.1}
        return {
            name: LinkStepTimes(
                nbytes=[100.0], seconds=[[[seconds[config.compressor] + block / 1000] for block in range(3)]]
            )
            for name, config in configs.items()
        }

    monkeypatch.setattr(timing, "measure_step_times", measured)
    monkeypatch.setattr(timing, "plan_runs", lambda *_: [SimpleNamespace(config=config) for config in CONFIGS])
    for _ in range(3):  # after 6 blocks the claim is decided
        timing.time_sweep(SWEEP, SweepFile(where="", base={}), [claim(1.5)], tmp_path, 1.0)
    assert asked == [2, 2]
    runs = SweepRuns.read(SWEEP.csv(tmp_path))
    assert sorted(runs.by_seed({"compressor": "topk"})) == [1, 2, 3, 4, 5, 6]
    assert runs.by_seed({"compressor": "none"})[4]["samples_per_s"] == pytest.approx(2 * 32 / 0.2)
    assert claim(1.5).measures[""].of(runs).value == pytest.approx(1.99, abs=0.01)
