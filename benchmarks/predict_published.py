"""Predict speed-ups that other authors published from the links and models that they name, and compare both.

    python benchmarks/predict_published.py --out results/reference/predict-published.csv

The publications do not say how much of an exchange overlapped with the backward pass, so a prediction is a range from
no overlap to full overlap. Nor do they say how long encoding took, so it is left out. For GRACE there is a second
prediction with an encoding time derived from its runs at 25 Gbit/s.

GRACE: ResNet-50 on 8 nodes with one V100 each; images per second, and the bytes that a method sends. The batch size is
not stated. Among the powers of two, only with 128 samples per node do dense sums at 1 Gbit/s fit into the step's time
and leave little of it unexplained. Xu et al., "GRACE: A Compressed Communication Framework for Distributed Machine
Learning" (ICDCS 2021), data at github.com/sands-lab/grace-data, commit 41915bbd, `imagenet-classification`, mode
throughput, Open MPI.

DGC: AlexNet on 64 nodes; 30 times the speed of one node with dense gradients at 10 Gbit/s, and "more than 40" times
with DGC at 1 Gbit/s, both by the authors' own model. The computing time of a node is not stated; it is derived from the
first figure. Lin et al., "Deep Gradient Compression" (ICLR 2018), section 5 and table 3.

PowerSGD: ResNet-18 on 16 GPUs at 10 Gbit/s; milliseconds per step. Vogels, Karimireddy, Jaggi, "PowerSGD" (NeurIPS
2019). The figures are from memory and were not checked against the paper; the rows say so. Two GPUs shared a machine;
a ring uses a machine's link once, just as with one GPU per machine.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
from pathlib import Path

import numpy as np
import torch

from bench.extensions.predict.calibration import FP32_BYTES
from bench.extensions.predict.flows import Flows
from bench.extensions.predict.links import Links
from bench.extensions.predict.request import ACK_SHARE, FRAME_PER_PAYLOAD
from bench.models.base import Model
from bench.models.resnet import ResNet18, ResNet50
from collectives import options
from collectives.base import Collective
from collectives.schedule.rounds import Layout
from collectives.schedule.waves import Ints, Lengths, waves_of

NODES, BATCH = 8, 128
GRACE = "GRACE, Xu et al. 2021"
ALONE_IMAGES_PER_S = 409.4513
DENSE_IMAGES_PER_S = {1: 594.7712, 10: 2200.5328, 25: 2350.8472}
"""Rate of the links in Gbit/s -> images per second of all nodes with dense gradients."""
AGREES = 0.15
ENCODING_FROM = 25
"""Rate in Gbit/s at which sums take the least time, from which the encoding time is derived."""


@dataclasses.dataclass(frozen=True)
class Method:
    """The published data of a method.

    Attributes:
        name: name of the method, with its density.
        collective: the collective that it uses.
        bytes_per_element: bytes that each node sends per element of the gradient, taken from the runs of ResNet-20.
        images_per_s: rate of the links in Gbit/s -> images per second of all nodes.
    """

    name: str
    collective: str
    bytes_per_element: float
    images_per_s: dict[int, float]


METHODS = (
    Method("randomk 1 %", "ring", 0.04, {1: 2866.5056, 10: 2968.3864, 25: 2965.8600}),
    Method("randomk 10 %", "ring", 0.4, {1: 2018.5760, 10: 2794.0224, 25: 2809.5472}),
    Method("randomk 50 %", "ring", 2.0, {1: 973.7168, 10: 2444.9592, 25: 2484.2152}),
    Method("topk 1 %", "allgather", 0.08, {1: 1263.1008, 10: 1457.3552, 25: 1459.6232}),
    Method("topk 10 %", "allgather", 0.8, {1: 514.3704, 10: 1174.4424, 25: 1193.5416}),
    Method("topk 50 %", "allgather", 4.0, {1: 135.9800, 10: 584.6440, 25: 611.0984}),
    Method("dgc 1 %", "allgather", 0.088, {1: 1690.2327, 10: 1030.9944, 25: 1084.5352}),
    Method("signsgd", "allgather", 1.0, {1: 766.4000, 10: 1631.1648, 25: 1660.8040}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = table()
    with arguments.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for each in rows:
        print(*each.values(), sep="  ")


def table() -> list[dict[str, object]]:
    """Return the rows of all methods at all rates."""
    grace = [row(method, gbit) for method in METHODS for gbit in method.images_per_s]
    return grace + dgc_rows() + powersgd_rows()


def dgc_rows() -> list[dict[str, object]]:
    """Return the row of AlexNet; the computing time is derived from dense gradients at ten times the rate."""
    num_nodes, dense_nbytes, own_nbytes, dense_speedup, own_speedup = 64, 232.56e6, 0.39e6, 30, 40
    dense_s, own_s = sum_s("ring", dense_nbytes, 10, num_nodes), sum_s("allgather", own_nbytes, 1, num_nodes)
    exposed_s = dense_s * dense_speedup / (num_nodes - dense_speedup)
    hidden_s = dense_s * dense_speedup / num_nodes
    predicted = sorted((num_nodes * exposed_s / (exposed_s + own_s), num_nodes * hidden_s / max(hidden_s, own_s)))
    method = {"source": "DGC, Lin et al. 2018", "method": "dgc 0.1 %", "collective": "allgather", "gbit_per_s": 1}
    return [without_encoding(method | {"over": "one node"}, own_speedup, (predicted[0], predicted[1]))]


def powersgd_rows() -> list[dict[str, object]]:
    """Return the rows of ResNet-18; the computing time is the dense step without its sum."""
    num_nodes, gbit, dense_step_s = 16, 10, 0.312
    numel = num_parameters(ResNet18(), 10)
    dense_s = sum_s("ring", FP32_BYTES * numel, gbit, num_nodes)
    rows = []
    for rank, less, step_s in ((1, 243, 0.229), (2, 136, 0.239), (4, 72, 0.260)):
        own_s = sum_s("ring", FP32_BYTES * numel / less, gbit, num_nodes)
        predicted = (1.0, dense_step_s / (dense_step_s - dense_s + own_s))
        method = {"source": "PowerSGD, Vogels et al. 2019, not checked", "method": f"powersgd rank {rank}"}
        method |= {"collective": "ring", "gbit_per_s": gbit, "over": "dense gradients"}
        rows.append(without_encoding(method, dense_step_s / step_s, predicted))
    return rows


def without_encoding(method: dict[str, object], published: float, predicted: tuple[float, float]) -> dict[str, object]:
    """Return a row of a method whose encoding time is unknown."""
    return {
        **method,
        "published_images_per_s": None,
        "published_speedup": round(published, 2),
        "without_encoding_least": round(predicted[0], 2),
        "without_encoding_most": round(predicted[1], 2),
        "without_encoding": verdict(published, predicted),
        "with_encoding_least": None,
        "with_encoding_most": None,
        "with_encoding": None,
    }


def row(method: Method, gbit: int) -> dict[str, object]:
    """Return a method's row: published and predicted speed-up over dense gradients, and whether they agree."""
    published = method.images_per_s[gbit] / DENSE_IMAGES_PER_S[gbit]
    bare = speedups(method, gbit, (0.0, 0.0))
    whole = speedups(method, gbit, encoding(method)) if gbit != ENCODING_FROM else None
    return {
        "source": GRACE,
        "method": method.name,
        "collective": method.collective,
        "gbit_per_s": gbit,
        "over": "dense gradients",
        "published_images_per_s": round(method.images_per_s[gbit], 1),
        "published_speedup": round(published, 2),
        "without_encoding_least": round(bare[0], 2),
        "without_encoding_most": round(bare[1], 2),
        "without_encoding": verdict(published, bare),
        "with_encoding_least": round(whole[0], 2) if whole else None,
        "with_encoding_most": round(whole[1], 2) if whole else None,
        "with_encoding": verdict(published, whole) if whole else None,
    }


def encoding(method: Method) -> tuple[float, float]:
    """Return the seconds left for encoding and decoding on the fastest links, with exposed and with hidden sums."""
    step_s = NODES * BATCH / method.images_per_s[ENCODING_FROM]
    exposed_s, hidden_s = steps(method.collective, method.bytes_per_element, ENCODING_FROM)
    return max(0.0, step_s - exposed_s), max(0.0, step_s - hidden_s)


def speedups(method: Method, gbit: int, encoding_s: tuple[float, float]) -> tuple[float, float]:
    """Return the smallest and the largest speed-up over dense gradients."""
    dense, own = steps("ring", FP32_BYTES, gbit), steps(method.collective, method.bytes_per_element, gbit)
    least, most = sorted(d / (o + more) for d, o, more in zip(dense, own, encoding_s, strict=True))
    return least, most


def steps(collective: str, bytes_per_element: float, gbit: int) -> tuple[float, float]:
    """Return the seconds of a step without encoding: with exposed sums, and with the most overlap possible."""
    nbytes = num_parameters(ResNet50(), 1000) * bytes_per_element
    compute_s, own_s = BATCH / ALONE_IMAGES_PER_S, sum_s(collective, nbytes, gbit, NODES)
    return compute_s + own_s, max(compute_s, own_s)


def verdict(published: float, predicted: tuple[float, float]) -> str:
    """Return whether the published speed-up agrees with the predicted range, to within 15 %."""
    if published < predicted[0] / (1 + AGREES):
        return "slower than predicted"
    return "faster than predicted" if published > predicted[1] * (1 + AGREES) else "agrees"


def num_parameters(model: Model, num_classes: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model.build(num_classes).parameters())


def sum_s(collective: str, nbytes: float, gbit: int, num_nodes: int) -> float:
    """Return the seconds of one sum of `nbytes` bytes per node."""

    def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
        return np.ones_like(start), FP32_BYTES * (stop - start)

    rate = np.full(num_nodes, gbit * 1e9 / 8 / FRAME_PER_PAYLOAD)
    flows = Flows(
        Links(
            host_of=np.arange(num_nodes),
            up_rate=rate,
            down_rate=rate,
            latency_s=np.zeros(num_nodes),
            ack_share=ACK_SHARE,
        )
    )
    built = options.build("collectives", Collective, collective)
    layout = Layout.dense(round(nbytes / FP32_BYTES), key=(0,))
    waves = waves_of(built, num_nodes, layout, Lengths(packed))
    flows.run(waves or ())
    return float(flows.ready.max())


if __name__ == "__main__":
    main()
