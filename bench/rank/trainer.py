"""The training loop of one rank: steps, evaluations, checkpoints and rows."""

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import profiler

from bench.core import functions
from bench.core.config.run import RunConfig
from bench.core.config.syntax import LrScaling
from bench.core.processes import own_rank
from bench.datasets.base import Dataset, Samples
from bench.rank.data import Batches, Evaluation, RankData, check_inputs, evaluate
from bench.rank.record import Recorder
from bench.strategies.base import Batch, BoundStrategy, SaveState
from compressors.layer import Step
from gradwire.exchange.report import StepReport
from gradwire.step_guard import NonFiniteGradient


def learning_rate(config: RunConfig, step: int, total_steps: int, steps_per_epoch: int) -> float:
    """Return the learning rate for optimizer step number `step`, from 0, after scaling, warm-up and schedule."""
    scaling = LrScaling.parse(config.lr_scaling)
    peak = config.lr * scaling.factor(config.replicas)
    warmup_steps = config.warmup_epochs * steps_per_epoch
    if step < warmup_steps and scaling.gradual:
        return config.lr + (peak - config.lr) * step / warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / math.ceil(warmup_steps)
    done = (step - warmup_steps) / max(1.0, total_steps - warmup_steps)
    match config.schedule:
        case "constant":
            return peak
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * done))
        case "step":
            return peak * (0.1 ** ((done >= 0.5) + (done >= 0.75)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Measured times of one optimizer step, in seconds.

    Attributes:
        total_s: duration of the whole step, including loading the batch.
        cpu_s: CPU time of the process during the step, all threads together.
        until_exchanged_s: duration of loading the batch, forward, backward and the wait for the exchange of gradients.
        waited_s: the wait for the exchange within `until_exchanged_s`; None if it is unknown.
        encode_s: time spent on encoding and decoding, also during backward; None if DDP does not report it.
        exchange_s: time that the exchange was busy, also during backward; None if DDP does not report it.
        exposed_s: all waiting after backward, including the wait for exchanges of the optimizer; None if unknown.
    """

    total_s: float
    cpu_s: float
    until_exchanged_s: float
    waited_s: float | None
    encode_s: float | None
    exchange_s: float | None
    exposed_s: float | None


def speed_columns(steps: Sequence[StepTime], interval: int = 1) -> dict[str, float | None]:
    """Return the values of the columns about the time of a step and its parts, in seconds, by column name.

    The dict is empty if there are no steps. If `interval` is above 1, the steps are averaged over intervals
    of this many steps before median and percentile are computed, because only some steps of an interval exchange data.

    The time of a part of a step, such as encoding, is (its share of the time of all steps) x (the median step). The
    mean time of the part is not used, because it could exceed the median step if a few steps are slow.
    """
    if not steps:
        return {}

    def share(part: str) -> float | None:
        known = [step for step in steps if getattr(step, part) is not None]  # DDP times only some steps
        part_s, total_s = sum(getattr(step, part) for step in known), sum(step.total_s for step in known)
        return part_s / total_s if known and part_s <= total_s else None  # longer than the steps: a clock is wrong

    total = torch.tensor([step.total_s for step in steps], dtype=torch.float64)
    length = min(interval, len(steps))
    total = total[: len(steps) // length * length].view(-1, length).mean(1)
    median_s, p95_s = total.quantile(torch.tensor([0.5, 0.95], dtype=torch.float64)).tolist()
    shares = {name: share(name) for name in ("encode_s", "exchange_s", "exposed_s")}
    computing, waiting = share("until_exchanged_s"), share("waited_s")
    shares["forward_backward_s"] = computing and max(0.0, computing - (waiting or 0.0))
    parts = {name: part and part * median_s for name, part in shares.items()}
    return {"step_time_s": median_s, "step_time_p95_s": p95_s, **parts}


MAX_SKIPS_IN_A_ROW = 10
# Steps between two checks of the loss, by device: reading a loss from a GPU waits for the GPU.
LOSS_CHECK_EVERY = {"cpu": 1, "cuda": 20}
# The Trainer's attributes that a checkpoint saves as they are.
_COUNTS = (
    "step", "own_steps", "skipped_steps", "_skips_in_a_row", "_num_losses", "_evaluate_at", "_checkpoint_at",
)  # fmt: skip


class Diverged(RuntimeError):
    """The loss, or the gradients of too many steps in a row, are infinite or NaN; the message is one sentence."""


class NeverFinite(Diverged):
    """Loss or gradients were infinite or NaN before any update, so another learning rate would not help."""


_NO_UPDATE = "before any update; check the model, its initial weights and the scale of the inputs"


@dataclasses.dataclass(kw_only=True)
class Trainer:
    """Trains the model on one rank.

    Attributes:
        strategy: exchanges what the ranks compute and updates the model.
        dataset: the run's data set.
        data: the samples that this rank trains and evaluates on.
        recorder: writes rows and progress (on rank 0).
        save: called with the optimizer step and this rank's state to make a checkpoint.
        profiler: records a Chrome trace; None without --profile.
    """

    config: RunConfig
    strategy: BoundStrategy
    dataset: Dataset
    data: RankData
    recorder: Recorder
    device: torch.device
    save: SaveState
    profiler: torch.profiler.profile | None = None

    def __post_init__(self) -> None:
        config = self.config
        train, shards = self.data.train, self.data.shards
        self._batches = [Batches(config, self.dataset, train, shards, shard, self.device) for shard in self.data.fed]
        self.steps_per_epoch = self._batches[0].per_epoch
        self.total_steps = config.steps or self.steps_per_epoch * (config.epochs or 0)
        self.times: list[StepTime] = []
        self.step = self.strategy.first_step  # optimizer steps of the run; each uses `replicas` batches
        self.own_steps = 0  # batches that this rank has used: equal to `step` unless ranks go at their own speed
        self.skipped_steps = 0
        self._resumed_at = self.step  # step at which this process began, after a checkpoint or by joining late
        if self.step:
            for batches in self._batches:
                batches.go_to(self.step)
        self._evaluate_at = self._due(config.eval_every, at_multiple=self.step > 0)
        self._checkpoint_at = self._due(config.checkpoint_every)
        self._skips_in_a_row = self._num_losses = self._unchecked = 0
        self._losses: list[torch.Tensor] = []
        self._profiled: list[dict[str, Any]] = []  # what this rank's clocks measured in steps that are profiled

    def run(self) -> None:
        """Train to the end of the run, or to the target with `stop_at_target`; evaluate and checkpoint in between.

        Raises:
            Diverged: the loss, or the gradients of too many steps in a row, are infinite or NaN.
            DatasetError: the data hold NaN or infinite values.
            TransportError: a rank was lost.
        """
        while self.step < self.total_steps:
            self.train_until(min(self._evaluate_at, self._checkpoint_at))
            if self.step >= self._evaluate_at:
                if self._evaluate() == "ok":
                    return
                self._evaluate_at = self._due(self.config.eval_every)
            if self.step >= self._checkpoint_at and self.step < self.total_steps:
                self._checkpoint_at = self._due(self.config.checkpoint_every)
                self._checkpoint()

    def train_until(self, step: int) -> None:
        """Train until the run has done `step` optimizer steps."""
        with self.recorder.measuring():
            while self.step < step:
                self.train_step()
                self.recorder.progress.report(
                    step=self.step,
                    total_steps=self.total_steps,
                    epoch=self.step / self.steps_per_epoch,
                    # exact to one batch per rank
                    samples=self.step * self.config.samples_per_step * self.config.replicas,
                    loss=lambda: float(self._losses[-1]) if self._losses else None,
                )
            if self.step >= self._evaluate_at:
                self.strategy.synchronize()
            self._check_losses()

    def resume(self, state: dict[str, Any]) -> None:
        """Restore the state that an earlier process of this rank saved; every rank must call this before `run`."""
        self.strategy.load_state_dict(state["strategy"])
        self.recorder.load_state_dict(state["recorder"])
        for batches, saved in zip(self._batches, state["batches"], strict=True):
            batches.load_state_dict(saved)
        for name, value in state["counts"].items():
            setattr(self, name, value)
        if "_evaluate_at" not in state["counts"]:  # the number of ranks has changed, and so the steps per epoch
            self._evaluate_at = self._due(self.config.eval_every, at_multiple=True)
            self._checkpoint_at = self._due(self.config.checkpoint_every, at_multiple=True)
        self._losses = list(state["losses"].unbind())
        self.times = [StepTime(**seconds) for seconds in state["times"]]
        self.recorder.train_time_s = state["train_time_s"]
        self._resumed_at = self.step
        if state["users_generators"] is not None:
            functions.restore_generators(state["users_generators"])
        torch.set_rng_state(state["generator"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["device_generator"], self.device)

    def _checkpoint(self) -> None:
        on_cuda = self.device.type == "cuda"
        with self.recorder.measuring():
            of_strategy = self.strategy.state_dict()  # may wait for ranks that are behind
        self.save(
            self.step,
            {
                "strategy": of_strategy,
                "recorder": self.recorder.state_dict(),
                "batches": [batches.state_dict() for batches in self._batches],
                "counts": {name: getattr(self, name) for name in _COUNTS},
                "losses": torch.stack(self._losses) if self._losses else torch.empty(0),
                "times": [vars(seconds) for seconds in self.times],
                "train_time_s": self.recorder.train_time_s,
                "users_generators": functions.generator_states(),
                "generator": torch.get_rng_state(),
                "device_generator": torch.cuda.get_rng_state(self.device) if on_cuda else None,
            },
        )

    def _due(self, every: float, *, at_multiple: bool = False) -> int:
        """Return the optimizer step at which the next evaluation or checkpoint is due, at most the run's last step.

        Args:
            every: number of epochs (with --steps: steps) between two evaluations or checkpoints, such as 2 or 0.25. A
                whole number is counted from the current step. A fraction is counted from the start of the run, and
                rounded up to a step. If the number is 0, the result is the run's last step.
            at_multiple: True to count whole numbers from the start of the run, like fractions.
        """
        period = every * (1 if self.config.steps else self.steps_per_epoch)
        if not period:
            return self.total_steps
        if at_multiple or not isinstance(every, int):
            period = max(1.0, period)
            next_multiple = (math.floor(self.step / period + 1e-9) + 1) * period
            return min(self.total_steps, math.ceil(next_multiple - 1e-9))
        return min(self.total_steps, self.step + int(period))

    def train_step(self) -> None:
        """Make one training step: load the batch, train on it, and record counts and times."""
        config = self.config
        started, cpu_started = time.perf_counter(), time.process_time()
        parts = zip(*(next(batches) for batches in self._batches), strict=True)
        x, y = (torch.cat(tensors) if len(tensors) > 1 else tensors[0] for tensors in parts)
        self._inputs = x
        batch = Batch(
            x=x,
            y=y,
            step=Step(
                index=self.own_steps,
                epoch=self.step // self.steps_per_epoch if config.steps is None else None,
                rank=own_rank(),
                world_size=config.replicas,
                seed=config.seed,
            ),
            lr=learning_rate(config, self.step, self.total_steps, self.steps_per_epoch),
            task=self.dataset.task,
            num_parts=config.accumulate,
            amp=config.amp == "bf16",
            label_smoothing=config.label_smoothing,
            clip_norm=config.clip_norm,
            stop_at=min(self._evaluate_at, self._checkpoint_at),
            on_loss=self._remember_loss,
        )
        report = self.strategy.train_step(batch)
        until_exchanged_s = time.perf_counter() - started - report.update_s
        self._check_skips(report)
        self.step = self.step + 1 if report.num_steps is None else report.num_steps
        self.own_steps += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.profiler is not None:
            if profiler._is_profiler_enabled:  # let the trace be compared with the rank's own clocks
                own = {"exposed_s": report.exposed_s, "encode_s": report.encode_s, "exchange_s": report.exchange_s}
                self._profiled.append({"step": self.profiler.step_num, "step_s": time.perf_counter() - started} | own)
                self.profiler.add_metadata_json("bench_steps", json.dumps(self._profiled))
            self.profiler.step()
        self.recorder.count(report)
        # Warm-up ends after `untimed_steps` steps of the run, because a slow asynchronous rank makes few steps itself.
        untimed = config.untimed_steps
        is_profiled = self.profiler is not None and self.profiler.step_num <= untimed
        if self.step - self._resumed_at > untimed and not is_profiled:
            self.times.append(
                StepTime(
                    total_s=time.perf_counter() - started,
                    cpu_s=time.process_time() - cpu_started,
                    until_exchanged_s=until_exchanged_s,
                    waited_s=None if report.exposed_s is None else report.exposed_s - report.update_exposed_s,
                    encode_s=report.encode_s,
                    exchange_s=report.exchange_s,
                    exposed_s=report.exposed_s,
                )
            )

    def _check_skips(self, report: StepReport) -> None:
        """Count the step if it was skipped because of a non-finite gradient.

        Raises:
            NonFiniteGradient: the step was skipped, and the run has --nonfinite raise.
            Diverged: `MAX_SKIPS_IN_A_ROW` steps in a row were skipped.
        """
        self.skipped_steps += report.skipped
        self._skips_in_a_row = self._skips_in_a_row + 1 if report.skipped else 0
        if report.skipped and self.config.nonfinite == "raise":
            raise NonFiniteGradient(f"a gradient was not finite at step {self.step}")
        if self._skips_in_a_row >= MAX_SKIPS_IN_A_ROW:
            found = f"{MAX_SKIPS_IN_A_ROW} steps in a row had a non-finite gradient"
            if self.skipped_steps > self.own_steps:
                raise NeverFinite(f"{found}, {_NO_UPDATE}")
            raise Diverged(f"{found}, the last one step {self.step}; training has diverged: try a lower --lr")

    def _remember_loss(self, loss: torch.Tensor) -> None:
        self._losses.append(loss)
        self._num_losses += 1
        self._unchecked += 1
        if self._unchecked >= LOSS_CHECK_EVERY[self.device.type]:
            self._check_losses()

    def _check_losses(self) -> None:
        """Check the losses since the last check; on a CPU, each loss is checked before its gradient is used.

        Raises:
            Diverged: a loss is infinite or NaN.
            DatasetError: the inputs are infinite or NaN as well.
        """
        recent = self._losses[len(self._losses) - self._unchecked :]
        finite = torch.isfinite(torch.stack(recent)).tolist() if recent else []
        if not all(finite):
            first = finite.index(False)
            step = self._num_losses - self._unchecked + first
            found = f"the loss is {float(recent[first])} at step {step}"
            check_inputs(self._inputs, found)
            if self.device.type != "cpu" and isinstance(self.data.train.inputs, torch.Tensor):
                check_inputs(self.data.train.inputs, found)  # that step's batch is gone
            if step <= self.skipped_steps:
                raise NeverFinite(f"{found}, {_NO_UPDATE}")
            raise Diverged(f"{found}; training has diverged: try a lower --lr")
        self._unchecked = 0

    def _evaluate(self) -> str:
        """Evaluate the model and write a row; return the row's status, "ok" for the run's last row or "running".

        A rank that does not evaluate only sends its measurements to the rank that evaluates.
        """
        times, self.times = self.times, []
        figures = self._figures(times)
        self._losses = []
        if not self.strategy.evaluates:
            self.recorder.hand_over(figures)
            return "running"
        # Within an epoch, only the test set is evaluated, because evaluating more can take longer than training.
        is_within_epoch = not isinstance(self.config.eval_every, int) and self.step % self.steps_per_epoch != 0
        test, *train = self._evaluations(
            [self.data.test] if is_within_epoch else [self.data.test, self.data.train_sample]
        )
        is_text = self.dataset.task.metric == "test_bits_per_byte"
        bits_per_byte = test.loss / math.log(2) if is_text else None
        has_reached = self.config.stop_at_target and self.config.reaches_target(test.accuracy, bits_per_byte)
        is_last = self.step >= self.total_steps or has_reached
        if is_last and not train:
            train = self._evaluations([self.data.train_sample])
        status = "ok" if is_last else "running"
        self.recorder.record_evaluation(
            columns={
                "status": status,
                "epoch": self.step / self.steps_per_epoch,
                "step": self.step,
                "train_time_s": self.recorder.train_time_s,
                "train_accuracy": train[0].accuracy if train else None,
                "test_loss": test.loss,
                "test_accuracy": test.accuracy,
                "test_bits_per_byte": bits_per_byte,
                **self.data.columns,
                **speed_columns(times, self.strategy.interval),
            },
            figures=figures,
        )
        return status

    def _figures(self, times: Sequence[StepTime]) -> dict[str, Any]:
        """Return this rank's values for the columns that combine all ranks.

        Args:
            times: the timed steps since the previous row.
        """
        return {
            "samples": self.own_steps * self.config.samples_per_step * len(self._batches),
            "skipped_steps": self.skipped_steps,
            "train_loss": float(torch.stack(self._losses).mean()) if self._losses else None,
            "steps_per_s": len(times) / sum(step.total_s for step in times) if times else None,
            "cpu_s_per_step": sum(step.cpu_s for step in times) / len(times) if times else None,
        }

    def _evaluations(self, parts: Sequence[Samples]) -> list[Evaluation]:
        return evaluate(
            self.strategy.model, parts, self.dataset, self.device, self.strategy.loop, self.recorder.progress.repeat
        )
