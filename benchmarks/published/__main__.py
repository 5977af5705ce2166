"""Run the sweeps of the published systems and write their pages: ``python -m benchmarks.published --help``."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

from bench.launch.sweep_file import read_sweep
from benchmarks.published.composing import add_seeds
from benchmarks.published.figures import SweepRuns
from benchmarks.published.page import write_page
from benchmarks.published.summary import SWEEP, write_summary
from benchmarks.published.sweeps import PAGES, QUICK_RUNS, SWEEPS, keep_rows, quick_version, run_sweep, runs_of
from benchmarks.published.systems import SYSTEMS
from benchmarks.published.timing import LONGEST_JOB_S, QUICK_JOB_S, time_sweep
from benchmarks.published.tuning import TUNED_SWEEPS, TUNINGS, best_for, keep_tuning, run_tuning

SUMMARY = "summary"


def main() -> None:
    options = _arguments()
    folder = QUICK_RUNS / "pages" if options.quick else PAGES
    folder.mkdir(parents=True, exist_ok=True)
    if options.tune is not None:
        for name in options.tune or TUNINGS:
            keep_tuning(name, run_tuning(name), folder)
        _print_rates(folder)
        return
    systems = [SYSTEMS[options.only]] if options.only in SYSTEMS else [] if options.only else list(SYSTEMS.values())
    names = list(dict.fromkeys(sweep for system in systems for sweep in system.sweeps))
    if options.only:  # the sweep that all systems share belongs to the summary
        names = [SWEEP] if options.only == SUMMARY else [name for name in names if name != SWEEP]
    ends_at = time.monotonic() + 60.0 * options.minutes
    for sweep in (SWEEPS[name] for name in names):
        runs_folder = runs_of(sweep, quick=options.quick)
        file = quick_version(sweep) if options.quick else read_sweep(sweep.file)
        claims = [claim for system in SYSTEMS.values() for claim in system.claims]
        if (sweep.timed or sweep.adaptive) and options.no_runs:
            continue  # their CSV files are complete
        if sweep.timed:
            time_sweep(sweep, file, claims, folder, QUICK_JOB_S if options.quick else LONGEST_JOB_S)
        elif sweep.adaptive:
            add_seeds(sweep, file, claims, folder, quick=options.quick, ends_at=ends_at)
        elif not options.no_runs or runs_folder.is_dir():
            print(f"sweep {sweep.name}", file=sys.stderr)
            digests = run_sweep(sweep, quick=options.quick, only_look=options.no_runs)
            keep_rows(sweep, runs_folder, digests, folder)
    runs = {name: SweepRuns.read(sweep.csv(folder)) for name, sweep in SWEEPS.items()}
    for system in systems:
        write_page(system, runs, folder, quick=options.quick)
    write_summary(list(SYSTEMS.values()), runs, folder, quick=options.quick)
    print(f"wrote {folder}", file=sys.stderr)


def _print_rates(folder: Path) -> None:
    """Print the best learning rates, to be copied into the sweep files; a test compares both."""
    for sweep in TUNED_SWEEPS:
        for (model, _, optimizer), setting in best_for(sweep, folder).items():
            print(f"{sweep}: {model}, {setting.compressor}, {optimizer}: lr {setting.lr:g}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument(
        "--only",
        choices=[*SYSTEMS, SUMMARY],
        help="one system with its sweeps, or the summary with its sweep",
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="minutes after which no seed is added")
    parser.add_argument("--quick", action="store_true", help="run a tenth of each sweep; pages go below results/runs/")
    parser.add_argument("--no-runs", action="store_true", help="only write the pages, from the runs that are finished")
    parser.add_argument(
        "--tune",
        nargs="*",
        choices=TUNINGS,
        metavar="NAME",
        help="run these tunings of learning rates (default: all) instead of the sweeps, and write all tried settings",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
