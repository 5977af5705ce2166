"""Time the steps of a sweep's configurations on their links, so that slow and fast periods of the machine affect all.

One job per link holds all configurations, and times them in blocks of random order, as `bench decide` does. A row is a
block of one configuration; its number stands in the column `seed`, so that figures pair the blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.core.config.run import RanksConfig, RunConfig
from bench.core.environment import origin_columns
from bench.core.schema import METRICS
from bench.deciding.step_times import measure_step_times
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.sweep_file import SweepFile, plan_runs
from bench.report.store import Row
from benchmarks.published.claims import Claim, Stated, undecided_sides
from benchmarks.published.figures import SweepRuns, fits
from benchmarks.published.sweeps import Sweep, write_csv

# A job, with all configurations on one link, begins no block after this time.
LONGEST_JOB_S, QUICK_JOB_S = 300.0, 5.0
_KEPT = (
    "run_id", "config_id", "seed", "status", "started_at", "model", "dataset", "compressor", "collective", "optimizer",
    "strategy", "trigger", "world_size", "batch_size", "accumulate", "hosts", "uplink_bps", "downlink_bps",
    "samples_per_s", "step_time_s", "payload_bytes_per_step", "cpu", "cores", "torch_version", "git_sha", "git_dirty",
)  # fmt: skip


def time_sweep(sweep: Sweep, file: SweepFile, claims: Sequence[Claim | Stated], folder: Path, max_s: float) -> None:
    """Time the configurations of undecided claims, and add the blocks to the sweep's CSV file.

    Args:
        sweep: the sweep.
        file: the content of its file, or of the quick version.
        claims: the claims to judge.
        folder: folder of the pages.
        max_s: seconds per link after which no block begins.
    """
    path = sweep.csv(folder)
    runs = SweepRuns.read(path)
    rows = list(runs.rows)
    sides = undecided_sides(claims, runs, sweep.name)
    with ForkServer(TRAIN) as server:
        planned = [run.config for run in plan_runs(dataclasses.replace(file, seeds=[1]), server)]
        wanted = [each for each in planned if any(fits(each.columns(), side) for side in sides)]
        names = [option.name for option in RanksConfig.options()]
        for _, configs in itertools.groupby(wanted, lambda each: [getattr(each, name) for name in names]):
            rows += _blocks(list(configs), rows, server, max_s)
            write_csv(path, rows, METRICS)


def _blocks(configs: Sequence[RunConfig], rows: Sequence[Row], server: ForkServer, max_s: float) -> list[Row]:
    """Time the configurations of one link; return a row per block and configuration."""
    print(f"{len(configs)} configurations on {configs[0].hosts} hosts, {configs[0].uplink_bps} bit/s", file=sys.stderr)
    times = measure_step_times(
        {config.config_id: config for config in configs},
        {config.config_id: [0] for config in configs},
        server,
        max_s=max_s,
        on_block=lambda number: print(f"block {number}", file=sys.stderr),
    )
    # Blocks are numbered on from the last one of any of these configurations, so that pairs are of the same block.
    ids = set(times)
    last = max((row["seed"] for row in rows if row["config_id"] in ids), default=0)
    origin = origin_columns(configs[0].device) | {"started_at": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())}
    found = []
    for config in configs:
        measured = times[config.config_id]
        samples = config.world_size * config.batch_size * config.accumulate
        for block, (step_s,) in enumerate(measured.seconds[0], last + 1):
            values: dict[str, Any] = (
                config.columns()
                | origin
                | {
                    "run_id": f"{config.config_id}-{block}",
                    "seed": block,
                    "status": "ok",
                    "samples_per_s": samples / step_s,
                    "step_time_s": step_s,
                    "payload_bytes_per_step": measured.nbytes[0],
                }
            )
            found.append({column.name: values.get(column.name) if column.name in _KEPT else None for column in METRICS})
    return found
