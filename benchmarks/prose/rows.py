"""Read the committed rows, and compute what sentences say about them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from bench.report.statistics import Effect, SeedRule, difference, improvement
from benchmarks.prose.sentences import ROOT

REFERENCE = ROOT / "results/reference"


@functools.cache
def rows(name: str) -> pd.DataFrame:
    """Return the rows of a CSV file in results/reference."""
    return pd.read_csv(REFERENCE / f"{name}.csv", low_memory=False)


@functools.cache
def runs(name: str) -> pd.DataFrame:
    """Return one row per run that ended well, with the last known value of each column: the newest of equal runs."""
    last = rows(name).groupby("run_id", sort=False).last()
    return last[last.status == "ok"].drop_duplicates(["config_id", "seed"], keep="last")


@functools.cache
def decision(name: str) -> dict[str, Any]:
    """Return a decision of `bench decide` in results/reference."""
    content: dict[str, Any] = json.loads((REFERENCE / f"{name}.json").read_text(encoding="utf-8"))
    return content


def sooner(than: pd.Series, ours: pd.Series, rule: SeedRule = "fixed") -> Effect:
    """Return the factor by which times are shorter, paired by the series' common index of seeds."""
    seeds = than.index.intersection(ours.index)
    found = improvement(list(than[seeds]), list(ours[seeds]), higher_is_better=False, paired=True, rule=rule)
    assert found is not None
    return found


def points(than: Sequence[float], ours: Sequence[float], *, paired: bool = False) -> Effect:
    """Return the difference of shares, in points."""
    found = difference([100 * share for share in than], [100 * share for share in ours], paired=paired)
    assert found is not None
    return found


def per_cent(ratio: float) -> float:
    """Return by how many per cent a ratio is above 1."""
    return 100.0 * (ratio - 1.0)
