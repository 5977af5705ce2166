"""The options of local steps of ranks that may be lost and return, and what they cannot be combined with."""

import dataclasses
from typing import Annotated

from annotated_types import Gt, Le
from typing_extensions import Doc, override

from collectives.allreduce import Native
from collectives.base import Collective
from collectives.direct import Direct
from collectives.hierarchical import Hierarchical
from collectives.options import CountOrZero
from collectives.pool import Pool
from collectives.refusals import Refusal
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
    def _own_refusals(self) -> list[Refusal]:
        name, has_quorum = self.component_name, self.quorum > 0
        return [
            *super()._own_refusals(),
            Refusal(
                self.steps == "auto" and has_quorum,
                f"{name}: steps=auto plans the steps of all ranks, and with quorum={self.quorum} some may be lost",
                [{"strategy.steps": 30}, {"strategy.quorum": None}],
            ),
            Refusal(
                has_quorum and self.delay > 0,
                f"{name}: delay={self.delay} leaves an exchange under way during later steps, and with quorum="
                f"{self.quorum} a rank may be lost meanwhile",
                [{"strategy.delay": 0}],
            ),
            Refusal(
                has_quorum and self.start_after > 0,
                f"{name}: start_after={self.start_after} averages the gradients of all ranks in every first step, and "
                f"with quorum={self.quorum} some may be lost",
                [{"strategy.start_after": 0}],
            ),
            Refusal(
                not has_quorum and self.deadline != type(self).deadline,
                f"{name}: deadline={self.deadline:g} bounds the wait for ranks that a quorum goes on without",
                [{"strategy.quorum": 1}, {"strategy.deadline": None}],
            ),
        ]

    def quorum_refusals(self, collective: Collective, world_size: int) -> list[Refusal]:
        """Return why a collective does not work with any number of ranks from the quorum to all, as members change."""
        parts = [collective.within, collective.between] if isinstance(collective, Hierarchical) else [collective]
        bound = next(filter(None, map(_bound_to_all, parts)), "") if self.quorum else ""
        numbers = range(self.quorum, world_size + 1) if self.quorum else ()
        refused = ((n, each.reason) for n in numbers for each in collective.rank_refusals(n) if each.applies)
        impossible = next(refused, None)
        return [
            Refusal(
                bool(bound),
                f"{bound}, and with quorum={self.quorum} ranks come and go",
                [{"collective": "ring"}],
            ),
            Refusal(
                self.quorum > world_size,
                f"{self.component_name}: quorum={self.quorum} is more than the {world_size} ranks",
                [{"strategy.quorum": world_size}],
            ),
            Refusal(
                impossible is not None,
                f"with quorum={self.quorum} there may be {{}} rank(s), and {{}}".format(*impossible or ("", "")),
                [{"collective": "ring"}],
            ),
        ]


def _bound_to_all(part: Collective) -> str:
    """Return why a collective needs all ranks at all times; empty if it does not."""
    name = part.component_name
    if isinstance(part, Native):
        return f"{name} is an operation of one process group, which breaks when a rank is lost"
    if isinstance(part, Pool):
        return f"{name} maps memory for a fixed set of ranks"
    if isinstance(part, Direct) and part.shares == "bandwidth":
        return f"{name} divides the work by the links of all ranks"
    return f"{name} keeps errors of sums, which would be lost with a rank" if part.keeps_residuals else ""
