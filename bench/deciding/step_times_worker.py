"""Worker that times training steps: each rank runs `python -m bench.deciding.step_times_worker FOLDER`.

The worker reads the folder's `config.json`. After every block of measurements, rank 0 appends a line to
`progress.jsonl`.
"""

import dataclasses
import itertools
import math
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.core.errors import BenchError
from bench.core.run_folder import RunFolder, append_json_line
from bench.deciding.step_times import PRECISION, StepTimesConfig
from bench.rank.data import RankData
from bench.rank.process import end_process, process_group, rank_main, training_device
from bench.rank.record import Recorder
from bench.rank.session import components, parts_of
from bench.rank.trainer import Diverged, Trainer
from bench.report.statistics import estimate
from bench.strategies.base import BoundStrategy
from collectives.options import OptionError
from collectives.transport.base import TransportError
from collectives.transport.process_group import gather_json

# A block times at least FEWEST_STEPS steps of each method and level. If these take less than BLOCK_S seconds, it times
# more steps, at most MOST_STEPS. If the steps of a method differ, for example because it does not exchange in every
# step, whole intervals of steps are timed.
FEWEST_STEPS, MOST_STEPS, BLOCK_S = 3, 30, 0.15
FEWEST_BLOCKS = 5


class TimedMethod:
    """One training method with its own model, data and strategy on this rank; all ranks must make the same calls.

    Args:
        config: the complete configuration of a run with the method.
        folder: the job's folder.
        starts: for each level of bytes per step, the index of a training step at which the method sends that much.
        device: the device on which this rank computes.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, starts: list[int], device: torch.device) -> None:
        config = dataclasses.replace(config, eval_every=0.0)  # an evaluation would wait for background sends
        dataset, setup = components(config, device)
        self.strategy: BoundStrategy = spec.build("strategies", config.filled["strategy"]).bind(setup)
        # Number of steps after which the work of the steps repeats, such as the local steps between two exchanges.
        self.interval = math.lcm(self.strategy.interval * setup.compressor.traits.period, setup.optimizer.period)
        # The recorder counts steps and reports progress as in a run, because that takes time too; it writes no rows.
        self._recorder = Recorder(config, folder, self.strategy, time.time())
        self._trainer = Trainer(
            config=config,
            strategy=self.strategy,
            dataset=dataset,
            data=RankData.of(config, dataset, *parts_of(config)),
            recorder=self._recorder,
            device=device,
            save=lambda *_: None,
        )
        self._starts = starts
        self._device = device

    def time_steps(self, level: int, count: int) -> tuple[float, float]:
        """Make `count` training steps; return the mean duration of a step in seconds, and the bytes sent per step."""
        trainer, recorder = self._trainer, self._recorder
        trainer.step = trainer.own_steps = self._starts[level]
        self.strategy.go_to(trainer.step)
        trainer.train_until(trainer.step + 1)  # not timed: another method has just used the processor's caches
        self.strategy.begin_interval()
        sent, trained_s = self._sent_bytes(), recorder.train_time_s
        dist.barrier()
        trainer.train_until(trainer.step + count)
        trainer.times.clear()
        self.strategy.synchronize()  # unfinished sends would slow down the next method
        return (recorder.train_time_s - trained_s) / count, (self._sent_bytes() - sent) / count

    def _sent_bytes(self) -> float:
        return self.strategy.traffic["gradient"].nbytes + self.strategy.traffic["state"].nbytes


def run(config: StepTimesConfig, folder: RunFolder) -> None:
    """Time every method at every level in blocks of random order, until all means are precise or the time is over."""
    device = training_device(config)
    with process_group(device, config.timeout_s):
        methods = [
            TimedMethod(RunConfig(**each), folder, starts, device)
            for each, starts in zip(config.methods, config.starts, strict=True)
        ]
        subjects = [(number, level) for number, starts in enumerate(config.starts) for level in range(len(starts))]
        # Every job has its own random order, because the effect of a common order would not show in their spread.
        order = random.Random(gather_json(random.SystemRandom().getrandbits(32))[0])
        counts = {subject: min(methods[subject[0]].interval, MOST_STEPS) for subject in subjects}
        seconds: dict[tuple[int, int], list[float]] = {subject: [] for subject in subjects}
        began = time.monotonic()
        for block in itertools.count(-1):  # the first block fills buffers and finds out how long steps take
            measured: dict[tuple[int, int], tuple[float, float]] = {}
            for subject in order.sample(subjects, len(subjects)):
                measured[subject] = methods[subject[0]].time_steps(subject[1], counts[subject])
            everyone = gather_json([measured[subject] for subject in subjects])
            if block < 0:
                steps = [math.ceil(BLOCK_S / step_s) for step_s, _ in everyone[0]]
                for subject, wanted in zip(subjects, steps, strict=True):
                    interval = methods[subject[0]].interval
                    counts[subject] = math.ceil(min(max(FEWEST_STEPS, wanted), MOST_STEPS) / interval) * interval
                continue
            entries = []
            for place, subject in enumerate(subjects):
                sent = sum(of_rank[place][1] for of_rank in everyone) / len(everyone)
                seconds[subject].append(everyone[0][place][0])
                entries.append([*subject, everyone[0][place][0], sent])
            if dist.get_rank() == 0:
                append_json_line(folder.progress, {"block": entries})
            is_over = time.monotonic() - began > config.max_s or are_precise(list(seconds.values()))
            if gather_json(is_over)[0]:
                break
        for method in methods:
            method.strategy.close()


def are_precise(of_subjects: list[list[float]]) -> bool:
    """Return True if the half width of every mean's 95 % interval is at most `PRECISION` times the mean.

    Args:
        of_subjects: for each method and level, the mean seconds of a step in each block.
    """
    if len(of_subjects[0]) < FEWEST_BLOCKS:
        return False
    means: list[Any] = [estimate(seconds) for seconds in of_subjects]
    return all(mean.high - mean.mean <= PRECISION * mean.mean for mean in means)


main = rank_main(StepTimesConfig, run, (BenchError, Diverged, OptionError, TransportError))

if __name__ == "__main__":
    end_process(main(sys.argv[1]))
