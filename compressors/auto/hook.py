"""ChoosingHook: the communication hook of `auto`, which chooses pairs between steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from collectives.base import Collective
from compressors.auto.choice import FIRST, Choice, dense_pair
from compressors.auto.chooser import Chooser, Decisions
from compressors.auto.compressor import Auto
from compressors.auto.ranking import StepSeconds
from compressors.auto.reducer import ChosenPairs
from compressors.ddp.gradients import reduced_layers
from compressors.ddp.hook import CompressionHook, HookSettings
from compressors.layer import Step


class ChoosingHook(CompressionHook):
    """Take decisions between two steps, in the communication thread.

    The times of a step travel with the flag of the next step that says whether all gradients were finite, so they need
    no message of their own.

    Args:
        auto: the options. The rest is as of `CompressionHook`.
    """

    def __init__(
        self, ddp: DistributedDataParallel, auto: Auto, collective: Collective, settings: HookSettings
    ) -> None:
        layers = [layer for layer in reduced_layers(ddp) if layer.numel]
        recorded = auto.recorded
        first, *later = recorded or [Choice.of_all(0, dense_pair(collective), layers, FIRST)]
        self._auto = auto
        self._pairs = ChosenPairs(auto, first, self.bind)
        super().__init__(ddp, self._pairs, collective, settings)
        self._chooser = Chooser(auto, self._pairs, collective, layers, self.transport)
        self._decisions = self._chooser.follow(later) if recorded else self._chooser.decisions()
        self._is_replay = bool(recorded)
        self._arrived = 0.0
        self._ended = time.perf_counter()
        self._own = self._worst = StepSeconds(0.0, 0.0, 0.0)
        next(self._decisions, None)

    @override
    def end_pause(self) -> None:
        self._ended = time.perf_counter()

    def follow(self, choices: Sequence[Choice]) -> None:
        """Repeat choices that were made after this state was saved, then go on choosing; every rank must call.

        Args:
            choices: the choices of the run that is resumed; those that the state contains are left out. Choices that
                the options name take their place, because they reach further.
        """
        held = self._pairs.choice.step
        self._pairs.look = None  # it belonged to decisions that are no longer made
        self._decisions = self._resumed([choice for choice in self._auto.recorded or choices if choice.step > held])
        next(self._decisions, None)

    def replay(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Do as `follow` does, with choices as `Choice.to_dict` returns them; every rank must call."""
        self.follow([Choice.from_dict(values) for values in decisions])

    def _resumed(self, choices: Sequence[Choice]) -> Decisions:
        yield from self._chooser.follow(choices)
        if not self._is_replay:
            yield from self._chooser.decisions()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.follow([])

    @override
    def start_on_any_rank(self, flag: bool) -> Callable[[], bool]:
        finish_all = self.transport.start_all_reduce_scalars([float(flag), *self._own], "max")

        def finish() -> bool:
            worst, *seconds = finish_all()
            self._worst = StepSeconds(*seconds)
            return bool(worst)

        return finish

    @override
    def _begin_step(self, step: Step) -> None:
        super()._begin_step(step)
        self._report.decision = self._pairs.choice
        self._pairs.wire_s = 0.0

    @override
    def _take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        self._arrived = time.perf_counter()
        return super()._take(bucket)

    @override
    def _conclude(self) -> None:
        super()._conclude()
        if self._settings.nonfinite == "zero":  # no flag was sent
            self.on_any_rank(False)
        self._own = StepSeconds(time.perf_counter() - self._ended, self._arrived - self._ended, self._pairs.wire_s)
        self._chooser.step, self._chooser.was_skipped = self._step, self._report.skipped
        with contextlib.suppress(StopIteration):
            self._decisions.send(self._worst)
        self._ended = time.perf_counter()
