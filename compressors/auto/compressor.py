"""Auto: chooses the compressor and the collective of every layer during training.

Source: Alimohammadi et al. 2023 (L-GreCo, arXiv:2210.17357) for the cheapest method whose error stays within a bound
for each layer; Agarwal et al. 2021 (Accordion, arXiv:2010.16248) for choices that change during training.
Differs: the error of a layer is measured on its own gradient, repeatedly; Accordion infers a phase of training from
gradient norms. Step times are measured in the run itself, pair by pair; a model of the network link only selects the
pairs to measure.
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
from compressors.layer import Layer
from gradwire.ddp.gradients import reduced_layers
from gradwire.ddp.hook import CompressionHook, OwnHook
from gradwire.exchange.communicator import HookSettings


class ChoosingHook(CompressionHook):
    """A DDP hook in which a `Chooser` decides, between two steps, which compressor-collective pair sends each layer.

    The `Chooser` runs in the communication thread. Ranks need no extra message for their step times, because they send
    these in the message in which they tell each other whether all gradients were finite.

    Args:
        ddp: the wrapped model, without a communication hook so far.
        auto: the options.
        collective: the run's collective.
        settings: seed, timeout and other settings of the hook.
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
        """Repeat, at the same steps, the choices that a stopped run made after its checkpoint; then make new choices.

        Every rank must call this method.

        Args:
            decisions: the choices of the stopped run, as `Choice.to_dict` returned them; choices up to the step of the
                current choice are ignored. If the option `choices` names a file, only the choices in that file are
                used.
        """
        choices = self._auto.recorded or map(Choice.from_dict, decisions)
        self._pairs.look = None  # it belonged to the previous generator of decisions
        later = [choice for choice in choices if choice.step > self._pairs.choice.step]
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
        if self._settings.nonfinite == "zero":  # then no message about finite gradients was sent, so send one now
            self.start_on_any_rank(False)()
        self._own = StepSeconds(time.perf_counter() - self._ended, self._arrived - self._ended, self._pairs.wire_s)
        self._chooser.step = self._step
        self._chooser.was_skipped = self._report.skipped or self._overflowed
        with contextlib.suppress(StopIteration):
            self._decisions.send(self._worst)
        self._ended = time.perf_counter()


@dataclasses.dataclass(kw_only=True)
class Auto(OwnHook, name="auto"):
    """Auto: tries compressor-collective pairs in the first training steps and keeps the fastest.

    Pairs are tried again when the speed of the network links changes. Dense payloads, and payloads that collectives can
    add, use the run's collective; other payloads use `allgather`. If a pair would lose more than the share `error` of a
    layer's gradient norm in one step, a denser pair sends this layer, and takes over the layer's residual. `auto` works
    only inside DistributedDataParallel.

    Bytes: those of the chosen pairs.

    Raises:
        OptionError: the file that the option `choices` names cannot be read, or holds no choices.
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
            self.choices = str(Path(self.choices).absolute())
            try:
                if not self.recorded:
                    raise ValueError("it is empty")
                for pair in {part.pair for choice in self.recorded for part in choice.parts}:
                    pair.built()
            except (OSError, ValueError) as error:
                raise OptionError(
                    f"auto: {self.choices} holds no choices ({error}); give the choices.jsonl of a run with auto"
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
                f"auto cannot switch compressors on collective {name}, which keeps state outside the ranks; use "
                "collective ring, native, tree, halving_doubling, hierarchical or allgather"
            )
        if collective.recodes:
            raise Incompatible(
                f"auto cannot switch compressors on collective {name} if it encodes sums again; use requantise=false"
            )
        super().check_compatible(collective, layers)
        ids = {layer.id for layer in layers if layer.numel}
        if layers and any(choice.pair_of.keys() != ids for choice in self.recorded):
            raise Incompatible(
                f"auto: the choices in {self.choices} are those of another model, which has other layers; give the "
                "choices.jsonl of a run with this model"
            )

    @property
    def recorded(self) -> list[Choice]:
        """Read and return the choices in the file that the option `choices` names; [] if the option is None."""
        return [] if self.choices is None else read_choices(Path(self.choices))

    @override
    def make_hook(
        self, ddp: DistributedDataParallel, collective: Collective, settings: HookSettings
    ) -> CompressionHook:
        return ChoosingHook(ddp, self, collective, settings)
