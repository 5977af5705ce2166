"""What `bench compare` takes for 1000 runs of 10 rows each, beside what `csv.DictReader` takes to read the same files.

    python benchmarks/compare_speed.py [--turns 5]

Both are whole processes in turn, each also with a single run, which is what starting costs; CPU seconds, so that other
work on the machine counts less.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.core.rows import RowWriter
from bench.core.schema.metrics import METRICS

READ = """
import csv, pathlib, sys
for path in pathlib.Path(sys.argv[1]).rglob("metrics.csv"):
    with path.open(newline="", encoding="utf-8") as file:
        list(csv.DictReader(file))
"""
EXAMPLES = {int: 12345, float: 0.123456789, bool: True, str: "a text, as it may be"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    with tempfile.TemporaryDirectory() as folder:
        many, one = Path(folder) / "many", Path(folder) / "one"
        for number in range(100):
            for seed in range(10):
                make_run(many, number, seed)
        make_run(one, 0, 0)
        seconds = [(read(many), read(one), compare(many), compare(one)) for _ in range(turns)]
    reading, reading_one, comparing, comparing_one = (
        statistics.median(column) for column in zip(*seconds, strict=True)
    )
    print(f"csv.DictReader {reading:.3f} s, of one run {reading_one:.3f} s")
    print(f"bench compare  {comparing:.3f} s, of one run {comparing_one:.3f} s")
    print(f"whole processes: {statistics.median(c / r for r, _, c, _ in seconds):.2f} times")
    print(f"without what starting costs: {statistics.median((c - d) / (r - s) for r, s, c, d in seconds):.2f} times")


def make_run(folder: Path, number: int, seed: int) -> None:
    """Ten evaluations of one run; every column is filled."""
    name = f"run-{number:03}-s{seed}"
    (folder / name).mkdir(parents=True)
    fixed = {column.name: EXAMPLES[column.type] for column in METRICS} | {
        "run_id": name,
        "config_id": f"{number:010x}",
        "compressor": f"topk:ratio=0.{number:03}" if number else "none",
        "seed": seed,
        "started_at": "2026-01-01",
    }
    RowWriter(folder / name / "metrics.csv").extend(
        fixed
        | {
            "status": "ok" if row == 10 else "running",
            "step": 20 * row,
            "epoch": float(row),
            "train_time_s": row + seed / 17,
            "test_accuracy": row / 11 + seed / 1000,
            "samples_per_s": 1000 + number + seed / 7 + row / 13,
            "step_time_s": 0.05 + seed / 70_000 + row / 13_000,
        }
        for row in range(1, 11)
    )


def read(folder: Path) -> float:
    """CPU seconds of a process that reads every file with `csv.DictReader`."""
    return cpu_seconds("-c", READ, str(folder))


def compare(folder: Path) -> float:
    """CPU seconds of `bench compare`."""
    return cpu_seconds("-m", "bench", "compare", str(folder))


def cpu_seconds(*arguments: str) -> float:
    """What a Python process with these arguments takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
