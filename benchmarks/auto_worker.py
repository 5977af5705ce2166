"""A rank that lets ways to exchange gradients take turns in one process: `python -m benchmarks.auto_worker FOLDER`.

Each way trains a model of its own, and while one does, the others wait. What blocks of steps took is said in
`progress.jsonl`.
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
from bench.core.config.job import RanksConfig
from bench.core.config.run import RunConfig
from bench.core.errors import BenchError
from bench.core.run_folder import RunFolder, append_json_line
from bench.datasets.base import ImageSet
from bench.strategies.ddp.ddp import Ddp, wrap
from bench.train.data import Batches
from bench.train.rank import end_process, process_group, rank_main, set_up_device
from compressors.auto.compressor import ChoosingHook
from compressors.ddp.attach import attach

LR, MOMENTUM = 0.02, 0.9
SETTLING = 2
"""steps that begin a block and are not counted: windows of connections and caches belong to the way before"""
BURST_S = 0.5
"""after which rank 0 looks whether the block is over"""
MOST_STEPS_OF_CHOICE = 400
PAIRED_TURNS = 9
"""of one of those to be paired, even if it is far behind"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnsConfig(RanksConfig):
    """What takes turns.

    Attributes:
        ways: by name, (compressor, collective); equal ways may have several names.
        paired: the names of those that are held against each other turn by turn.
        far_behind, turns_far_behind: times the fastest, from which a way has only so many turns.
        block_s: at least so many seconds of steps make a block.
        chooses_first: ways that choose do so before the first turn; false: in their turns.
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
    """One way at work on this rank."""

    def __init__(self, way: tuple[str, str], config: TurnsConfig, dataset: Any, train: ImageSet) -> None:
        torch.manual_seed(config.seed)
        device = torch.device("cpu")
        model = spec.build("models", config.model).build(dataset.num_classes)
        megabytes = sum(p.numel() for p in model.parameters()) * 4 / 2**20
        bucket_mb = Ddp().default_bucket_mb(
            megabytes, spec.build("optimizers", "sgd"), spec.build("compressors", "auto")
        )
        self._ddp = wrap(model, device, bucket_mb or megabytes)
        self._hook = attach(self._ddp, *way, seed=config.seed, timeout_s=config.timeout_s)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        of_run = RunConfig(batch_size=config.batch_size, augment=False, seed=config.seed, replicas=config.world_size)
        self._batches = Batches(of_run, dataset, train, dist.get_rank(), device)
        self.step_s = 0.0  # of its last block
        self._held: Counter[str] = Counter()  # steps by pair, of a way that chooses

    @property
    def chosen(self) -> str:
        """What was chosen, of a way that does; empty where nothing is yet, or never."""
        if not isinstance(self._hook, ChoosingHook):
            return ""
        choice = self._hook.reducer.choice  # type: ignore[attr-defined]
        return choice.summary(self._hook.layers) if any("after " in part.why for part in choice.parts) else ""

    def held(self) -> str:
        """The share of the steps since the last call in which most elements went through each pair; empty as above."""
        steps, self._held = self._held, Counter()
        return ", ".join(f"{pair} {count / steps.total():.0%}" for pair, count in steps.most_common())

    @staticmethod
    def _main_pair(hook: ChoosingHook) -> str:
        numel = {layer.id: layer.numel for layer in hook.layers}
        parts = hook.reducer.choice.parts  # type: ignore[attr-defined]
        return str(max(parts, key=lambda part: sum(numel[layer_id] for layer_id in part.layers)).pair)

    @property
    def must_choose(self) -> bool:
        """Whether it still tries what to choose for the first time."""
        return isinstance(self._hook, ChoosingHook) and not self.chosen

    def end_pause(self) -> None:
        """What went on meanwhile is no part of its next step."""
        self._hook.end_pause()

    def steps(self, count: int) -> float:
        """Make so many; seconds."""
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
    """All turns, in an order that rotates."""
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
    """Those in which buckets are agreed on and, of a way that chooses, pairs tried."""
    trainee.end_pause()
    steps, seconds = SETTLING, trainee.steps(SETTLING)
    trainee.step_s = seconds / SETTLING
    while chooses and agreed(int(trainee.must_choose and steps < MOST_STEPS_OF_CHOICE)):
        steps, seconds = steps + 1, seconds + trainee.steps(1)
    return {"steps": steps, "seconds": seconds}


def block(trainee: Trainee, config: TurnsConfig) -> dict[str, Any]:
    """Steps until the time is up."""
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
    """What rank 0 says."""
    told = torch.tensor([number])
    dist.broadcast(told, 0)
    return int(told)


def tell(folder: RunFolder, trainee: Trainee, name: str, **figures: Any) -> None:
    if dist.get_rank() == 0:
        append_json_line(folder.progress, {"method": name, **figures, "chosen": trainee.chosen, "held": trainee.held()})


main: Callable[[str], int] = rank_main(TurnsConfig, run, (BenchError,))

if __name__ == "__main__":
    end_process(main(sys.argv[1]))
