"""Runs the sweeps of the published systems, and writes their pages: ``python -m benchmarks.published --help``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.published.figures import SweepRuns
from benchmarks.published.page import write_page
from benchmarks.published.summary import SWEEP, write_summary
from benchmarks.published.sweeps import PAGES, QUICK_RUNS, SWEEPS, keep_rows, run_sweep, runs_of
from benchmarks.published.systems import SYSTEMS
from benchmarks.published.tuning import TUNED_SWEEPS, TUNINGS, best_for, keep_tuning, run_tuning

SUMMARY = "summary"


def main() -> None:
    asked = _arguments()
    folder = QUICK_RUNS / "pages" if asked.quick else PAGES
    folder.mkdir(parents=True, exist_ok=True)
    if asked.tune is not None:
        for name in asked.tune or TUNINGS:
            keep_tuning(name, run_tuning(name), folder)
        _print_rates(folder)
        return
    systems = [SYSTEMS[asked.only]] if asked.only in SYSTEMS else [] if asked.only else list(SYSTEMS.values())
    names = list(dict.fromkeys(sweep for system in systems for sweep in system.sweeps))
    if asked.only:  # what all systems share is the summary's
        names = [SWEEP] if asked.only == SUMMARY else [name for name in names if name != SWEEP]
    for sweep in (SWEEPS[name] for name in names):
        runs_folder = runs_of(sweep, quick=asked.quick)
        if not asked.no_runs or runs_folder.is_dir():
            print(f"sweep {sweep.name}", file=sys.stderr)
            digests = run_sweep(sweep, quick=asked.quick, only_look=asked.no_runs)
            keep_rows(sweep, runs_folder, digests, folder)
    runs = {name: SweepRuns.read(sweep.csv(folder)) for name, sweep in SWEEPS.items()}
    for system in systems:
        write_page(system, runs, folder, quick=asked.quick)
    write_summary(list(SYSTEMS.values()), runs, folder, quick=asked.quick)
    print(f"wrote {folder}", file=sys.stderr)


def _print_rates(folder: Path) -> None:
    """What stands in the sweep files by hand; a test holds it there."""
    for sweep in TUNED_SWEEPS:
        for (model, _, optimizer), setting in best_for(sweep, folder).items():
            print(f"{sweep}: {model}, {setting.compressor}, {optimizer}: lr {setting.lr:g}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument(
        "--only", choices=[*SYSTEMS, SUMMARY], help="one system's sweeps and page, or the sweep of all together"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of each sweep, pages below results/runs/")
    parser.add_argument("--no-runs", action="store_true", help="run nothing, write the pages from what there is")
    parser.add_argument(
        "--tune",
        nargs="*",
        choices=TUNINGS,
        metavar="NAME",
        help="tune the learning rates instead, and keep what was tried; of these tunings, or of all",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
