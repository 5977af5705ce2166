"""Auto: chooses the compressor and the collective of every layer during training.

Source: the cheapest method within a bound on each layer's error: Alimohammadi et al. 2023 (L-GreCo, arXiv:2210.17357);
a choice that follows training: Agarwal et al. 2021 (Accordion, arXiv:2010.16248).
Differs: the error of a layer is measured on its own gradient, repeatedly, not inferred from a training phase guessed
from compressors.ddp.hook import CompressionHook, HookSettings
from torch.nn.parallel import DistributedDataParallel
from norms; step times are measured in the run itself, pair by pair; a model of the link only selects the pairs to
measure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Le
from typing_extensions import Doc, override

from collectives.base import Collective
from collectives.options import Incompatible, OptionError
from collectives.payloads.base import Payload
from collectives.payloads.dense import Dense
from compressors.auto.choice import Choice, read_choices
from compressors.base import OwnHook
from compressors.layer import Layer

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from compressors.ddp.hook import CompressionHook, HookSettings


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

    @property
    @override
    def default_collectives(self) -> tuple[str, ...]:
        return ("ring",)

    @property
    @override
    def emits(self) -> frozenset[type[Payload]]:
        return frozenset({Dense})

    @override
    def check_compatible(self, collective: Collective) -> None:
        name = collective.component_name
        if collective.decodes or name == "pool":
            raise Incompatible(
                f"auto cannot switch pairs on {name}, which keeps state outside the ranks; use collective ring, "
                "native, tree, halving_doubling, hierarchical or allgather"
            )
        super().check_compatible(collective)

    @override
    def check_layers(self, layers: Sequence[Layer]) -> None:
        ids = {layer.id for layer in layers if layer.numel}
        if any(choice.ways.keys() != ids for choice in self.recorded):
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
        from compressors.auto.hook import ChoosingHook

        return ChoosingHook(ddp, self, collective, settings)
