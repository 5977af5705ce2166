"""Local: every rank trains alone for some steps, then ranks average how far their parameters have moved.

All ranks keep an outer copy of the parameters, equal bit for bit. After every `steps` steps, each rank sends the outer
copy minus its own parameters, compressed. An outer optimizer (SGD) moves the copy by the mean of these differences, and
each rank sets its parameters to the copy. Evaluations, checkpoints and the saved model use the outer copy.

Source: Douillard et al. 2023 (DiLoCo, arXiv:2311.08105); the other presets are Streaming DiLoCo (arXiv:2501.18512),
SparseLoCo (arXiv:2508.15706) and post-local SGD (arXiv:1808.07217).
"""

import dataclasses
import time
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn
from typing_extensions import override

from bench.core.config.run import RunConfig
from bench.core.config.syntax import Partition
from bench.core.spec import usage_errors
from bench.optimizers.base import Optimizer
from bench.strategies.base import Batch, BoundStrategy, Setup, Strategy
from collectives.base import Collective
from collectives.refusals import Refusal
from compressors.base import Compressor
from gradwire.exchange.communicator import own_transport
from gradwire.exchange.report import StepReport
from gradwire.local.by_speed import LocalStepsBySpeed
from gradwire.local.exchange import FixedMembers, LocalSteps, Members
from gradwire.local.fragments import dealt
from gradwire.local.options import LocalOptions


@dataclasses.dataclass(kw_only=True, eq=False)
class Local(LocalOptions, Strategy):
    """Exchanges differences of parameters instead of gradients.

    The defaults are local SGD: every 30 steps the parameters become their mean over ranks. A preset changes the
    defaults of other options; options that you give take precedence. preset=diloco: steps=500, outer_lr=0.7,
    outer_momentum=0.9, nesterov=true. preset=streaming: the same with steps=100, outer_lr=0.4, fragments=4, delay=5,
    alpha=0.5. preset=sparseloco: steps=30, outer_lr=0.4, decay=0.95. preset=post_local: steps=4, start_after=100.

    The inner optimizer's state stays on its rank, and the learning-rate schedule runs over inner steps. Gradients are
    clipped on each rank, and a rank whose gradient is not finite skips its own step. With fragments, block b of the
    network belongs to fragment b modulo `fragments`; every steps / fragments steps one fragment is exchanged, in the
    background of the next `delay` steps. Floating-point buffers are averaged with the last fragment.

    With steps=auto, the ranks plan at each exchange how many steps each rank makes until the next exchange, from the
    times that steps and exchanges took. The mean is weighted by these numbers. A step of the run then means
    `world_size` steps of single ranks, whichever ranks make them.

    Bytes: every `steps` steps, one message of the whole model, and the model's buffers in fp32, which count as state.
    """

    @override
    def obstacle_to_resizing(self) -> str:
        return f"{self} gives ranks different numbers of steps" if self.steps == "auto" else ""

    @override
    def refusals(
        self, config: RunConfig, compressor: Compressor, collective: Collective, optimizer: Optimizer
    ) -> list[Refusal]:
        name = self.component_name
        return [
            *self.pair_refusals(compressor, collective),
            Refusal(
                optimizer.exchanges,
                f"{optimizer.component_name} sends data of its own between all ranks, and with {name} a rank sends "
                "nothing between two exchanges of parameters",
                [{"strategy": "ddp"}, {"optimizer": "sgd"}],
            ),
            Refusal(
                config.trigger != "async",
                f"--trigger {config.trigger} waits for all ranks in every step, which {name} does not",
                [{"trigger": None}],
            ),
            Refusal(
                config.bucket_mb is not None,
                f"--bucket-mb has no meaning with {name}, which sends each fragment as one message",
                [{"bucket_mb": None}],
            ),
        ]

    @override
    def examine(self, config: RunConfig, model: nn.Module) -> list[str]:
        with usage_errors():
            dealt(model, self.fragments)
        if self.steps == "auto":
            return ["steps=auto follows measured times, so another run will not repeat this one bit for bit"]
        steps, first = config.steps or _steps_of(config), self.start_after
        if steps and first >= steps:
            return [
                f"local steps begin only after step {first}, and the run ends at step {steps}, so gradients are "
                "averaged uncompressed in all steps; give a smaller start_after"
            ]
        left = max(0, steps - first) % self.interval
        if not left:
            return []
        advice = f"make --steps a multiple of {self.interval}{f' plus {first}' if first else ''}"
        if not config.steps:
            advice = f"change --epochs, or set steps to a number that divides {steps - first}"
        return [
            f"the last evaluation sees the parameters of step {steps - left} of {steps}, because no exchange follows; "
            f"{advice}"
        ]

    @override
    def bind(self, setup: Setup) -> BoundStrategy:
        members = FixedMembers(setup.collective, own_transport(setup.device, setup.config.timeout_s))
        kind = LocalTrainingBySpeed if self.steps == "auto" else LocalTraining
        return kind(setup, self, members)


def _steps_of(config: RunConfig) -> int:
    """Return the number of steps in the run's epochs; 0 if not known, because a partition may leave out samples."""
    if config.epochs is None or Partition.parse(config.partition).per_rank is not None:
        return 0
    samples = (config.train_size - config.holdout_size) // config.replicas
    return config.epochs * (samples // config.samples_per_step)


class LocalTraining(BoundStrategy):
    """Trains on this rank alone between exchanges.

    Args:
        setup: the run's components and this rank's model.
        options: the strategy with its options.
        members: decides which ranks take part in the exchanges.
    """

    kind: ClassVar[type[LocalSteps]] = LocalSteps
    optimizer: torch.optim.Optimizer
    _members: Members

    def __init__(self, setup: Setup, options: Local, members: Members) -> None:
        config = setup.config
        self._members = members
        self._local = self.kind(setup.model, options, setup.compressor, members, nonfinite=config.nonfinite)
        super().__init__(setup.model, [self._local], setup.optimizer.bind(setup.model, config.lr))
        self.interval = self._local.period

    @override
    def join(self, *, while_waiting: Callable[[], None], has_joined: Callable[[], None]) -> None:
        self.first_step = self._members.join(self._local, while_waiting, has_joined)

    @override
    def train_step(self, batch: Batch) -> StepReport:
        for group in self.optimizer.param_groups:
            group["lr"] = batch.lr
        self._local.start_step(batch.step)
        batch.backward(self.model)
        updates = self._local.prepare_gradients_()
        started = time.perf_counter()
        if updates:
            if batch.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), batch.clip_norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        update_s = time.perf_counter() - started
        self._local.after_update()
        report = self._local.finish_step()
        report.skipped, report.update_s = not updates, update_s
        return report

    @override
    def begin_interval(self) -> None:
        self._local.begin_interval()

    @override
    def synchronize(self) -> None:
        """Set the model to the outer copy, which is equal on all ranks, until the next step."""
        self._local.show_outer()

    @override
    def state_dict(self) -> dict[str, object]:
        self.synchronize()
        return super().state_dict()


class LocalTrainingBySpeed(LocalTraining):
    """Trains on this rank alone between exchanges, for a number of steps that depends on the rank's speed."""

    kind = LocalStepsBySpeed
    _local: LocalStepsBySpeed

    @override
    def train_step(self, batch: Batch) -> StepReport:
        self._local.plan(batch.stop_at)
        self.interval = self._local.period
        report = super().train_step(batch)
        report.num_steps = self._local.num_steps
        return report
