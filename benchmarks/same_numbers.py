"""Compare the rows of two versions of the tool, for 28 runs of every family, collective and strategy.

    python benchmarks/same_numbers.py run OUT [--bench BENCH]     # with each version, into its own folder
    python benchmarks/same_numbers.py compare BEFORE AFTER        # every reproducible column, bit for bit

Exit code of `compare`: 0 if all columns agree, 1 if one differs.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

import pandas as pd

from bench.core.schema import LAYERS, METRICS, Column

COMMON = "--dataset digits --epochs 2 --batch-size 32 --seed 7 --threads 1 --device cpu"
PAIRS = {
    "dense-native": "--compressor none --collective native",
    "dense-ring-sync": "--compressor none --collective ring --trigger sync --world-size 3",
    "bf16-halving": "--compressor bf16 --collective halving_doubling --world-size 3",
    "fp16-tree": "--compressor fp16 --collective tree --world-size 4",
    "int8-allgather": "--compressor int8 --collective allgather",
    "topk-allgather": "--compressor topk --collective allgather --world-size 3 --model resnet20 --train-size 300",
    "topk-server-union": "--compressor topk --collective server:downlink=union,placement=sharded --world-size 3",
    "topk-server-recode": "--compressor topk --collective server:downlink=recode",
    "group-topk-ring": "--compressor group_topk --collective ring --world-size 3 --bucket-mb 0.1",
    "group-topk-pool": "--compressor group_topk --collective pool",
    "randomk-ring": "--compressor randomk --collective ring",
    "threshold-hierarchical": "--compressor threshold --collective hierarchical --world-size 4",
    "dgc-allgather": "--compressor dgc --collective allgather",
    "adaptive-topk-tree": "--compressor adaptive_topk --collective tree --world-size 3",
    "algc-server": "--compressor algc --collective server --world-size 3",
    "hylo-allgather": "--compressor hylo --collective allgather",
    "hylo-shared-ring": "--compressor hylo:shared_threshold=true --collective ring",
    "sign-allgather": "--compressor sign --collective allgather",
    "onebit-allgather": "--compressor onebit --collective allgather",
    "twobit-server": "--compressor twobit --collective server",
    "terngrad-ring": "--compressor terngrad:shared_scale=true --collective ring",
    "qsgd-allgather": "--compressor qsgd --collective allgather",
    "natural-allgather": "--compressor natural --collective allgather",
    "powersgd-native": "--compressor powersgd --collective native --model resnet20 --train-size 300",
    "torch-powersgd": "--compressor torch_powersgd --collective native",
    "dense-async-server": "--compressor none --strategy async_server:mode=ssp,staleness=0",
    "topk-async-server": "--compressor topk --strategy async_server:mode=ssp,staleness=0 --world-size 3",
    "group-topk-asp-alone": "--compressor group_topk --strategy async_server:mode=asp --world-size 1",
}
"""Name -> options of `bench run`. An asynchronous run is reproducible only if no rank can overtake another."""
RENAMED = {
    "run_id",
    "digest",
    "config_id",
    "collective",
    "git_sha",
    "git_dirty",
}  # columns that identify an experiment, and may change with its options


def run(out: pathlib.Path, bench: str) -> None:
    """Run every pair below `out`, except those that are already there."""
    for name, options in PAIRS.items():
        if list(out.glob(f"{name}/*/status.json")):
            continue
        # both versions must form the same buckets; an asynchronous server has none
        buckets = [] if "--bucket-mb" in options or "async_server" in options else ["--bucket-mb", "25"]
        command = [
            *bench.split(),
            "run",
            *COMMON.split(),
            *buckets,
            *options.split(),
            "--name",
            name,
            "--out",
            str(out / name),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"{name}: {'ok' if ended.returncode == 0 else ended.stderr.strip().splitlines()[-1]}", flush=True)


def differences(before: pathlib.Path, after: pathlib.Path, columns: tuple[Column, ...]) -> list[str]:
    """Return the reproducible columns of both files in which rows differ, each with the first pair of values."""
    one, two = (pd.read_csv(path, dtype=str, keep_default_na=False) for path in (before, after))
    if len(one) != len(two):
        return [f"{len(one)} rows -> {len(two)}"]
    found = []
    for column in columns:
        if not column.deterministic or column.name in RENAMED or not {column.name} <= set(one) & set(two):
            continue
        unequal = one[column.name] != two[column.name]
        if unequal.any():
            first = unequal.idxmax()
            found.append(f"{column.name}: {one[column.name][first]} -> {two[column.name][first]} (row {first})")
    return found


def compare(before: pathlib.Path, after: pathlib.Path) -> int:
    """Print the differences, and return the number of pairs that differ."""
    unequal = 0
    for name in PAIRS:
        found = []
        for file, columns in (("metrics.csv", METRICS), ("layers.csv", LAYERS)):
            paths = [next(iter(folder.glob(f"{name}/*/{file}")), None) for folder in (before, after)]
            if paths == [None, None]:
                continue
            if None in paths:
                found.append(f"{file} is missing on one side")
            else:
                found += differences(paths[0], paths[1], columns)
        print(f"{name}: {'; '.join(found) or 'equal'}")
        unequal += bool(found)
    return unequal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("out", type=pathlib.Path)
    running.add_argument("--bench", default="bench", help="the command to run")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=pathlib.Path)
    comparing.add_argument("after", type=pathlib.Path)
    given = parser.parse_args()
    if given.command == "run":
        run(given.out, given.bench)
    else:
        sys.exit(bool(compare(given.before, given.after)))


if __name__ == "__main__":
    main()
