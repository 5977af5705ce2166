"""What the forwarder between virtual hosts carries on this machine: two hosts send to each other without a limit."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from bench.core import signals
from bench.hosts.cluster import Cluster
from bench.hosts.job import start_hosts


def forwarded_bps() -> float:
    """Bits per second, all links together, frames counted whole; takes about two seconds.

    Raises:
        UsageError: there are no virtual hosts here, or there is no forwarder.
        RunFailed: they could not be set up.
    """
    cluster = dataclasses.replace(Cluster.uniform(2), forwarded=True)
    with signals.interruptible(), tempfile.TemporaryDirectory() as folder:
        with start_hosts(cluster, Path(folder), lambda index: (["true"], {})) as job:
            job.wait()
        return sum(flow.long_bps for flow in job.network.flows)
