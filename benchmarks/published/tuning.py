"""The tunings behind the learning rates of the sweeps: what was tried, and what was best."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.core.schema import METRICS
from bench.report.runs import Run, collect_runs
from bench.report.store import read
from benchmarks.published.sweeps import FILES, PAGES, RUNS, write_csv

TUNINGS = ("synthetic", "synthetic_threshold", "digits", "digits_max_adabelief", "hylo", "hylo_twobit")
_OF_SWEEP: Mapping[str, tuple[str, ...]] = {
    "group_topk": ("synthetic",),
    "algc": ("synthetic", "synthetic_threshold"),
    "hylo": ("hylo", "hylo_twobit"),
    "together": ("digits", "digits_max_adabelief"),
}
TUNED_SWEEPS = tuple(_OF_SWEEP)


def run_tuning(name: str) -> None:
    """Do what is missing of a tuning."""
    command = ["tune", str(FILES / "tuning" / f"{name}.toml"), "--out", str(RUNS / f"tuning-{name}")]
    subprocess.run([sys.executable, "-m", "bench", *command], stdout=subprocess.DEVNULL, check=True)


def keep_tuning(name: str, folder: Path) -> None:
    """Write the last row of every run of a tuning."""
    runs = collect_runs(read([RUNS / f"tuning-{name}"]))
    write_csv(folder / f"tuning-{name}.csv", [run.last_known for run in runs], METRICS)


def tried_for(sweep: str, folder: Path = PAGES) -> list[Run]:
    """Every run that the rates of a sweep were chosen from."""
    return collect_runs(read([folder / f"tuning-{name}.csv" for name in _OF_SWEEP[sweep]]))
