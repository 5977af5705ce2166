"""A launcher in its own process, for tests that kill it or run it as another user.

``python -m tests.testing.hosts_launcher COMMAND...`` starts the command on two hosts at 100 Mbit/s, prints "running",
and waits.
"""

from __future__ import annotations

import sys

from bench.hosts.cluster import Cluster, HostLink
from bench.hosts.virtual_network import VirtualNetwork


def main(*command: str) -> int:
    link = HostLink(name="any", uplink_bps=100e6, downlink_bps=100e6)
    with VirtualNetwork(Cluster.uniform(2, link=link)) as network:
        hosts = [network.start(index, command) for index in range(2)]
        print("running", flush=True)
        return max(host.wait() for host in hosts)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
