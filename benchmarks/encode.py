"""Measure the time of encoding and decoding, in units of `r += g`, with fast loops and on the reference path.

Encoding is the work of a training step before sending: the residual is added, entries are chosen or rounded, the
payload is packed, and the remainder stays in the residual; all buffers are kept between steps. Decoding is the work
after an all-gather: four messages with one percent of the entries each are read, and their mean is written to the
update. Also measured are torch's own calls for the same selection, zeroing the update, and the lower bound `r += g`.
All are interleaved on one thread. A figure is the median over rounds of that thread's CPU seconds, on which other work
on the machine has little effect, or on a GPU of the seconds until its queue is empty; a ratio is one of medians:

    python benchmarks/encode.py [NAME ...] [--numel 11000000] [--rounds 15] [--out results/reference/encode.csv]
    python benchmarks/encode.py --model resnet18   # encoding its layers, in one bucket, instead of one layer
    python benchmarks/encode.py --device cuda
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.core import spec
from bench.core.environment import origin_columns
from bench.launch.jobs.fork_server import KEEP_MEMORY
from collectives.base import Key, PendingSum
from collectives.kernels.library import found, kernels_in_use, serving
from collectives.options import build, component_names
from collectives.payloads.base import Payload, unpack
from collectives.payloads.bundle import UnreducedSum
from collectives.transport.base import SingleRank
from compressors.base import Compressor, PerLayer
from compressors.layer import Layer, Step, layers_of
from gradwire.exchange.reducer import reducer_for
from gradwire.exchange.report import Bucket

FLOOR = "r += g"
GROUP_SIZE = 1024
RATIO = 0.01
RANKS = 4
DECODED = ("group_topk", "int8", "natural", "qsgd", "topk")
ZEROED = "zero the update"
OPTIONS = {  # one percent of the entries, at full compression from the first step
    "group_topk": f"ratio={RATIO},group_size={GROUP_SIZE},values=floats,warmup_epochs=0",
    "topk": f"ratio={RATIO},warmup_epochs=0",
    "qsparse": f"ratio={RATIO},warmup_epochs=0",
    "randomk": f"ratio={RATIO},warmup_epochs=0",
    "adaptive_topk": f"ratio={RATIO},warmup_epochs=0",
    "algc": f"ratio={RATIO},warmup_epochs=0",
    "dgc": "warmup_epochs=0",
    "threshold": "threshold=0.6",  # relative to the largest entry; sends 0.2 to 3 percent of the entries
}
WARM_UP = 12
"""Uncounted rounds, in which allocators fill and residuals, and thresholds that follow them, become stationary."""

Way = Callable[[torch.Tensor], float]
"""A measured operation: takes a gradient and returns the seconds that it took."""


def seconds_of(x: torch.Tensor) -> float:
    """Return this thread's CPU time or, if `x` lies on a GPU, the time at which the GPU's queue is empty."""
    if not x.is_cuda:
        return time.thread_time()
    torch.cuda.synchronize(x.device)
    return time.perf_counter()


class Encoder:
    """Run a compressor as a training step does, from the gradient to the packed message."""

    def __init__(self, compressor: Compressor, layers: list[Layer]) -> None:
        self.reducer = reducer_for(compressor, momentum=0.9)
        self.layers = layers
        self.index = 0

    def __call__(self, gradient: torch.Tensor) -> float:
        step = Step(index=self.index, epoch=0, rank=0, world_size=1, seed=1)
        gradients = list(gradient.split([layer.numel for layer in self.layers]))
        bucket = Bucket(layers=self.layers, gradients=gradients, step=step)
        started = seconds_of(gradient)
        pending = self.reducer.start(bucket, packed, SingleRank(gradient.device))
        seconds = seconds_of(gradient) - started
        pending.finish()
        self.reducer.commit()
        self.index += 1
        return seconds


def one_layer(numel: int) -> list[Layer]:
    """Return one matrix layer of `numel` elements, as close to square as possible."""
    side = next(side for side in range(int(numel**0.5), 0, -1) if numel % side == 0)
    return [Layer(id=0, name="gradient", shape=(numel // side, side), kind="linear", numel=numel, position=0.5)]


def packed(payload: Payload, key: Key) -> PendingSum:
    """Pack the payload, as a collective does before it sends."""
    payload.pack()
    return PendingSum.done(payload)


class Decoder:
    """Compute the update from the messages of several ranks: the second half of a training step's exchange."""

    def __init__(self, compressor: Compressor, numel: int, device: str) -> None:
        self.reducer = reducer_for(compressor)
        self.layer = Layer(id=0, name="gradient", shape=(numel,), kind="linear", numel=numel, position=0.5)
        self.update = torch.empty(numel, device=device)
        gradients = gradients_like_training(numel, RANKS, device)
        self.messages = [
            compressor.encode(gradient, self.layer, self._step(rank)).pack() for rank, gradient in enumerate(gradients)
        ]

    def __call__(self, gradient: torch.Tensor) -> float:
        bucket = Bucket(layers=[self.layer], gradients=[self.update], step=self._step(0))
        started = seconds_of(gradient)
        self.reducer.finish_bucket(UnreducedSum([unpack(message) for message in self.messages]), bucket)
        return seconds_of(gradient) - started

    def _step(self, rank: int) -> Step:
        return Step(index=0, epoch=0, rank=rank, world_size=RANKS, seed=1)


def on(path: str, way: Way) -> Way:
    """Return the operation, run with native loops or on the reference path."""

    def run(gradient: torch.Tensor) -> float:
        with serving("reference") if path == "reference" else contextlib.nullcontext():
            return way(gradient)

    return run


def timed(work: Callable[[torch.Tensor], object]) -> Way:
    """Return an operation that measures the CPU seconds of a plain call."""

    def run(x: torch.Tensor) -> float:
        started = seconds_of(x)
        work(x)
        return seconds_of(x) - started

    return run


def gradients_like_training(numel: int, count: int, device: str) -> list[torch.Tensor]:
    """Return gradients with heavy-tailed noise around a common mean, fp32 [numel] each on `device`."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(numel, generator=generator)
    noises = (torch.randn(numel, generator=generator) for _ in range(count))
    return [(0.3 * mean + noise * noise.abs()).to(device) for noise in noises]


def ways_of(names: list[str], paths: Sequence[str], layers: list[Layer], device: str) -> dict[tuple[str, str], Way]:
    """Return the measured operations: (compressor or call, path) -> operation."""
    numel = sum(layer.numel for layer in layers)
    whole = numel - numel % GROUP_SIZE
    residual, update = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    ways: dict[tuple[str, str], Way] = {
        (FLOOR, ""): timed(residual.add_),
        (ZEROED, "torch"): timed(lambda _: update.zero_()),
        ("top-k of groups", "torch"): timed(lambda x: x[:whole].view(-1, GROUP_SIZE).abs().topk(10)),
        ("top-k", "torch"): timed(lambda x: x.abs().topk(int(RATIO * numel))),
        ("to fp16", "torch"): timed(lambda x: x.half()),
        ("sign", "torch"): timed(torch.sign),
    }
    for name in names:
        for path in paths:
            text = f"{name}:{OPTIONS[name]}" if name in OPTIONS else name
            compressor = build("compressors", Compressor, text)
            ways[name, path] = on(path, Encoder(compressor, layers))
            if name in DECODED:
                ways[f"decode {RANKS} {name}", path] = on(path, Decoder(compressor, numel, device))
    return ways


def measure(ways: dict[tuple[str, str], Way], numel: int, rounds: int, device: str) -> dict[tuple[str, str], float]:
    """Return the median seconds of each operation.

    An operation overwrites its gradient, so each gets a copy, which is written one operation earlier, so that it is no
    longer in the caches.
    """
    gradients = gradients_like_training(numel, 6, device)
    gradient, following = gradients[0].clone(), gradients[0].clone()
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in ways}
    for number in range(-WARM_UP, rounds):
        for key, way in ways.items():
            gradient, following = following, gradient.copy_(gradients[number % len(gradients)])
            taken = way(gradient)
            if number >= 0:
                seconds[key].append(taken)
    return {key: statistics.median(values) for key, values in seconds.items()}


def encoders() -> list[str]:
    """Return the names of the compressors that encode each layer in one step."""
    built = {name: build("compressors", Compressor, name) for name in component_names("compressors", Compressor)}
    return [name for name, made in built.items() if isinstance(made, PerLayer)]


def keep_memory() -> None:
    """Restart the process with a rank's settings of glibc's allocator, which glibc reads only at the start."""
    if not KEEP_MEMORY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], KEEP_MEMORY | os.environ)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--numel", type=int, default=11_000_000, help="elements of one layer")
    size.add_argument("--model", help="encode the layers of this model instead")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--native", action="store_true", help="omit the reference path, which takes minutes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    device = options.device
    paths = list(dict.fromkeys([kernels_in_use(device), "reference"]))[: 1 if options.native else 2]
    layers = layers_of(spec.build("models", options.model).build(10)) if options.model else one_layer(options.numel)
    numel = sum(layer.numel for layer in layers)
    medians = measure(ways_of(options.names or encoders(), paths, layers, device), numel, options.rounds, device)
    floor = medians[FLOOR, ""]
    loops = "Triton" if paths[0] == "triton" else found().finding
    title = f"{numel:,} elements in {len(layers)} layers, loops {loops}, load {load:.1f}"
    table = Table("operation", "path", "ms", f"{FLOOR} times", title=title)
    origin = {
        **origin_columns(device),
        "loops": loops,
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load": load,
        "numel": numel,
        "layers": len(layers),
        "rounds": options.rounds,
    }
    rows = []
    for (name, path), seconds in medians.items():
        table.add_row(name, path, f"{seconds * 1e3:.2f}", f"{seconds / floor:.2f}")
        rows.append({"name": name, "path": path, "seconds": seconds, "of_floor": seconds / floor, **origin})
    Console().print(table)
    if options.out:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
