"""Elastic: ranks train with local steps, and every rank except rank 0 may be lost and return.

An exchange averages over the ranks that are present. It leaves out ranks that come more than `deadline` seconds after
`quorum` ranks were ready. A lost rank starts again from the outer copy (the parameters that all ranks share), without
inner optimizer state and residual.

Source: see `members.py`.
"""

import dataclasses
from typing import Annotated, Any

from annotated_types import Gt, Le
from typing_extensions import Doc, override

from bench.core.config.run import RunConfig
from bench.core.processes import own_rank
from bench.extensions.elastic.members import ElasticMembers
from bench.extensions.elastic.membership import Rendezvous
from bench.optimizers.base import Optimizer
from bench.strategies.base import BoundStrategy, Setup
from bench.strategies.local import Local, LocalTraining
from collectives.allreduce import Native
from collectives.base import Collective
from collectives.direct import Direct
from collectives.hierarchical import Hierarchical
from collectives.options import Count
from collectives.pool import Pool
from collectives.refusals import Refusal
from collectives.transport.failure_detector import host_seen_by_others
from compressors.base import Compressor


@dataclasses.dataclass(kw_only=True, eq=False)
class Elastic(Local, name="elastic"):
    """Exchange parameter differences among the ranks that are present, with the options of `local` and two more.

    Rank 0 evaluates and gathers the figures of all ranks.

    Raises:
        OptionError: an option needs all ranks at all times.
    """

    quorum: Annotated[Count, Doc("smallest number of ranks for an exchange; others may be lost and return")] = 1
    deadline: Annotated[float, Gt(0), Le(86400), Doc("seconds that ranks which are ready wait for the others")] = 10.0

    @override
    def _own_refusals(self) -> list[Refusal]:
        name = self.component_name
        return [
            Refusal(
                self.steps == "auto",
                f"{name}: steps=auto plans the steps of all ranks, and some may be lost",
                [{"strategy.steps": 30}],
            ),
            Refusal(
                self.delay > 0,
                f"{name}: delay={self.delay} leaves an exchange under way during later steps, and a rank may be lost "
                "meanwhile",
                [{"strategy.delay": 0}],
            ),
            Refusal(
                self.start_after > 0,
                f"{name}: start_after={self.start_after} averages the gradients of all ranks in the first steps, and "
                "some may be lost",
                [{"strategy.start_after": 0}],
            ),
            *super()._own_refusals(),
        ]

    @property
    @override
    def ranks_may_leave(self) -> bool:
        return True

    @property
    @override
    def default_collectives(self) -> tuple[str, ...]:
        return ("ring", "allgather")

    @override
    def refusals(
        self, config: RunConfig, compressor: Compressor, collective: Collective, optimizer: Optimizer
    ) -> list[Refusal]:
        name = self.component_name
        parts = [collective.within, collective.between] if isinstance(collective, Hierarchical) else [collective]
        bound = next(filter(None, map(_bound_to_all, parts)), "")
        numbers = range(self.quorum, config.replicas + 1)
        refused = ((n, each.reason) for n in numbers for each in collective.rank_refusals(n) if each.applies)
        present, impossible = next(refused, (0, ""))
        return [
            Refusal(
                config.checkpoint_every > 0,
                f"--checkpoint-every needs all ranks at the same step, and with {name} some may be lost; they start "
                "again without a checkpoint",
                [{"checkpoint_every": None}],
            ),
            Refusal(config.device == "cuda", f"{name} connects ranks on CPUs, not on cuda", [{"device": "cpu"}]),
            Refusal(bool(bound), f"{bound}, and with {name} ranks come and go", [{"collective": "ring"}]),
            Refusal(
                self.quorum > config.replicas,
                f"{name}: quorum={self.quorum} is more than the {config.replicas} ranks",
                [{"strategy.quorum": config.replicas}],
            ),
            Refusal(
                bool(impossible),
                f"with quorum={self.quorum} there may be {present} rank(s), and {impossible}",
                [{"collective": "ring"}],
            ),
            *super().refusals(config, compressor, collective, optimizer),
        ]

    @override
    def bind(self, setup: Setup) -> BoundStrategy:
        store = setup.rendezvous_store
        assert store is not None, "ranks that may leave need a store that outlives each of them"
        rendezvous = Rendezvous(
            rank=own_rank(),
            world_size=setup.config.world_size,
            store=store,
            host=host_seen_by_others(store),
            digest=setup.config.digest,
            timeout_s=setup.config.timeout_s,
            quorum=self.quorum,
            deadline_s=self.deadline,
            interval=self.interval,
        )
        return ElasticTraining(setup, self, ElasticMembers(setup.collective, rendezvous))


def _bound_to_all(part: Collective) -> str:
    """Return why a collective needs all ranks at all times; an empty text if it works when ranks are missing."""
    name = part.component_name
    if isinstance(part, Native):
        return f"{name} is an operation of one process group, which breaks when a rank is lost"
    if isinstance(part, Pool):
        return f"{name} maps memory for a fixed set of ranks"
    if isinstance(part, Direct) and part.shares == "bandwidth":
        return f"{name} divides the work by the links of all ranks"
    return f"{name} keeps errors of sums, which would be lost with a rank" if part.keeps_residuals else ""


class ElasticTraining(LocalTraining):
    """Train on this rank alone between exchanges; on rank 0, report the figures of all ranks that are present.

    Args:
        setup: the run's components and this rank's model.
        options: the strategy with its options.
        members: the ranks that take part in exchanges.
    """

    _members: ElasticMembers

    def __init__(self, setup: Setup, options: Elastic, members: ElasticMembers) -> None:
        super().__init__(setup, options, members)
        self._samples_per_step = setup.config.samples_per_step
        self.evaluates = own_rank() == 0

    @override
    def replica_figures(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return one dict of figures per rank; the samples of lost and late ranks are added to those of rank 0."""
        figures, missing = self._members.share_figures(own)
        figures[0] = own | {"samples": own["samples"] + missing * self._samples_per_step}
        return figures

    @override
    def columns(self) -> dict[str, Any]:
        membership = self._members.membership
        return {"ranks_lost": membership.num_lost, "ranks_returned": membership.num_returned}
