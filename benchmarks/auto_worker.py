"""A rank that interleaves several methods of exchanging gradients in one process.

`python -m benchmarks.auto_worker FOLDER`: each method trains a model of its own while the others wait. The duration of
each block of steps is written to `progress.jsonl`.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.core import spec
from bench.core.config.run import RanksConfig, RunConfig
from bench.core.errors import BenchError
from bench.core.run_folder import RunFolder, append_json_line
from bench.datasets.base import Samples
from bench.rank import partition
from bench.rank.data import Batches
from bench.rank.process import end_process, process_group, rank_main, set_up_device
from bench.strategies.ddp import wrap
from compressors.auto.compressor import ChoosingHook
from compressors.layer import layers_of
from gradwire.ddp.attach import attach
from gradwire.ddp.buckets import bucket_size

LR, MOMENTUM = 0.02, 0.9
SETTLING = 2
"""Uncounted steps at the start of a block, in which connection windows and caches still hold the previous method's
state."""
BURST_S = 0.5
"""Time in seconds after which rank 0 checks whether the block is over."""
MOST_STEPS_OF_CHOICE = 400
PAIRED_TURNS = 9
"""Number of rounds of a paired method, even if it is far behind."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnsConfig(RanksConfig):
    """The methods that are interleaved, and their training.

    Attributes:
        ways: name -> (compressor, collective); equal methods may have several names.
        paired: names of the methods that are compared round by round.
        turns: number of rounds.
        far_behind: a method counts as far behind if its step takes more than this many times the fastest one.
        turns_far_behind: number of rounds in which a method takes part even if it is far behind.
        block_s: shortest duration of a block in seconds.
        chooses_first: True: `auto` makes its first choice before the first round; False: during the rounds.
    """

    ways: dict[str, Any]
    paired: list[str]
    model: str
    dataset: str
    batch_size: int
    train_size: int | None
    turns: int
    far_behind: float
    turns_far_behind: int
    block_s: float
    chooses_first: bool


class Trainee:
    """One method, with the model that it trains on this rank."""

    def __init__(self, way: tuple[str, str], config: TurnsConfig, dataset: Any, train: Samples) -> None:
        torch.manual_seed(config.seed)
        device = torch.device("cpu")
        model = spec.build("models", config.model).build(dataset.num_classes)
        self._ddp = wrap(model, device, bucket_size(layers_of(model)))
        self._hook = attach(self._ddp, *way, seed=config.seed, timeout_s=config.timeout_s)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        of_run = RunConfig(batch_size=config.batch_size, augment=False, seed=config.seed, replicas=config.world_size)
        shards = partition.iid(len(train), config.world_size, config.seed)
        self._batches = Batches(of_run, dataset, train, shards, dist.get_rank(), device)
        self.step_s = 0.0  # mean step time of its last block
        self._held: Counter[str] = Counter()  # pair -> steps, if the method chooses pairs

    @property
    def chosen(self) -> str:
        """The chosen pairs; empty before the first choice, and for methods that do not choose."""
        if not isinstance(self._hook, ChoosingHook):
            return ""
        choice = self._hook.reducer.choice  # type: ignore[attr-defined]
        return choice.summary(self._hook.layers) if any("after " in part.why for part in choice.parts) else ""

    def held(self) -> str:
        """Return, for each pair, the share of the steps since the last call in which it carried the most elements.

        The result is empty for methods that do not choose.
        """
        steps, self._held = self._held, Counter()
        return ", ".join(f"{pair} {count / steps.total():.0%}" for pair, count in steps.most_common())

    @staticmethod
    def _main_pair(hook: ChoosingHook) -> str:
        numel = {layer.id: layer.numel for layer in hook.layers}
        parts = hook.reducer.choice.parts  # type: ignore[attr-defined]
        return str(max(parts, key=lambda part: sum(numel[layer_id] for layer_id in part.layers)).pair)

    @property
    def must_choose(self) -> bool:
        """True while the method has not yet made its first choice."""
        return isinstance(self._hook, ChoosingHook) and not self.chosen

    def end_pause(self) -> None:
        """Leave the time since the last step out of the hook's measurement of the next step."""
        self._hook.end_pause()

    def steps(self, count: int) -> float:
        """Train `count` steps, and return the seconds that they took."""
        started = time.perf_counter()
        for _ in range(count):
            x, y = next(self._batches)
            torch.nn.functional.cross_entropy(self._ddp(x), y).backward()
            if self._hook.step_ok():
                self._optimizer.step()
            self._optimizer.zero_grad()
            if isinstance(self._hook, ChoosingHook):
                self._held[self._main_pair(self._hook)] += 1
        return time.perf_counter() - started

    def close(self) -> None:
        self._hook.close()


def run(config: TurnsConfig, folder: RunFolder) -> None:
    """Run all rounds; the order of the methods rotates from round to round."""
    with process_group(set_up_device("cpu", config.threads), config.timeout_s):
        dataset = spec.build("datasets", config.dataset)
        train, _ = dataset.load(Path("data"), seed=config.seed, train_size=config.train_size, test_size=None)
        trainees = {name: Trainee(tuple(way), config, dataset, train) for name, way in config.ways.items()}
        names = list(trainees)
        for name in names:
            first = make_first_steps(trainees[name], chooses=config.chooses_first)
            tell(folder, trainees[name], name, turn=-1, **first)
        for turn in range(config.turns):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                fastest_s = min(trainee.step_s for trainee in trainees.values())
                is_far_behind = trainees[name].step_s > config.far_behind * fastest_s
                enough = PAIRED_TURNS if name in config.paired else config.turns_far_behind
                if agreed(int(turn < enough or not is_far_behind)):
                    tell(folder, trainees[name], name, turn=turn, **block(trainees[name], config))
        for trainee in trainees.values():
            trainee.close()


def make_first_steps(trainee: Trainee, *, chooses: bool) -> dict[str, Any]:
    """Train the first steps, in which DDP fixes its buckets and, if `chooses`, `auto` tries pairs."""
    trainee.end_pause()
    steps, seconds = SETTLING, trainee.steps(SETTLING)
    trainee.step_s = seconds / SETTLING
    while chooses and agreed(int(trainee.must_choose and steps < MOST_STEPS_OF_CHOICE)):
        steps, seconds = steps + 1, seconds + trainee.steps(1)
    return {"steps": steps, "seconds": seconds}


def block(trainee: Trainee, config: TurnsConfig) -> dict[str, Any]:
    """Train steps for `block_s` seconds, and return their number and time."""
    begun = time.perf_counter()
    trainee.end_pause()
    trainee.steps(agreed(SETTLING if trainee.step_s < config.block_s else 0))
    steps, seconds = 0, 0.0

    def next_steps() -> int:
        rest_s = config.block_s - (time.perf_counter() - begun)
        return max(1, round(min(BURST_S, rest_s) / trainee.step_s)) if rest_s > 0 or not steps else 0

    while count := agreed(next_steps()):
        steps, seconds = steps + count, seconds + trainee.steps(count)
        trainee.step_s = seconds / steps
    return {"steps": steps, "seconds": seconds}


def agreed(number: int) -> int:
    """Return rank 0's number on all ranks."""
    told = torch.tensor([number])
    dist.broadcast(told, 0)
    return int(told)


def tell(folder: RunFolder, trainee: Trainee, name: str, **figures: Any) -> None:
    if dist.get_rank() == 0:
        append_json_line(folder.progress, {"method": name, **figures, "chosen": trainee.chosen, "held": trainee.held()})


main: Callable[[str], int] = rank_main(TurnsConfig, run, (BenchError,))

if __name__ == "__main__":
    end_process(main(sys.argv[1]))
