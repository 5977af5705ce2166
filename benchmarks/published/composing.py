"""Train a sweep's configurations seed by seed, until all claims about them are decided.

Rows of trainings on links are composed, as in `bench decide`: accuracies are those of a training without the link, and
times follow from the duration of steps on it. Here every seed has step times of its own, so that the spread over seeds
contains the error of both parts.
"""

from __future__ import annotations

import dataclasses
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.core.config.run import RunConfig
from bench.core.schema import LAYERS, METRICS
from bench.deciding.step_times import LinkStepTimes, levels_of, measure_step_times
from bench.deciding.study import LINK_OPTIONS, Method, Study, train_missing
from bench.deciding.trajectory import Trajectory, find_trajectories
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.sweep_file import Settings, SweepFile
from bench.report.store import Row, collect_runs, read, read_layers
from benchmarks.published.claims import Claim, Stated, undecided_sides
from benchmarks.published.figures import SweepRuns, fits
from benchmarks.published.sweeps import Sweep, runs_of, write_csv

# The first seeds are trained with every configuration, the others only with those of undecided claims.
FIRST_SEEDS, MOST_SEEDS = 4, 20
EVAL_EVERY = 0.5
# After one block of steps, no further block begins.
TIMING_S = 0.0
_KEPT = (
    "run_id", "config_id", "seed", "status", "started_at", "epoch", "step", "world_size", "model", "dataset",
    "compressor", "collective", "optimizer", "lr", "batch_size", "epochs", "hosts", "uplink_bps", "target_accuracy",
    "train_time_s", "time_to_target_s", "step_time_s", "samples_per_s", "train_accuracy", "test_accuracy", "test_loss",
    "payload_bytes_per_step", "payload_bytes_max_per_step", "state_bytes_per_step", "effective_density", "cpu",
    "torch_version", "git_sha", "git_dirty",
)  # fmt: skip


def add_seeds(
    sweep: Sweep,
    file: SweepFile,
    claims: Sequence[Claim | Stated],
    folder: Path,
    *,
    quick: bool = False,
    ends_at: float = math.inf,
) -> None:
    """Add seeds to the sweep's CSV file until all its claims are decided, the seeds are used up, or the time is over.

    Args:
        sweep: the sweep.
        file: the content of its file, or of the quick version.
        claims: the claims to judge.
        folder: folder of the pages.
        quick: True to train one seed only.
        ends_at: time of `time.monotonic` after which no seed is added.
    """
    path = sweep.csv(folder)
    with ForkServer(TRAIN) as server:
        links = [study.plan(server) for study in studies_of(file)]
        for seed in range(1, 2 if quick else MOST_SEEDS + 1):
            runs = SweepRuns.read(path)
            sides = undecided_sides(claims, runs, sweep.name)
            known = {(row["config_id"], row["seed"]) for row in runs.rows}
            wanted = [
                [
                    method
                    for method in methods
                    if (seed <= FIRST_SEEDS or any(fits(recorded(method).columns(), side) for side in sides))
                    and (recorded(method).config_id, seed) not in known
                ]
                for methods in links
            ]
            if not any(wanted):
                continue
            if time.monotonic() > ends_at:
                break
            print(f"{sweep.name}, seed {seed}: {sum(map(len, wanted))} configurations", file=sys.stderr)
            rows = list(runs.rows)
            for methods in filter(None, wanted):
                rows += _rows_of_seed(methods, seed, runs_of(sweep, quick=quick), server)
            write_csv(path, rows, METRICS)
    if sweep.layers_of:
        keep_layers(sweep, [method for methods in links for method in methods], runs_of(sweep, quick=quick), folder)


def keep_layers(sweep: Sweep, methods: Sequence[Method], runs: Path, folder: Path) -> None:
    """Write the rows per layer of the trajectories, under the names of the composed rows."""
    names = {
        dataclasses.replace(method.trajectory, seed=seed).digest: f"{recorded(method).config_id}-{seed}"
        for method in methods
        for seed in range(1, MOST_SEEDS + 1)
        if recorded(method).compressor in sweep.layers_of
    }
    new_name = {run["run_id"]: names[run["digest"]] for run in collect_runs(read([runs])) if run["digest"] in names}
    rows = [row | {"run_id": new_name[row["run_id"]]} for row in read_layers([runs]) if row["run_id"] in new_name]
    write_csv(sweep.layers_csv(folder), rows, LAYERS)


def studies_of(file: SweepFile) -> list[Study]:
    """Return a study for each link of a sweep file."""
    methods: dict[str, tuple[Settings, list[Settings]]] = {}
    for settings in file.configurations():
        link = {name: value for name, value in settings.items() if name in LINK_OPTIONS}
        _, several = methods.setdefault(repr(sorted(link.items())), (link, []))
        several.append({name: value for name, value in settings.items() if name not in LINK_OPTIONS})
    finer = {"eval_every": EVAL_EVERY} if "hosts" in file.base else {}
    return [Study(base=file.base | finer | link, methods=several, rule={}) for link, several in methods.values()]


def recorded(method: Method) -> RunConfig:
    """Return the configuration that the rows name: that of a whole training, on the link if there is one."""
    if method.on_link.cluster is None:
        return method.trajectory
    return dataclasses.replace(method.on_link, stop_at_target=False)


def _rows_of_seed(methods: Sequence[Method], seed: int, runs: Path, server: ForkServer) -> list[Row]:
    """Train the methods with one seed, time their steps on the link if there is one, and return their rows."""
    configs = {method.name: dataclasses.replace(method.trajectory, seed=seed) for method in methods}
    target = methods[0].trajectory.target_accuracy or 1.0
    order = random.Random(seed).sample(list(configs.values()), len(configs))
    train_missing(order, runs, server, lambda *_: None)
    found = find_trajectories(order, runs, target)
    trajectories = {method: found[config.digest] for method, config in configs.items()}
    if methods[0].on_link.cluster is None:
        return [row for trajectory in trajectories.values() for row in trajectory.run.rows]
    times = measure_step_times(
        {method.name: method.on_link for method in methods},
        {method: levels_of(trajectory.intervals) for method, trajectory in trajectories.items()},
        server,
        max_s=TIMING_S,
        on_block=lambda _: None,
    )
    return [
        row
        for method in methods
        for row in composed_rows(trajectories[method.name], recorded(method), times[method.name], target)
    ]


def composed_rows(trajectory: Trajectory, config: RunConfig, times: LinkStepTimes, target: float) -> list[Row]:
    """Return the rows of a training on a link: those of its trajectory, with the times of the link.

    Args:
        trajectory: the training without the link.
        config: the configuration on the link.
        times: the duration of its steps on the link.
        target: test accuracy to reach, from 0 to 1.
    """
    spent, reached = trajectory.start_s, None
    rows: list[Row] = []
    columns = config.columns()
    for row, (_, number, nbytes) in zip(trajectory.run.rows, trajectory.intervals, strict=True):
        step_s = times.training_s({nbytes: 1})
        spent += number * step_s
        if reached is None and (row["test_accuracy"] or 0.0) >= target:
            reached = spent
        values = (
            row
            | columns
            | {
                "run_id": f"{config.config_id}-{trajectory.seed}",
                "seed": trajectory.seed,
                "train_time_s": spent,
                "time_to_target_s": reached,
                "step_time_s": step_s,
                "samples_per_s": config.world_size * config.batch_size / step_s,
            }
        )
        rows.append({column.name: values[column.name] if column.name in _KEPT else None for column in METRICS})
    return rows
