"""Measure time and memory of simulating the sums of one step of ResNet-50 among thousands of uneven nodes.

    python benchmarks/predict_scale.py --out results/reference/predict-scale.csv

Every collective is simulated with 4096 nodes, and three with 10000, each in a process of its own. The time excludes
importing torch; the memory before the simulation has its own column.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from bench.extensions.predict.flows import Flows
from bench.extensions.predict.links import Links
from bench.models.resnet import ResNet50
from collectives import options
from collectives.base import Collective
from collectives.schedule.rounds import Layout
from collectives.schedule.waves import Ints, Lengths, waves_of
from compressors.layer import layers_of
from gradwire.ddp.buckets import buckets_of

ALL = (
    "ring",
    "halving_doubling",
    "tree",
    "allgather",
    "server",
    "server:placement=sharded",
    "hierarchical",
    "hierarchical:group_size=64,intra=server,inter=tree",
)
LARGEST = ("ring", "tree", "hierarchical")
BUCKET_MB = 25.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--one", nargs=2, metavar=("COLLECTIVE", "NODES"))
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(simulated(arguments.one[0], int(arguments.one[1]))))
        return
    rows = []
    for collective, nodes in [*((name, 4096) for name in ALL), *((name, 10_000) for name in LARGEST)]:
        command = [sys.executable, __file__, "--out", arguments.out, "--one", collective, str(nodes)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(rows[-1])
    with Path(arguments.out).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def simulated(collective: str, nodes: int) -> dict[str, object]:
    """Simulate dense fp32 gradients over uplinks around 50 Mbit/s, downlinks three times as fast, and 10 to 30 ms."""
    rng = np.random.default_rng(0)
    up = rng.lognormal(np.log(50e6 / 8), 0.7, nodes)
    flows = Flows(
        Links(host_of=np.arange(nodes), up_rate=up, down_rate=3 * up, latency_s=rng.uniform(0.01, 0.03, nodes))
    )
    with torch.device("meta"):
        layers = layers_of(ResNet50().build(1000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, cpu = time.perf_counter(), time.process_time()
    for bucket in buckets_of(layers, BUCKET_MB):
        layout = Layout.dense(sum(layer.numel for layer in bucket), key=(0,))
        waves = waves_of(options.build("collectives", Collective, collective), nodes, layout, Lengths(packed))
        flows.run(waves or ())
    return {
        "collective": collective,
        "nodes": nodes,
        "wall_s": round(time.perf_counter() - started, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
        "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "of_it_before_bytes": 1024 * before,
        "messages": int(flows.messages.sum()),
        "sum_s": round(float(flows.ready.max()), 1),
    }


def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
    """Return the messages and bytes of dense payloads with their headers."""
    return np.ones_like(start), 16 + 4 * (stop - start)


if __name__ == "__main__":
    main()
