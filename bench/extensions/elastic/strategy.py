"""Ranks of strategy `local` that may be lost and return; rank 0 evaluates and gathers the figures of all ranks."""

from typing import Any

from bench.core.processes import own_rank
from bench.extensions.elastic.members import ElasticMembers
from bench.extensions.elastic.membership import Rendezvous
from bench.extensions.elastic.options import ElasticOptions
from bench.strategies.base import ReportsForOthers, Setup
from collectives.transport.failure_detector import host_seen_by_others


def elastic(setup: Setup, options: ElasticOptions) -> tuple[ElasticMembers, ReportsForOthers, bool]:
    """Return the members of the run, what reports the work of all of them, and whether this rank evaluates."""
    config, store = setup.config, setup.rendezvous_store
    assert store is not None, "ranks that may leave need a store that outlives each of them"
    rendezvous = Rendezvous(
        rank=own_rank(),
        world_size=config.world_size,
        store=store,
        host=host_seen_by_others(store),
        digest=config.digest,
        timeout_s=config.timeout_s,
    )
    members = ElasticMembers(setup.collective, rendezvous, options)
    return members, _Figures(members, config.samples_per_step), own_rank() == 0


class _Figures:
    """Reports the figures of all ranks that are there, on rank 0."""

    def __init__(self, members: ElasticMembers, samples_per_step: int) -> None:
        self._members, self._samples_per_step = members, samples_per_step

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
