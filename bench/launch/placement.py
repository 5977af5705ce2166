"""Where the ranks of a job go: on this machine, on several machines, or on virtual hosts."""

from __future__ import annotations

import dataclasses
from typing import Any

from bench.core.environment import usable_cores
from bench.core.errors import UsageError
from bench.core.request import DEFAULT_WORLD_SIZE, HostsRequest, Request
from bench.hosts.cluster import Cluster
from bench.hosts.cluster_options import cluster_from_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """How many ranks on which hosts; field names are those of `RunConfig` and `CollectivesConfig`."""

    world_size: int
    hosts: int
    ranks_per_host: int
    threads: int
    cluster: dict[str, Any] | None = None
    uplink_bps: float | None = None
    downlink_bps: float | None = None
    latency_s: float | None = None


def place(request: HostsRequest, nnodes: int = 1) -> Placement:
    """Decide it, with every default filled in.

    Args:
        request: where the user wants them.
        nnodes: machines that share the job.

    Raises:
        UsageError: options that contradict each other, or a cluster that cannot be.
    """
    cluster = cluster_from_options(request)
    if cluster is None:
        return _on_machines(request, nnodes)
    _check_virtual(request, cluster, nnodes)
    return Placement(
        world_size=cluster.world_size,
        hosts=len(cluster.hosts),
        ranks_per_host=cluster.ranks_per_host,
        threads=request.threads or max(1, usable_cores() // cluster.world_size),
        cluster=cluster.to_dict(),
        uplink_bps=cluster.uplink_bps,
        downlink_bps=cluster.downlink_bps,
        latency_s=cluster.latency_s,
    )


def check_machines(request: Request) -> None:
    """Several machines must know where they meet, and which of them this one is.

    Raises:
        UsageError: they do not.
    """
    if request.nnodes > 1 and not request.rdzv_endpoint:
        raise UsageError(
            "several machines need a meeting point; give --rdzv-endpoint HOST:PORT of machine 0 on each of them"
        )
    if request.node_rank >= request.nnodes:
        raise UsageError(
            f"--node-rank {request.node_rank} does not exist among {request.nnodes} machines; they count from 0"
        )


def _check_virtual(request: HostsRequest, cluster: Cluster, nnodes: int) -> None:
    if request.world_size not in (None, cluster.world_size):
        raise UsageError(
            f"--world-size {request.world_size} contradicts {len(cluster.hosts)} virtual hosts with "
            f"{cluster.ranks_per_host} rank(s) each; leave it out"
        )
    if request.device == "cuda":
        raise UsageError("virtual hosts share this machine and talk through gloo; use --device cpu")
    if nnodes > 1:
        raise UsageError("virtual hosts live on one machine; leave out either --nnodes or the options of virtual hosts")


def _on_machines(request: HostsRequest, nnodes: int) -> Placement:
    world_size = request.world_size or DEFAULT_WORLD_SIZE
    if world_size % nnodes:
        raise UsageError(
            f"--world-size {world_size} cannot be divided over {nnodes} machines; make it a multiple of --nnodes"
        )
    ranks_per_host = world_size // nnodes
    return Placement(
        world_size=world_size,
        hosts=nnodes,
        ranks_per_host=ranks_per_host,
        threads=request.threads or max(1, usable_cores() // ranks_per_host),
    )
