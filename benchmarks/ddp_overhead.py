"""Measure how much longer a step of `bench run` (none + native) takes than a hand-written DDP loop on the same work.

Both loops train the same model on the same batches in the same processes. They are interleaved, and the printed figure
is the median over rounds of the ratio of their times. The program starts torchrun itself:

    python benchmarks/ddp_overhead.py [--model small_cnn] [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.core.run_folder import RunFolder
from bench.datasets.base import crop_and_flip, normalise
from bench.launch.plan import plan
from bench.rank import data, partition
from bench.rank.data import RankData
from bench.rank.record import Recorder
from bench.rank.trainer import Trainer
from bench.strategies.base import Setup

STEPS_PER_ROUND = 20


class HandWritten:
    """The training loop that a user would write: DDP, SGD, a scheduler, augmentation."""

    def __init__(self, config: RunConfig, dataset, train) -> None:
        torch.manual_seed(config.seed)
        self.config, self.dataset, self.train = config, dataset, train
        self.ddp = DistributedDataParallel(spec.build("models", config.model).build(dataset.num_classes))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=config.lr, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, config.steps)
        self.batches = self._batches()

    def _batches(self):
        config, rank, epoch = self.config, dist.get_rank(), 0
        shard = partition.iid(len(self.train), config.world_size, config.seed)[rank]
        steps = data.steps_per_epoch(len(self.train), config.world_size, config.batch_size)
        while True:
            generator = torch.Generator().manual_seed(epoch)
            order = data.order(shard, seed=config.seed, rank=rank, epoch=epoch)
            for chosen in order.split(config.batch_size)[:steps]:
                pixels = crop_and_flip(self.train.inputs[chosen], generator, flip=self.dataset.mirror)
                yield normalise(pixels, self.dataset.mean, self.dataset.std), self.train.targets[chosen]
            epoch += 1

    def train_steps(self, count: int) -> None:
        for _ in range(count):
            x, y = next(self.batches)
            loss = nn.functional.cross_entropy(self.ddp(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            loss.item()


def seconds(work) -> float:
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


def worker(model: str, rounds: int) -> None:
    steps = STEPS_PER_ROUND * (rounds + 2)
    config = plan(RunConfig(model=model, dataset="synthetic", train_size=4096, test_size=64, steps=steps, threads=1))
    torch.set_num_threads(config.threads)
    dist.init_process_group("gloo")
    dataset = spec.build("datasets", config.dataset)
    train, test = dataset.load(Path(config.data_dir), seed=1, train_size=4096, test_size=64)
    by_hand = HandWritten(config, dataset, train)
    torch.manual_seed(config.seed)
    device = torch.device("cpu")
    network = spec.build("models", config.model).build(dataset.num_classes)
    setup = Setup(
        config=config, model=network, device=device, compressor=spec.build("compressors", "none"),
        collective=spec.build("collectives", "native"), optimizer=spec.build("optimizers", "sgd:momentum=0.9"),
    )  # fmt: skip
    strategy = spec.build("strategies", "ddp").bind(setup)
    with tempfile.TemporaryDirectory() as temporary:
        recorder = Recorder(config, RunFolder(Path(temporary)), strategy, time.time())
        trainer = Trainer(
            config=config, strategy=strategy, dataset=dataset, data=RankData.of(config, dataset, train, test),
            recorder=recorder, device=device, save=lambda *_: None,
        )  # fmt: skip
        ratios = []
        for number in range(rounds + 2):
            pair = {}
            for name in ("by hand", "bench") if number % 2 else ("bench", "by hand"):
                if name == "bench":
                    pair[name] = seconds(lambda: trainer.train_until(trainer.step + STEPS_PER_ROUND))
                else:
                    pair[name] = seconds(lambda: by_hand.train_steps(STEPS_PER_ROUND))
            if number >= 2:  # the first rounds build buckets and fill allocators
                ratios.append(pair["bench"] / pair["by hand"])
                if dist.get_rank() == 0:
                    print(*(f"{k} {v / STEPS_PER_ROUND * 1e3:.2f} ms/step" for k, v in sorted(pair.items())), sep="   ")
    if dist.get_rank() == 0:
        print(f"{model}: bench / by hand = {statistics.median(ratios):.4f} (median of {rounds} rounds, "
              f"{min(ratios):.3f} to {max(ratios):.3f}), 2 ranks, {config.batch_size} samples per rank")  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="small_cnn")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.model, options.rounds)
        return 0
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0", __file__, "--worker", "--model", options.model,
            "--rounds", str(options.rounds)]  # fmt: skip
    return subprocess.run(line, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
