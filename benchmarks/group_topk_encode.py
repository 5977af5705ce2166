"""What group_topk's encoding costs beside the top-k calls of torch that it replaces, on one thread.

Encoding is everything that a training step pays for: the residual is added, the entries are chosen, the payload is
packed and the rest is left in the residual, on the buffers that stay between steps. Compared are torch's top-k per
group and torch's top-k of the whole gradient. The three take turns; a figure is the median over rounds:

    python benchmarks/group_topk_encode.py [--numel 11000000] [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from compressors.ddp.bucket import Bucket
from compressors.ddp.reducer import Reducer
from compressors.group_topk import GroupTopK
from compressors.layer import Layer, Step

GROUP_SIZE = 1024
RATIO = 0.01
MOST_OF_GROUPS = 1.3
MOST_OF_WHOLE = 0.25


class Encoder:
    """group_topk with error feedback, as a training step runs it."""

    def __init__(self, numel: int) -> None:
        self.reducer = Reducer(GroupTopK(ratio=RATIO, group_size=GROUP_SIZE, warmup_epochs=0))
        self.layer = Layer(id=0, name="gradient", shape=(numel,), numel=numel)
        self.index = 0

    def seconds(self, gradient: torch.Tensor) -> float:
        """From the gradient to the packed payload."""
        step = Step(index=self.index, epoch=0, rank=0, world_size=1, seed=1)
        bucket = Bucket(layers=[self.layer], gradients=[gradient.clone()], step=step)
        started = time.perf_counter()
        message = self.reducer.message(bucket)
        assert message is not None
        message.pack()
        seconds = time.perf_counter() - started
        self.reducer.commit()
        self.index += 1
        return seconds


def gradients_like_training(numel: int, count: int) -> list[torch.Tensor]:
    """Heavy-tailed noise around a mean that stays, fp32 [numel] each."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(numel, generator=generator)
    noises = (torch.randn(numel, generator=generator) for _ in range(count))
    return [0.3 * mean + noise * noise.abs() for noise in noises]


def seconds_of(work: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    started = time.perf_counter()
    work(x)
    return time.perf_counter() - started


def measure(numel: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round by name."""
    gradients = gradients_like_training(numel, 3)
    whole = numel - numel % GROUP_SIZE
    encoder = Encoder(numel)
    ways: dict[str, Callable[[torch.Tensor], float]] = {
        "group_topk": encoder.seconds,
        "top-k of groups": partial(seconds_of, lambda x: x[:whole].view(-1, GROUP_SIZE).abs().topk(10)),
        "top-k of all": partial(seconds_of, lambda x: x.abs().topk(numel // 100)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-3, rounds):  # the first rounds fill allocators and the residual's buffers
        for name, way in ways.items():
            taken = way(gradients[number % len(gradients)])
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--numel", type=int, default=11_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.numel:,} elements, {RATIO:.0%}, groups of {GROUP_SIZE}, one thread, "
          f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")  # fmt: skip
    seconds = measure(options.numel, options.rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name:16} {medians[name] * 1e3:7.1f} ms   ({min(values) * 1e3:.1f} to {max(values) * 1e3:.1f})")
    met = True
    for name, most in (("top-k of groups", MOST_OF_GROUPS), ("top-k of all", MOST_OF_WHOLE)):
        ratio = medians["group_topk"] / medians[name]
        met &= ratio <= most
        print(f"group_topk / {name}: {ratio:.2f} (at most {most:g})")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
