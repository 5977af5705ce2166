"""Compare composed times with the times of whole runs, for configurations that a seed draws.

    python benchmarks/composed_times.py [--configurations 12] [--seed 1] [--out results/reference/composed-times.csv]

Each configuration is trained without the link, its steps are timed on the link before and after a whole run there, and
the composed time is compared with the time of the whole run. Needs an idle machine with virtual hosts. To see how
far other work moves the times apart, start some first: `sh -c 'while :; do :; done' &`.
"""

import argparse
import itertools
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from bench.core.config.run import RunConfig
from bench.deciding.step_times import joined, levels_of, measure_step_times
from bench.deciding.study import Study, train_missing
from bench.deciding.trajectory import Trajectory, find_trajectories
from bench.launch.jobs.fork_server import TRAIN, ForkServer

MODELS = ("small_cnn", "small_cnn:width=8,hidden=512", "vgg11:width=8,hidden=512")
PAIRS = (
    {"compressor": "topk:ratio=0.01", "collective": "allgather"},
    {"compressor": "group_topk:ratio=0.01,warmup_epochs=0", "collective": "ring"},
    {"compressor": "powersgd", "collective": "native"},
    {"compressor": "algc", "collective": "server"},
)
LINKS: tuple[dict[str, Any], ...] = (
    {"hosts": 2, "bandwidth": "20mbit"},
    {"hosts": 2, "bandwidth": "50mbit", "latency": "5ms"},
    {"hosts": 2, "bandwidth": "200mbit"},
)
TIMING_S = 4.0


def measure(settings: dict[str, Any], folder: Path, server: ForkServer) -> dict[str, Any]:
    """Return a row with the composed and the measured time of one training."""
    base = {"dataset": "digits", "epochs": 4.0, "eval_every": 0.5, "target_accuracy": 1.0} | settings
    (method,) = Study(base=base, methods=[{}], rule={}).plan(server)

    def train(config: RunConfig) -> Trajectory:
        train_missing([config], folder, server, lambda *_: None)
        (found,) = find_trajectories([config], folder, 1.0).values()
        return found

    trajectory = train(method.trajectory)
    levels = {"": levels_of(trajectory.intervals)}

    def time_steps() -> Any:
        return measure_step_times({"": method.on_link}, levels, server, max_s=TIMING_S, on_block=lambda _: None)

    before, whole, after = time_steps(), train(method.on_link), time_steps()
    both = joined([before, after])[""]
    composed_s = trajectory.start_s + both.training_s(trajectory.steps)
    losses = [[row["test_loss"] for row in each.run.rows] for each in (trajectory, whole)]
    return settings | {
        "steps": sum(trajectory.steps.values()),
        "levels": len(levels[""]),
        "composed_s": composed_s,
        "measured_s": whole.train_time_s,
        "deviation": composed_s / whole.train_time_s - 1.0,
        "same_training": losses[0] == losses[1],
        "other_cpu_share": max(share or 0.0 for share in (whole.other_cpu_share, *both.other_cpu_share)),
    }


def main() -> None:
    """Draw the configurations, measure them, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    every = list(itertools.product(MODELS, PAIRS, LINKS))
    drawn = random.Random(options.seed).sample(every, options.configurations)
    rows = []
    with tempfile.TemporaryDirectory() as folder, ForkServer(TRAIN) as server:
        for model, pair, link in drawn:
            row = measure({"model": model} | pair | link, Path(folder), server)
            rows.append(row)
            print(" ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    deviations = [abs(row["deviation"]) for row in rows]
    print(f"median deviation {statistics.median(deviations):.1%}, largest {max(deviations):.1%}")
    if options.out:
        pd.DataFrame(rows).to_csv(options.out, index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
