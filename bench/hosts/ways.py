"""Which way the links of a cluster work on this machine: by the kernel's queues alone, or by our own forwarder.

Rates are the kernel's work, as are latency and loss where it has `netem`; without, they are the forwarder's. Jitter and
traces always are: `netem` lets packets that are delayed unequally overtake each other, and knows no traces.
"""

from __future__ import annotations

import dataclasses

from bench.core.errors import UsageError
from bench.hosts.cluster import Cluster
from bench.hosts.support import forwarder_supported, hosts_supported, netem_supported

MOST_LATENCY_S = 1.4
"""Hosts look for each other's addresses over these links too, and the kernel waits 3 s for the answer."""


def settle_here(cluster: Cluster) -> Cluster:
    """The same, where it is not known yet whether there can be virtual hosts at all.

    Raises:
        UsageError: there cannot, or what was asked of their links is not possible here.
    """
    supported, reason = hosts_supported()
    if not supported:
        raise UsageError(f"virtual hosts do not work here: {reason}")
    return settle(cluster)


def settle(cluster: Cluster) -> Cluster:
    """The cluster with the way that its links will work here.

    Raises:
        UsageError: what was asked of its links is not possible here.
    """
    slowest_s = max(host.latency_s + host.jitter_s for host in cluster.hosts)
    if slowest_s > MOST_LATENCY_S:
        raise UsageError(
            f"a latency of {slowest_s:g} s, jitter included, is more than virtual hosts find each other over; choose "
            f"{MOST_LATENCY_S:g} s at most"
        )
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
