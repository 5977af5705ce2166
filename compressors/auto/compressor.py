"""Auto: chooses the compressor and the collective of every layer during training.

Source: the cheapest method within a bound on each layer's error: Alimohammadi et al. 2023 (L-GreCo, arXiv:2210.17357);
a choice that follows training: Agarwal et al. 2021 (Accordion, arXiv:2010.16248).
Differs: the error of a layer is measured on its own gradient, repeatedly, not inferred from a training phase guessed
from norms; step times are measured in the run itself, pair by pair; a model of the link only selects the pairs to
measure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from annotated_types import Gt, Le
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Doc, override

from collectives.base import Collective
from collectives.options import Incompatible, OptionError
from compressors.auto.choice import FIRST, Choice, ChosenPairs, dense_pair, read_choices
from compressors.auto.chooser import Chooser
from compressors.auto.ranking import StepSeconds
from compressors.base import Traits
from compressors.ddp.gradients import reduced_layers
from compressors.ddp.hook import CompressionHook, HookSettings, OwnHook
from compressors.layer import Layer


class ChoosingHook(CompressionHook):
    """Makes decisions between two steps, in the communication thread.

    The times of a step are sent together with the next step's flag that says whether all gradients were finite, so they
    need no message of their own.

    Args:
        auto: the options; the other arguments are those of `CompressionHook`.
    """

    def __init__(
        self, ddp: DistributedDataParallel, auto: Auto, collective: Collective, settings: HookSettings
    ) -> None:
        layers = [layer for layer in reduced_layers(ddp) if layer.numel]
        first, *_ = auto.recorded or [Choice.of_all(0, dense_pair(collective), layers, FIRST)]
        self._auto, self._pairs = auto, ChosenPairs(auto, first, self.bind)
        super().__init__(ddp, self._pairs, collective, settings)
        self._chooser = Chooser(
            self._pairs,
            collective,
            layers,
            self.transport,
            error=auto.error,
            budget=auto.budget,
            revise=auto.revise,
        )
        self._arrived, self._ended = 0.0, time.perf_counter()
        self._own = self._worst = StepSeconds(0.0, 0.0, 0.0)
        self.replay([])

    @override
    def end_pause(self) -> None:
        self._ended = time.perf_counter()

    def replay(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Repeat the choices that were made after this state was saved, then continue choosing; every rank must call.

        Args:
            decisions: the choices of the resumed run, as `Choice.to_dict` returns them; those that the state already
                contains are left out. If the option `choices` names a file, its choices are used instead, because they
                cover the whole run.
        """
        choices, held = self._auto.recorded or map(Choice.from_dict, decisions), self._pairs.choice.step
        self._pairs.look = None  # it belonged to the previous generator of decisions
        later = [choice for choice in choices if choice.step > held]
        self._decisions = self._chooser.follow(later, goes_on=self._auto.choices is None)
        next(self._decisions, None)

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.replay([])

    @override
    def start_on_any_rank(self, flag: bool) -> Callable[[], bool]:
        finish_all = self.transport.start_all_reduce_scalars([float(flag), *self._own], "max")

        def finish() -> bool:
            worst, *seconds = finish_all()
            self._worst = StepSeconds(*seconds)
            return bool(worst)

        return finish

    @override
    def _begin(self) -> None:
        super()._begin()
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
            self.start_on_any_rank(False)()
        self._own = StepSeconds(time.perf_counter() - self._ended, self._arrived - self._ended, self._pairs.wire_s)
        self._chooser.step, self._chooser.was_skipped = self._step, self._report.skipped
        with contextlib.suppress(StopIteration):
            self._decisions.send(self._worst)
        self._ended = time.perf_counter()


@dataclasses.dataclass(kw_only=True)
class Auto(OwnHook, name="auto"):
    """Auto: tries pairs of compressor and collective in the first steps and keeps the fastest.

    It tries again when the links change. Dense and mergeable payloads use the run's collective, others `allgather`. A
    layer that loses more than `error` of its norm in a step is moved to a denser pair, together with its residual.
    It works inside DistributedDataParallel.

    Bytes: those of the chosen pairs.

    Raises:
        OptionError: the file of choices cannot be read.
    """

    error: Annotated[
        float, Gt(0), Le(1), Doc("largest |x - C(x)| / |x| for a layer of more than 1024 elements; 1: no limit")
    ] = 0.97
    budget: Annotated[
        float, Gt(0), Le(1), Doc("largest share of the training time that is spent on trying pairs again")
    ] = 0.03
    revise: Annotated[bool, Doc("choose again during training; false: choose once, in the first steps")] = True
    choices: Annotated[
        str | None, Doc("repeat the choices of an earlier run, from its choices.jsonl, instead of trying pairs")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.choices is not None:
            path = Path(self.choices).absolute()
            self.choices = str(path)
            try:
                choices = read_choices(path)
                if not choices:
                    raise ValueError("it is empty")
                for pair in {part.pair for choice in choices for part in choice.parts}:
                    pair.built()
            except (OSError, ValueError) as error:
                raise OptionError(
                    f"auto: {path} holds no choices ({error}); give the choices.jsonl of a run of auto"
                ) from None

    @functools.cached_property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, default_collectives=("ring",))

    @override
    def check_compatible(self, collective: Collective, layers: Sequence[Layer] = ()) -> None:
        name = collective.component_name
        if collective.decodes or name == "pool":
            raise Incompatible(
                f"auto cannot switch pairs on {name}, which keeps state outside the ranks; use collective ring, "
                "native, tree, halving_doubling, hierarchical or allgather"
            )
        super().check_compatible(collective, layers)
        ids = {layer.id for layer in layers if layer.numel}
        if layers and any(choice.ways.keys() != ids for choice in self.recorded):
            raise Incompatible(
                f"auto: {self.choices} is of another model, which has other layers; give the choices.jsonl of this "
                "model"
            )

    @property
    def recorded(self) -> list[Choice]:
        """Return the choices to repeat; empty if there is no file of choices."""
        return [] if self.choices is None else read_choices(Path(self.choices))

    @override
    def make_hook(
        self, ddp: DistributedDataParallel, collective: Collective, settings: HookSettings
    ) -> CompressionHook:
        return ChoosingHook(ddp, self, collective, settings)
