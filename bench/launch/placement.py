"""Where the ranks of a run go: on this machine, on several machines, or on virtual hosts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from bench.core.environment import usable_cores
from bench.core.errors import UsageError
from bench.launch.cluster import Cluster
from bench.launch.cluster_options import cluster_from_options
from bench.launch.request import DEFAULT_WORLD_SIZE, HostsRequest, Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """How many ranks on which hosts; field names are those of `RunConfig`."""

    world_size: int
    hosts: int
    ranks_per_host: int
    threads: int
    cluster: dict[str, Any] | None = None
    uplink_bps: float | None = None
    downlink_bps: float | None = None
    latency_s: float | None = None


def place(request: Request) -> Placement:
    """Decide it, with every default filled in.

    Raises:
        UsageError: options that contradict each other, or a cluster that cannot be.
    """
    cluster = requested_cluster(request, request.world_size, request.device)
    if cluster is None:
        return _on_machines(request)
    if request.nnodes > 1:
        raise UsageError("virtual hosts live on one machine; leave out either --nnodes or the options of virtual hosts")
    return Placement(
        world_size=cluster.world_size,
        hosts=len(cluster.hosts),
        ranks_per_host=cluster.ranks_per_host,
        threads=request.threads or max(1, usable_cores() // cluster.world_size),
        cluster=json.loads(cluster.to_json()),
        uplink_bps=cluster.uplink_bps,
        downlink_bps=cluster.downlink_bps,
        latency_s=cluster.latency_s,
    )


def requested_cluster(request: HostsRequest, world_size: int | None, device: str) -> Cluster | None:
    """The virtual hosts that are asked for, if any.

    Args:
        request: with the options of virtual hosts.
        world_size: as given beside them; None: not given.
        device: likewise.

    Raises:
        UsageError: options that contradict each other, or a cluster that cannot be.
    """
    if request.hosts is None and request.ranks_per_host is not None:
        raise UsageError("--ranks-per-host deals ranks to virtual hosts; say how many with --hosts N")
    cluster = cluster_from_options(
        hosts=request.hosts,
        ranks_per_host=request.ranks_per_host or 1,
        cluster_file=Path(request.cluster) if request.cluster else None,
        network=request.network,
        bandwidth=request.bandwidth,
        uplink=request.uplink,
        downlink=request.downlink,
        latency=request.latency,
        jitter=request.jitter,
        loss=request.loss,
    )
    if cluster is None:
        return None
    if world_size not in (None, cluster.world_size):
        raise UsageError(
            f"--world-size {world_size} contradicts {len(cluster.hosts)} virtual hosts with "
            f"{cluster.ranks_per_host} rank(s) each; leave it out"
        )
    if device == "cuda":
        raise UsageError("virtual hosts share this machine and talk through gloo; use --device cpu")
    return cluster


def _on_machines(request: Request) -> Placement:
    world_size = request.world_size or DEFAULT_WORLD_SIZE
    if world_size % request.nnodes:
        raise UsageError(
            f"--world-size {world_size} cannot be divided over {request.nnodes} machines; "
            "make it a multiple of --nnodes"
        )
    if request.nnodes > 1 and not request.rdzv_endpoint:
        raise UsageError(
            "several machines need a meeting point; give --rdzv-endpoint HOST:PORT of machine 0 on each of them"
        )
    if request.node_rank >= request.nnodes:
        raise UsageError(
            f"--node-rank {request.node_rank} does not exist among {request.nnodes} machines; they count from 0"
        )
    ranks_per_host = world_size // request.nnodes
    return Placement(
        world_size=world_size,
        hosts=request.nnodes,
        ranks_per_host=ranks_per_host,
        threads=request.threads or max(1, usable_cores() // ranks_per_host),
    )
