"""Check how well the calibrated cost model predicts a step of `placed:by=type`; every role is a local CPU process.

Two networks serve for calibration: their operations are timed one by one in one process, and their steps in whole runs.
A third network is predicted and measured. Runs of the three are interleaved, and a step time is the median over rounds.
Run it on an otherwise idle machine:

    python -m benchmarks.placed_model [--calibrate small_cnn resnet20] [--predict resnet32] [--rounds 5]
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench.core import spec
from bench.extensions.place.assignment import assign, trace
from bench.extensions.place.catalog import measured_link
from bench.extensions.place.step import network_of
from bench.extensions.place.topology import Topology
from benchmarks.placed_calibration import CalibratedTimes, PlacedNetwork, Sample, measure

NUM_CLASSES = 10
TRAIN_SIZE, TEST_SIZE = 1024, 10


def measured_step(model: str, args: argparse.Namespace, out: Path) -> float:
    """Run a training, and return its step time in seconds from the last row."""
    command = [
        sys.executable, "-m", "bench", "run", "--strategy", f"placed:by=type,devices={args.devices}", "--model", model,
        "--steps", str(args.steps), "--batch-size", str(args.batch_size), "--threads", "1", "--dataset", "digits",
        "--train-size", str(TRAIN_SIZE), "--test-size", str(TEST_SIZE), "--eval-every", "0", "--out", str(out),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    (rows,) = out.glob("*/metrics.csv")
    with rows.open(encoding="utf-8") as file:
        return float(list(csv.DictReader(file))[-1]["step_time_s"])


def placed(model: str, topology: Topology, batch_size: int) -> PlacedNetwork:
    traced, operations = network_of(model, num_classes=NUM_CLASSES, batch_size=batch_size)
    (pool,) = topology.pools()
    device_of = assign(traced, pool).device_of
    return PlacedNetwork(operations=operations, device_of=device_of, topology=topology, batch_size=batch_size)


def node_by_node(model: str, network: PlacedNetwork, repeats: int) -> list[Sample]:
    torch.manual_seed(1)
    traced = trace(spec.build("models", model).build(NUM_CLASSES))
    return measure(traced, network.operations, torch.randn(network.batch_size, 3, 32, 32), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibrate", nargs=2, default=["small_cnn", "resnet20"])
    parser.add_argument("--predict", default="resnet32")
    parser.add_argument("--devices", default=str(Path(__file__).parents[1] / "examples" / "cxl.toml"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    topology = Topology.read(Path(args.devices))
    models = [*args.calibrate, args.predict]
    networks = {model: placed(model, topology, args.batch_size) for model in models}
    samples = [s for model in args.calibrate for s in node_by_node(model, networks[model], repeats=20)]
    link = measured_link()
    steps: dict[str, list[float]] = {model: [] for model in models}
    for number in range(args.rounds):
        for model in models:
            with tempfile.TemporaryDirectory() as folder:
                steps[model].append(measured_step(model, args, Path(folder)))
            print(f"round {number + 1}: {model} {1e3 * steps[model][-1]:.1f} ms", file=sys.stderr)
    measured = {model: statistics.median(found) for model, found in steps.items()}
    own = CalibratedTimes.fitted(samples, link.bytes_per_s)
    times = own.calibrated([(networks[model], measured[model]) for model in args.calibrate])
    print(
        f"messages: {1e6 * times.message_s:.0f} us and {times.bytes_per_s / 1e9:.2f} GB/s; operations: "
        f"{times.slowdown:.2f} times as long as in one process"
    )
    for model in models:
        predicted, what = times.step(networks[model]), "calibration" if model in args.calibrate else "predicted"
        error = predicted / measured[model] - 1
        print(
            f"{model}: {what}; modelled {1e3 * predicted:.1f} ms, measured {1e3 * measured[model]:.1f} ms (median of "
            f"{args.rounds}, {1e3 * min(steps[model]):.1f} to {1e3 * max(steps[model]):.1f}), error {error:+.1%}"
        )


if __name__ == "__main__":
    main()
