"""The training loop of one rank: steps, evaluations, rows."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from bench.core.config import RunConfig
from bench.datasets.augment import crop_and_flip, normalise
from bench.datasets.base import Dataset, Part
from bench.strategies.base import BoundStrategy
from bench.train import shards
from bench.train.clock import StepTime, StepTimes, TrainingClock
from bench.train.evaluate import evaluate
from bench.train.record import Recorder, Snapshot
from bench.train.schedule import learning_rate
from compressors.ddp.hook import NonFiniteGradient
from compressors.ddp.report import StepReport
from compressors.layer import Step

MAX_SKIPS_IN_A_ROW = 10
# Reading a loss from a GPU waits for it, so losses are looked at once in so many steps there.
LOSS_CHECK_EVERY = {"cpu": 1, "cuda": 20}


class Diverged(RuntimeError):
    """The loss is no longer a number, or gradients stay non-finite; one sentence for the user."""


@dataclasses.dataclass(kw_only=True)
class Trainer:
    """Everything one rank needs to train; `run` does it.

    Attributes:
        strategy: exchanges what the ranks computed and updates the model.
        dataset, train, test: the data, whole on every rank.
        recorder: writes rows and progress (on rank 0).
        profiler: records a Chrome trace, where asked for.
    """

    config: RunConfig
    strategy: BoundStrategy
    dataset: Dataset
    train: Part
    test: Part
    recorder: Recorder
    device: torch.device
    profiler: torch.profiler.profile | None = None

    def __post_init__(self) -> None:
        config = self.config
        self.steps_per_epoch = shards.steps_per_epoch(len(self.train), config.replicas, config.batch_size)
        self.total_steps = config.steps or self.steps_per_epoch * (config.epochs or 0)
        self._batches = self._make_batches()
        self.clock = TrainingClock(self.device)
        self.times = StepTimes()
        self.step = 0  # optimizer steps of the run, in each of which `replicas` batches are used
        self.own_steps = 0  # batches that this rank used; the same, unless ranks go at their own speed
        self.skipped_steps = 0
        self._skips_in_a_row = 0
        self._losses: list[torch.Tensor] = []
        self._num_losses = 0
        self._unchecked = 0

    def run(self) -> None:
        """Train to the end, evaluating on the way.

        Raises:
            Diverged: the loss or too many gradients in a row are not finite.
            TransportError: a rank was lost.
        """
        while self.step < self.total_steps:
            self.train_until(self._next_evaluation())
            self._evaluate()

    def train_until(self, step: int) -> None:
        """Train until so many optimizer steps are done, on the training clock."""
        with self.recorder.counting_wire(), self.clock.running():
            while self.step < step:
                self._train_step()
                self._show_progress()
            self.strategy.synchronize()
            self._check_losses()

    @property
    def epoch(self) -> float:
        """Epochs finished, with the fraction of the current one."""
        return self.step / self.steps_per_epoch

    def _next_evaluation(self) -> int:
        every = self.config.eval_every * (1 if self.config.steps else self.steps_per_epoch)
        return min(self.total_steps, self.step + every) if every else self.total_steps

    def _make_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches without end: those dealt to this process, fp32 [dealt x batch, 3, 32, 32] and int64 alike."""
        sources = [self._batches_of(rank) for rank in self.strategy.dealt]
        if len(sources) == 1:
            yield from sources[0]
        for parts in zip(*sources, strict=True):
            yield torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def _batches_of(self, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A rank's batches without end, epoch after epoch: fp32 [batch, 3, 32, 32] and int64 [batch], on the device."""
        config = self.config
        shard = shards.shard(len(self.train), rank, config.replicas, config.seed)
        images, labels = self.train.images.to(self.device), self.train.labels.to(self.device)
        for epoch in itertools.count():
            generator = shards.augmentation_generator(config.seed, rank, epoch)
            for indices in shards.batches(
                shard, config.batch_size, self.steps_per_epoch, seed=config.seed, rank=rank, epoch=epoch
            ):
                chosen = indices.to(self.device)
                pixels = images[chosen]
                if config.augment:
                    pixels = crop_and_flip(pixels, generator, flip=self.dataset.mirror)
                yield normalise(pixels, self.dataset.mean, self.dataset.std), labels[chosen]

    def _show_progress(self) -> None:
        self.recorder.progress(
            step=self.step,
            total_steps=self.total_steps,
            epoch=self.epoch,
            samples=self.step * self.config.batch_size * self.config.replicas,  # to within a batch of each rank
            loss=lambda: float(self._losses[-1]) if self._losses else None,
        )

    def _train_step(self) -> None:
        config = self.config
        started, cpu_started = time.perf_counter(), time.process_time()
        x, y = next(self._batches)
        self.strategy.start_step(
            Step(
                index=self.own_steps,
                epoch=self.step // self.steps_per_epoch,
                rank=dist.get_rank(),
                world_size=config.replicas,
                seed=config.seed,
                warmup=config.steps is None,
            ),
            learning_rate(config, self.step, self.total_steps, self.steps_per_epoch),
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.amp == "bf16"):
            loss = self.strategy.forward(x, y)
        self._remember_loss(loss.detach())
        self.strategy.backward(loss)
        outcome = self.strategy.finish_step()
        forward_backward_s = time.perf_counter() - started - (outcome.exposed_s or 0.0)
        self._look_at(outcome)
        self.step = self.strategy.update(outcome)
        self.own_steps += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.profiler is not None:
            self.profiler.step()
        self._account(outcome, started, cpu_started, forward_backward_s)

    def _look_at(self, outcome: StepReport) -> None:
        """Count skipped steps, and stop at one or at too many in a row, as the configuration says."""
        if not outcome.skipped:
            self._skips_in_a_row = 0
            return
        self.skipped_steps += 1
        self._skips_in_a_row += 1
        if self.config.nonfinite == "raise":
            raise NonFiniteGradient(f"a gradient was not finite at step {self.step}")
        if self._skips_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise Diverged(
                f"{MAX_SKIPS_IN_A_ROW} steps in a row had a non-finite gradient, the last one step {self.step}; "
                "training has diverged: try a lower --lr"
            )

    def _account(self, outcome: StepReport, started: float, cpu_started: float, forward_backward_s: float) -> None:
        self.recorder.count(outcome)
        if self.own_steps > self.config.warmup_steps:
            self.times.steps.append(
                StepTime(
                    total_s=time.perf_counter() - started,
                    cpu_s=time.process_time() - cpu_started,
                    forward_backward_s=forward_backward_s,
                    encode_s=outcome.encode_s,
                    exchange_s=outcome.exchange_s,
                    exposed_s=outcome.exposed_s,
                )
            )

    def _remember_loss(self, loss: torch.Tensor) -> None:
        self._losses.append(loss)
        self._num_losses += 1
        self._unchecked += 1
        if self._unchecked >= LOSS_CHECK_EVERY[self.device.type]:
            self._check_losses()

    def _check_losses(self) -> None:
        """Stop at a loss that is no number, before its gradient can do harm (on a GPU: soon after)."""
        if not self._unchecked:
            return
        recent = torch.stack(self._losses[-self._unchecked :])
        bad = torch.nonzero(~torch.isfinite(recent))
        if len(bad):
            first = int(bad[0])
            step = self._num_losses - self._unchecked + first
            raise Diverged(
                f"the loss is {float(recent[first])} at step {step}; training has diverged: try a lower --lr"
            )
        self._unchecked = 0

    def _evaluate(self) -> None:
        test_loss, test_accuracy = evaluate(
            self.strategy.model, self.test, self.dataset, self.device, self.strategy.loop
        )
        self.recorder.evaluation(
            Snapshot(
                epoch=self.epoch,
                step=self.step,
                is_last=self.step >= self.total_steps,
                samples=self.own_steps * self.config.batch_size * len(self.strategy.dealt),
                skipped_steps=self.skipped_steps,
                train_loss=float(torch.stack(self._losses).mean()) if self._losses else None,
                test_loss=test_loss,
                test_accuracy=test_accuracy,
                train_time_s=self.clock.elapsed_s,
                times=self.times,
            ),
        )
        self._losses = []
        self.times = StepTimes()
