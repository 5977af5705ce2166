"""Make the short runs of continuous integration, and compare their reproducible columns with a reference.

    python -m benchmarks.ci            # exit code 5 if bytes per step or accuracy changed (make bench-ci)
    python -m benchmarks.ci --bless    # the new measurements become the reference (make bless)

The runs are listed in ci.toml.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.core.rows import RowWriter
from bench.core.schema import METRICS
from bench.report.store import collect_runs, read
from benchmarks.inputs import write_inputs

REFERENCE = Path("results/reference/ci.csv")
RUNS = Path(__file__).with_suffix(".toml")

# Measured times are left out: they would change every line of the reference whenever it is rewritten.
KEPT = [column.name for column in METRICS if column.deterministic or column.name in ("run_id", "status", "cpu")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bless", action="store_true", help=f"write {REFERENCE} instead of comparing with it")
    blessing = parser.parse_args().bless
    write_inputs(Path())
    with tempfile.TemporaryDirectory() as folder:
        bench("sweep", str(RUNS), "--out", folder, check=True)
        if blessing:
            write_reference(folder)
            return 0
        return bench("compare", folder, "--baseline", "none", "--reference", str(REFERENCE), check=False)


def bench(*arguments: str, check: bool) -> int:
    """Run a command of `bench`, and return its exit code."""
    return subprocess.run([sys.executable, "-m", "bench", *arguments], check=check).returncode


def write_reference(folder: str) -> None:
    """Write one row per run to the reference, sorted by name and seed."""
    runs = sorted(collect_runs(read([folder])), key=lambda run: (run["name"], run["seed"]))
    REFERENCE.unlink(missing_ok=True)
    RowWriter(REFERENCE).extend({name: run[name] for name in KEPT} for run in runs)
    print(f"wrote {REFERENCE}; check the differences before you commit it")


if __name__ == "__main__":
    sys.exit(main())
