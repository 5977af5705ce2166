"""Tune the learning rates of the sweeps: run the tunings, write what was tried, and choose the best mean over seeds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.core import spec
from bench.core.schema import METRICS
from bench.report.store import Run, collect_runs, read
from benchmarks.published.sweeps import FILES, PAGES, RUNS, ended_runs, write_csv
from collectives.options import Spec

_THREE = (100, 101, 102)
# The seeds of each tuning. On digits the rates of small_cnn are so close that one or two seeds would choose randomly.
TUNINGS: Mapping[str, Sequence[int]] = {
    "digits": _THREE,
    "digits_threshold": _THREE,
    "digits_max_adabelief": _THREE,
    "hylo": (100, 101),
    "hylo_twobit": (100, 101),
    "hylo_usual": (100, 101),
    "synthetic": (100,),
    "synthetic_threshold": (100,),
}
_OF_SWEEP: Mapping[str, tuple[str, ...]] = {
    "group_topk": ("digits",),
    "algc": ("digits", "digits_threshold"),
    "harder": ("synthetic", "synthetic_threshold"),
    "answers": ("digits",),
    "hylo": ("hylo", "hylo_twobit", "hylo_usual"),
    "together": ("digits", "digits_max_adabelief"),
}
TUNED_SWEEPS = tuple(_OF_SWEEP)
_TUNED_WITH_THRESHOLD = ("threshold", "twobit")
RATE_NEUTRAL_OPTIONS = ("group_size", "flush_every")  # variants use the rate of their method

Method = tuple[str, str, str]  # model, compressor and optimizer


class Setting(NamedTuple):
    """The values that a tuning chooses for a method."""

    lr: float
    compressor: str


def _folder(name: str) -> Path:
    return RUNS / f"tuning-{name}"


def run_tuning(name: str) -> set[str]:
    """Run the missing runs of a tuning.

    Returns:
        The digests of the tuning's runs; other runs in the folder are from an earlier version of the file.
    """
    digests = set()
    for seed in TUNINGS[name]:
        command = [
            *(sys.executable, "-m", "bench", "tune", str(FILES / "tuning" / f"{name}.toml")),
            *("--out", str(_folder(name)), "--tuning-seed", str(seed), "--json"),
        ]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        planned = subprocess.run([*command, "--dry-run"], stdout=subprocess.PIPE, check=True)
        digests |= {run["digest"] for run in json.loads(planned.stdout)}
    return digests


def keep_tuning(name: str, digests: Container[str], folder: Path) -> None:
    """Write the last row of every finished run of a tuning."""
    rows = [run.last_known for run in ended_runs(_folder(name), digests)]
    write_csv(folder / f"tuning-{name}.csv", rows, METRICS)


def tuning_files(sweep: str, folder: Path = PAGES) -> list[Path]:
    """Return the CSV files from which the settings of a sweep are chosen."""
    return [folder / f"tuning-{name}.csv" for name in _OF_SWEEP[sweep]]


def best_for(sweep: str, folder: Path = PAGES) -> dict[Method, Setting]:
    """Return each method's setting with the best mean accuracy on held-out samples; the lower rate wins a tie.

    A failed run counts as an accuracy of 0.

    Args:
        sweep: one of `TUNED_SWEEPS`.
        folder: the folder of the tunings' CSV files; missing files are ignored.
    """
    tried: dict[tuple[Method, Setting], list[float]] = {}
    for run in collect_runs(read([file for file in tuning_files(sweep, folder) if file.is_file()])):
        setting = Setting(lr=run["lr"], compressor=_as_written_now(run["compressor"]))
        tried.setdefault((method_of(run), setting), []).append(run["test_accuracy"] if run.ended_well else 0.0)
    best: dict[Method, Setting] = {}
    for method, setting in sorted(tried, key=lambda each: (-statistics.fmean(tried[each]), each[1].lr)):
        best.setdefault(method, setting)
    return best


def method_of(run: Run) -> Method:
    """Return model, compressor with the options that affect its learning rate, and optimizer."""
    chosen = spec.parse(_as_written_now(run["compressor"]))
    tuned = {} if chosen.name in _TUNED_WITH_THRESHOLD else chosen.options
    options = {name: text for name, text in tuned.items() if name not in RATE_NEUTRAL_OPTIONS}
    return run["model"], str(Spec(chosen.name, options)), run["optimizer"]


def _as_written_now(compressor: str) -> str:
    """Return a compressor's text without the options that its preset sets, which older rows contain."""
    return str(spec.build("compressors", compressor)) if "preset=" in compressor else compressor
