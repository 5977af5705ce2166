"""CollectivesConfig: one sweep of `bench collectives`; what crosses from the command line to every rank."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le
from typing_extensions import Doc

from bench.core.config.configuration import NOT_RECORDED, Flag
from bench.core.config.job import MEASUREMENT, OUTPUT, PROCESSES, VIRTUAL_HOSTS, RanksConfig
from bench.core.units import parse_sizes
from collectives.options import Count, CountOrZero

WHAT = "What to sum"
Dtype = Literal["fp32", "fp16", "bf16", "int8", "int32"]
_ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "int32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectivesConfig(RanksConfig):
    """What is summed, how, and where; complete once `bench.launch.collectives.resolve` has filled in the rest."""

    panels: ClassVar[tuple[str, ...]] = (WHAT, MEASUREMENT, PROCESSES, VIRTUAL_HOSTS, OUTPUT)

    sizes: Annotated[
        str, Doc("bytes of the tensor: a list, or ranges that double (1KiB:64MiB)"), Flag(WHAT), NOT_RECORDED
    ] = "10kB,1MB,10MB"
    compressors: Annotated[
        str,
        Doc("what makes the payload, separated by commas; none: the tensor as it is"),
        Flag(WHAT, room="compressors", many=True),
        NOT_RECORDED,
    ] = "none"
    collectives: Annotated[
        str | None,
        Doc("how ranks sum, separated by commas"),
        Flag(WHAT, room="collectives", many=True, chosen="every collective that takes the payload"),
        NOT_RECORDED,
    ] = None
    dtype: Annotated[Dtype, Doc("type of the tensor's elements"), Flag(WHAT)] = "fp32"
    overlap: Annotated[
        float, Ge(0), Le(1), Doc("share of positions at which all ranks have the same magnitude"), Flag(WHAT)
    ] = 0.0
    iters: Annotated[Count, Doc("timed sums in one round"), Flag(MEASUREMENT)] = 20
    warmup: Annotated[CountOrZero, Doc("untimed sums before them"), Flag(MEASUREMENT)] = 3
    rounds: Annotated[Count, Doc("rounds in which all take turns; medians over rounds"), Flag(MEASUREMENT)] = 5
    pairs: Annotated[
        tuple[tuple[str, str], ...], Doc("(collective, compressor) as spec texts that work together"), NOT_RECORDED
    ] = ()

    @property
    def sizes_bytes(self) -> list[int]:
        """The sizes as numbers.

        Raises:
            UsageError: they are not sizes.
        """
        return parse_sizes(self.sizes)

    def count(self, size: int) -> int:
        """Elements of a tensor of at most `size` bytes."""
        return size // _ITEMSIZE[self.dtype]

    def size_bytes(self, size: int) -> int:
        """Bytes of these elements."""
        return self.count(size) * _ITEMSIZE[self.dtype]
