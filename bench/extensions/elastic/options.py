"""The options of local steps of ranks that may be lost and return, and what they cannot be combined with."""

import dataclasses
from typing import Annotated

from annotated_types import Gt, Le
from typing_extensions import Doc, override

from collectives.allreduce import Native
from collectives.base import Collective
from collectives.direct import Direct
from collectives.hierarchical import Hierarchical
from collectives.options import CountOrZero, Incompatible, OptionError, incompatibility
from collectives.pool import Pool
from compressors.base import Compressor
from gradwire.local.options import LocalOptions


@dataclasses.dataclass(kw_only=True, eq=False)
class ElasticOptions(LocalOptions, name="local"):
    """Options of local steps, and of ranks that may be lost and return.

    Raises:
        OptionError: a deadline without a quorum, or a quorum with options that need all ranks at all times.
    """

    quorum: Annotated[
        CountOrZero,
        Doc(
            "smallest number of ranks for an exchange; others may be lost and return. 0: every exchange needs all ranks"
        ),
    ] = 0
    deadline: Annotated[
        float, Gt(0), Le(86400), Doc("with quorum, seconds that ranks which are ready wait for the others")
    ] = 10.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        obstacles = (
            (
                self.steps == "auto" and self.quorum > 0,
                f"steps=auto plans the steps of all ranks, and with quorum={self.quorum} some may be lost; use a "
                "number of steps",
            ),
            (
                self.quorum > 0 and self.delay > 0,
                f"delay={self.delay} leaves an exchange under way during later steps, and with quorum={self.quorum} a "
                "rank may be lost meanwhile; use delay=0",
            ),
            (
                self.quorum > 0 and self.start_after > 0,
                f"start_after={self.start_after} averages the gradients of all ranks in every first step, and with "
                f"quorum={self.quorum} some may be lost; use start_after=0",
            ),
            (
                not self.quorum and self.deadline != type(self).deadline,
                f"deadline={self.deadline:g} bounds the wait for ranks that a quorum goes on without; add quorum, or "
                "leave out deadline",
            ),
        )
        for applies, sentence in obstacles:
            if applies:
                raise OptionError(f"{self.component_name}: {sentence}")

    @override
    def check_pair(self, compressor: Compressor, collective: Collective) -> None:
        super().check_pair(compressor, collective)
        if self.quorum:
            self._check_members(collective)

    def check_quorum(self, collective: Collective, world_size: int) -> None:
        """Check that a collective works with any number of ranks from the quorum to all, as members leave and return.

        Raises:
            Incompatible: it does not, or the quorum is larger.
        """
        if self.quorum > world_size:
            raise Incompatible(
                f"{self.component_name}: quorum={self.quorum} is more than the {world_size} ranks; lower it"
            )
        for present in range(self.quorum, world_size + 1):
            if reason := incompatibility(collective.check_ranks, present):
                raise Incompatible(f"with quorum={self.quorum} there may be {present} rank(s), and {reason}")

    def _check_members(self, collective: Collective) -> None:
        parts = [collective.within, collective.between] if isinstance(collective, Hierarchical) else [collective]
        for part in parts:
            name = part.component_name
            why = ""
            if isinstance(part, Native):
                why = f"{name} is an operation of one process group, which breaks when a rank is lost"
            elif isinstance(part, Pool):
                why = f"{name} maps memory for a fixed set of ranks"
            elif isinstance(part, Direct) and part.shares == "bandwidth":
                why = f"{name} divides the work by the links of all ranks"
            elif part.keeps_residuals:
                why = f"{name} keeps errors of sums, which would be lost with a rank"
            if why:
                raise Incompatible(f"{why}, and with quorum={self.quorum} ranks come and go; use collective ring")
