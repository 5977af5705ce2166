"""Elastic: local steps of ranks that may be lost and return, except for rank 0.

An exchange averages over all ranks that are there, except for those that come more than `deadline` seconds after
`quorum` ranks were ready. A lost rank starts again from the outer copy, without inner optimizer state and residual.

Source: as `members.py`.
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
from bench.strategies.base import BoundStrategy, Setup, refuse
from bench.strategies.local import Local, LocalTraining
from collectives.allreduce import Native
from collectives.base import Collective
from collectives.direct import Direct
from collectives.hierarchical import Hierarchical
from collectives.options import Count, Incompatible, OptionError, incompatibility
from collectives.pool import Pool
from collectives.transport.failure_detector import host_seen_by_others
from compressors.base import Compressor


@dataclasses.dataclass(kw_only=True, eq=False)
class Elastic(Local, name="elastic"):
    """Exchange differences of parameters among the ranks that are there; the other options are those of `local`.

    Rank 0 evaluates and gathers the figures of all ranks.

    Raises:
        OptionError: an option needs all ranks at all times.
    """

    quorum: Annotated[Count, Doc("smallest number of ranks for an exchange; others may be lost and return")] = 1
    deadline: Annotated[float, Gt(0), Le(86400), Doc("seconds that ranks which are ready wait for the others")] = 10.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        obstacles = (
            (
                self.steps == "auto",
                "steps=auto plans the steps of all ranks, and some may be lost; use a number of steps",
            ),
            (
                self.delay > 0,
                f"delay={self.delay} leaves an exchange under way during later steps, and a rank may be lost "
                "meanwhile; use delay=0",
            ),
            (
                self.start_after > 0,
                f"start_after={self.start_after} averages the gradients of all ranks in every first step, and some may "
                "be lost; use start_after=0",
            ),
        )
        if reason := next((sentence for applies, sentence in obstacles if applies), None):
            raise OptionError(f"{self.component_name}: {reason}")

    @property
    @override
    def ranks_may_leave(self) -> bool:
        return True

    @property
    @override
    def default_collectives(self) -> tuple[str, ...]:
        return ("ring", "allgather")

    @override
    def check_compatible(
        self, config: RunConfig, compressor: Compressor, collective: Collective, optimizer: Optimizer
    ) -> None:
        super().check_compatible(config, compressor, collective, optimizer)
        name = self.component_name
        refuse(
            (
                config.checkpoint_every > 0,
                f"--checkpoint-every needs all ranks at one step, and with {name} some may be lost; leave it out, "
                "because a lost rank starts again by itself",
            ),
            (config.device == "cuda", f"{name} connects ranks on CPUs; use --device cpu"),
            (
                self.quorum > config.replicas,
                f"{name}: quorum={self.quorum} is more than the {config.replicas} ranks; lower it",
            ),
        )
        for present in range(self.quorum, config.replicas + 1):
            if reason := incompatibility(collective.check_ranks, present):
                raise Incompatible(f"with quorum={self.quorum} there may be {present} rank(s), and {reason}")

    @override
    def check_pair(self, compressor: Compressor, collective: Collective) -> None:
        super().check_pair(compressor, collective)
        for part in (collective.within, collective.between) if isinstance(collective, Hierarchical) else (collective,):
            obstacles = (
                (isinstance(part, Native), "is an operation of one process group, which breaks when a rank is lost"),
                (isinstance(part, Pool), "maps memory for a fixed set of ranks"),
                (isinstance(part, Direct) and part.shares == "bandwidth", "divides the work by the links of all ranks"),
                (part.keeps_residuals, "keeps errors of sums, which would be lost with a rank"),
            )
            advice = f"and with {self.component_name} ranks come and go; use collective ring"
            refuse(*((applies, f"{part.component_name} {why}, {advice}") for applies, why in obstacles))

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


class ElasticTraining(LocalTraining):
    """Train on this rank alone between exchanges; on rank 0, report the figures of all ranks that are there.

    Args:
        setup: the run's components and this rank's model.
        options: the strategy with its options.
        members: who takes part in the exchanges.
    """

    _members: ElasticMembers

    def __init__(self, setup: Setup, options: Elastic, members: ElasticMembers) -> None:
        super().__init__(setup, options, members)
        self._samples_per_step = setup.config.samples_per_step
        self.reporter, self.evaluates = self, own_rank() == 0

    def replica_figures(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the figures of these ranks; those of rank 0 include the samples of the others."""
        figures, missing = self._members.share_figures(own)
        membership = self._members.membership
        figures[0] = own | {
            "samples": own["samples"] + missing * self._samples_per_step,
            "ranks_lost": membership.num_lost,
            "ranks_returned": membership.num_returned,
        }
        return figures

    def link_rows(self, num_steps: int) -> list[dict[str, Any]]:
        """Return no rows, because no rank has a link of its own to report."""
        return []
