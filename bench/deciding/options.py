"""The options of `bench decide` and `bench.decide` beside those of a run: when a method counts as decided."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from typing_extensions import Doc

from bench.core.config.configuration import Configuration, Flag

# A method as a user writes it: a text such as "local:steps=5 topk@allgather", or options of `bench run` by name.
MethodSpec = str | Mapping[str, Any]
BASELINE = "bf16"
# Options of `bench run` that are always refused, with a sentence that says what to do instead.
NOT_TAKEN = ("compressor", "collective", "steps", "stop_at_target", "nnodes", "node_rank", "rdzv_endpoint")
NOTHING_TO_COMPARE = "there is nothing to compare; give --method at least once, such as --method topk"
RULE = "When it is decided"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecideConfig(Configuration):
    """The rule by which methods are compared, and how much may be spent on it."""

    panels: ClassVar[tuple[str, ...]] = (RULE,)

    same: Annotated[float, Ge(1), Le(2), Doc("factors of time below this make no practical difference"), Flag(RULE)] = (
        1.03
    )
    alpha: Annotated[
        float,
        Ge(0.0001),
        Le(0.5),
        Doc("probability of a wrong verdict on time, all methods together; the same again on accuracy"),
        Flag(RULE),
    ] = 0.05
    accuracy_margin: Annotated[
        float,
        Ge(0),
        Le(100),
        Doc(
            "loss of final accuracy that is accepted, in percentage points; of a text, increase of bits per byte that "
            "is accepted, in per cent"
        ),
        Flag(RULE),
    ] = 1.0
    max_seeds: Annotated[int, Ge(1), Le(1000), Doc("largest number of seeds"), Flag(RULE)] = 20
    budget: Annotated[str, Doc("time after which no seed is added: 10min"), Flag(RULE, metavar="DURATION")] = "10min"
