"""Which way the links of a cluster work on this machine: by the kernel's queues alone, or by our own forwarder.

Rates are the kernel's work, as are latency and loss where it has `netem`; without, they are the forwarder's. Jitter and
traces always are: `netem` lets packets that are delayed unequally overtake each other, and knows no traces.
"""

from __future__ import annotations

import dataclasses

from bench.core.errors import UsageError
from bench.hosts.cluster import Cluster
from bench.hosts.support import forwarder_supported, netem_supported


def settle(cluster: Cluster) -> Cluster:
    """The cluster with the way that its links will work here.

    Raises:
        UsageError: what was asked of its links is not possible here.
    """
    return dataclasses.replace(cluster, forwarded=cluster.forwarded or _needs_forwarder(cluster))


def _needs_forwarder(cluster: Cluster) -> bool:
    asked = _asked(cluster)
    if not asked:
        return False
    by_kernel, no_netem = (False, "") if {"jitter", "traces"} & set(asked) else netem_supported()
    if by_kernel:
        return False
    works, no_forwarder = forwarder_supported()
    if works:
        return True
    reasons = "; and ".join(reason for reason in (no_forwarder, no_netem) if reason)
    raise UsageError(f"{' and '.join(asked)} cannot be set here: {reasons}; or leave them out")


def _asked(cluster: Cluster) -> list[str]:
    """What plain queues cannot do, in words."""
    words = {
        "latency": any(host.latency_s for host in cluster.hosts),
        "jitter": any(host.jitter_s for host in cluster.hosts),
        "loss": any(host.loss for host in cluster.hosts),
        "traces": bool(cluster.traces),
    }
    return [word for word, wanted in words.items() if wanted]
