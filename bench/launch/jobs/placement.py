"""Place the ranks of a job on this machine, on several machines, or on virtual hosts."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from bench.core.config.job import DEFAULT_WORLD_SIZE, RanksConfig
from bench.core.environment import usable_cores
from bench.core.errors import UsageError
from bench.hosts.cluster import Cluster
from bench.hosts.cluster_options import cluster_from_options

C = TypeVar("C", bound=RanksConfig)


def place(options: C) -> C:
    """Return the configuration with numbers of hosts, ranks and threads, and with the virtual hosts' links as numbers.

    Raises:
        UsageError: options contradict each other, or the cluster is impossible.
    """
    cluster = cluster_from_options(options)
    if cluster is None:
        return _on_machines(options)
    _check_virtual(options, cluster)
    return dataclasses.replace(
        options,
        device="cpu",
        world_size=cluster.world_size,
        hosts=len(cluster.hosts),
        ranks_per_host=cluster.ranks_per_host,
        cluster=cluster.to_dict(),
        **cluster.columns(),
    ).choose(threads=max(1, usable_cores() // cluster.world_size))


def check_machines(config: RanksConfig) -> None:
    """Check the options of runs on several machines.

    Raises:
        UsageError: there is no --rdzv-endpoint, or --node-rank is too large.
    """
    if config.nnodes > 1 and not config.rdzv_endpoint:
        raise UsageError(
            "several machines need an address to meet at; give --rdzv-endpoint HOST:PORT of machine 0 on each of them"
        )
    if config.node_rank >= config.nnodes:
        raise UsageError(
            f"--node-rank {config.node_rank} does not exist among {config.nnodes} machines; they count from 0"
        )


def _check_virtual(options: RanksConfig, cluster: Cluster) -> None:
    if options.world_size not in (None, cluster.world_size):
        raise UsageError(
            f"--world-size {options.world_size} contradicts {len(cluster.hosts)} virtual hosts with "
            f"{cluster.ranks_per_host} rank(s) each; leave it out"
        )
    if options.device == "cuda":
        raise UsageError("virtual hosts share this machine and communicate through gloo; use --device cpu")
    if options.nnodes > 1:
        raise UsageError("virtual hosts are on one machine; leave out either --nnodes or the options of virtual hosts")


def _on_machines(options: C) -> C:
    config = options.choose(world_size=DEFAULT_WORLD_SIZE)
    if config.world_size % config.nnodes:
        raise UsageError(
            f"--world-size {config.world_size} cannot be divided over {config.nnodes} machines; make it a multiple of "
            "--nnodes"
        )
    ranks_per_host = config.world_size // config.nnodes
    return config.choose(
        hosts=config.nnodes, ranks_per_host=ranks_per_host, threads=max(1, usable_cores() // ranks_per_host)
    )
