"""Where the ranks of a job go: on this machine, on several machines, or on virtual hosts."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from bench.core.config.job import DEFAULT_WORLD_SIZE, RanksConfig
from bench.core.environment import usable_cores
from bench.core.errors import UsageError
from bench.hosts.cluster import Cluster
from bench.hosts.cluster_options import cluster_from_options

C = TypeVar("C", bound=RanksConfig)


def place(asked: C) -> C:
    """The configuration with its ranks on hosts and its links as numbers.

    Raises:
        UsageError: options that contradict each other, or a cluster that cannot be.
    """
    cluster = cluster_from_options(asked)
    if cluster is None:
        return _on_machines(asked)
    _check_virtual(asked, cluster)
    return dataclasses.replace(
        asked,
        device="cpu",
        world_size=cluster.world_size,
        hosts=len(cluster.hosts),
        ranks_per_host=cluster.ranks_per_host,
        cluster=cluster.to_dict(),
        **cluster.columns(),
    ).choose(threads=max(1, usable_cores() // cluster.world_size))


def check_machines(config: RanksConfig) -> None:
    """Several machines must know where they meet, and which of them this one is.

    Raises:
        UsageError: they do not.
    """
    if config.nnodes > 1 and not config.rdzv_endpoint:
        raise UsageError(
            "several machines need a meeting point; give --rdzv-endpoint HOST:PORT of machine 0 on each of them"
        )
    if config.node_rank >= config.nnodes:
        raise UsageError(
            f"--node-rank {config.node_rank} does not exist among {config.nnodes} machines; they count from 0"
        )


def _check_virtual(asked: RanksConfig, cluster: Cluster) -> None:
    if asked.world_size not in (None, cluster.world_size):
        raise UsageError(
            f"--world-size {asked.world_size} contradicts {len(cluster.hosts)} virtual hosts with "
            f"{cluster.ranks_per_host} rank(s) each; leave it out"
        )
    if asked.device == "cuda":
        raise UsageError("virtual hosts share this machine and talk through gloo; use --device cpu")
    if asked.nnodes > 1:
        raise UsageError("virtual hosts live on one machine; leave out either --nnodes or the options of virtual hosts")


def _on_machines(asked: C) -> C:
    config = asked.choose(world_size=DEFAULT_WORLD_SIZE)
    if config.world_size % config.nnodes:
        raise UsageError(
            f"--world-size {config.world_size} cannot be divided over {config.nnodes} machines; make it a multiple of "
            "--nnodes"
        )
    ranks_per_host = config.world_size // config.nnodes
    return config.choose(
        hosts=config.nnodes, ranks_per_host=ranks_per_host, threads=max(1, usable_cores() // ranks_per_host)
    )
