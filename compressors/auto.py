"""Auto: which compressor each layer is sent through, and how it is summed, is found out while training.

Source: a bound on each layer's error, and the cheapest that keeps it: Alimohammadi et al. 2023 (L-GreCo,
arXiv:2210.17357); that the choice must follow training: Agarwal et al. 2021 (Accordion, arXiv:2010.16248).
Differs: what a layer loses is measured on its own gradient, again and again, in place of a phase guessed from norms;
what a step takes is measured in the run itself, pair after pair; a model of the link only says which are worth that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Gt, Le
from typing_extensions import Doc, override

from collectives.base import Collective
from collectives.options import OptionError
from collectives.payloads.base import Payload
from collectives.payloads.dense import Dense
from compressors.base import Compressor
from compressors.choice import Choice, read_choices
from compressors.layer import Layer


@dataclasses.dataclass(kw_only=True)
class Auto(Compressor):
    """Tries pairs of compressor and collective in the first steps, keeps the fastest, and again as links change.

    What is dense or can be merged rides on the run's collective, the rest on allgather. A layer that loses more than
    `error` of its norm in a step goes through a denser pair. What waits in a residual moves with its layer.
    `compressors/ddp/choosing/` does it, inside DistributedDataParallel.

    Bytes: those of the pairs.

    Raises:
        OptionError: a file of choices that cannot be read.
    """

    chooses: ClassVar[bool] = True

    error: Annotated[
        float, Gt(0), Le(1), Doc("largest |x - C(x)| / |x| of a layer of more than 1024 elements; 1: any")
    ] = 0.97
    budget: Annotated[
        float, Gt(0), Le(1), Doc("share of the time that trying pairs anew may have cost, before it is done again")
    ] = 0.03
    revise: Annotated[bool, Doc("choose anew while training; false: once, in the first steps")] = True
    choices: Annotated[
        str | None, Doc("choices.jsonl of a run, whose choices are made again, step for step; nothing is tried")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.choices is not None:
            path = Path(self.choices).absolute()
            self.choices = str(path)
            try:
                choices = read_choices(path)
                if not choices:
                    raise ValueError("there is none in it")
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
    def refusal(self, collective: type[Collective] | Collective) -> str | None:
        name = collective.component_name
        if collective.decodes or name == "pool":
            return (
                f"auto tries pairs that keep nothing outside the ranks, and {name} does; use collective ring, native, "
                "tree, halving_doubling, hierarchical or allgather"
            )
        return super().refusal(collective)

    @override
    def layers_refusal(self, layers: Sequence[Layer]) -> str | None:
        ids = {layer.id for layer in layers if layer.numel}
        if self.choices is None or all(choice.ways.keys() == ids for choice in self.recorded):
            return None
        return f"auto: {self.choices} is of another model, whose layers are not this one's; give one of this model"

    @property
    def recorded(self) -> list[Choice]:
        """What is to be chosen again; empty where nothing is."""
        return [] if self.choices is None else read_choices(Path(self.choices))

    @override
    def expected_nbytes(self, layer: Layer) -> None:
        return None
