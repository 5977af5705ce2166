"""Compare the numbers of two versions of the tool, on one machine, for every component.

    python -m benchmarks.same_numbers run OUT [--bench BENCH]     # with each version, into its own folder
    python -m benchmarks.same_numbers compare BEFORE AFTER        # every number that repeats, bit for bit

`run` makes the runs of ci.toml and same_numbers.toml. It continues where it was stopped, and fails if a run fails.
`compare` fails if a number differs or has no counterpart, or if a run is missing on either side.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.core.columns import Column
from bench.core.schema import LAYERS, LINKS, METRICS, PARTITION
from benchmarks.inputs import write_inputs

ROOT = Path(__file__).parents[1]
LISTS = (Path("benchmarks/ci.toml"), Path("benchmarks/same_numbers.toml"))
TABLES = {"metrics.csv": METRICS, "layers.csv": LAYERS, "links.csv": LINKS, "partition.csv": PARTITION}
# Another version may say in other words what a run was asked to do, and where it was made.
GIVEN = {column for column in METRICS if column.group in ("identity", "origin")}
# Columns whose name changed between the two versions: before -> after, or None for a column that is no more.
RENAMED: Mapping[str, str | None] = {}


def run(out: Path, bench: Sequence[str]) -> int:
    """Make all runs that are not in the folder yet; return 0 if all ended well."""
    write_inputs(ROOT)
    sweeps = [[*bench, "sweep", str(file), "--out", str(out.absolute()), "--retry-failed"] for file in LISTS]
    return max(subprocess.run(sweep, cwd=ROOT, check=False).returncode for sweep in sweeps)


def compare(before: Path, after: Path) -> int:
    """Print what differs, and return the number of runs that are not equal."""
    one, two = finished(before), finished(after)
    names = {run["name"] for file in LISTS for run in listed(ROOT / file)}.union(one, two)
    unequal = 0
    for name in sorted(names):
        if missing := [str(out) for out, runs in ((before, one), (after, two)) if name not in runs]:
            found = [f"no finished run in {' and '.join(missing)}"]
        else:
            found = list(differences(one[name], two[name]))
        if found:
            unequal += 1
            print(f"{name}: {'; '.join(found)}")
    print(f"{unequal} of {len(names)} runs differ" if unequal else f"all {len(names)} runs are equal")
    return unequal


def listed(file: Path) -> list[dict[str, Any]]:
    """Return the options of each run of a list, with those that all of its runs share."""
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    return [content["base"] | run for run in content["include"]]


def finished(out: Path) -> dict[str, Path]:
    """Return the folder of each run that ended well, by the run's name."""
    last = {path.parent: rows(path)[-1] for path in sorted(out.glob("*/metrics.csv"))}
    return {row["name"]: folder for folder, row in last.items() if row["status"] == "ok"}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def differences(before: Path, after: Path) -> Iterator[str]:
    """Yield a sentence for each number of two runs that differs: of their tables, and of their trained weights."""
    for file, columns in TABLES.items():
        paths = before / file, after / file
        if all(path.exists() for path in paths):
            found = table_differences(rows(paths[0]), rows(paths[1]), columns)
            yield from (f"{file}: {each}" for each in found)
        elif any(path.exists() for path in paths):
            yield f"{file} is missing on one side"
    models = before / "model.pt", after / "model.pt"
    if any(path.exists() for path in models) and weights(models[0]) != weights(models[1]):
        yield "other weights"


def weights(path: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor of a saved model; nothing if there is no such file."""
    tensors = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {}
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def table_differences(
    before: list[dict[str, str]], after: list[dict[str, str]], columns: Sequence[Column]
) -> Iterator[str]:
    """Yield a sentence for each column that should repeat and differs, with the first pair of values."""
    if len(before) != len(after):
        yield f"{len(before)} rows -> {len(after)}"
        return
    ignored = {column.name for column in columns if not column.deterministic or column in GIVEN} | {None}
    for name in before[0] if before else ():
        later = RENAMED.get(name, name)
        if later in ignored:
            continue
        if later not in after[0]:
            yield f"no column {later}; if it has another name, add it to RENAMED"
            continue
        pairs = [(old[name], new[later]) for old, new in zip(before, after, strict=True)]
        unequal = [f"{later}: {old} -> {new} (row {row})" for row, (old, new) in enumerate(pairs) if old != new]
        yield from unequal[:1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("out", type=Path)
    running.add_argument("--bench", default=f"{sys.executable} -m bench", help="the command to run")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        sys.exit(run(given.out, shlex.split(given.bench)))
    sys.exit(bool(compare(given.before, given.after)))


if __name__ == "__main__":
    main()
