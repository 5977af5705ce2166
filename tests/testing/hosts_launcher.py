"""A launcher in its own process, for tests that kill it or run it as another user.

``python -m tests.testing.hosts_launcher RUN_DIR COMMAND...`` starts the command on two hosts at 100 Mbit/s, says so,
and waits.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.hosts.cluster import Cluster, HostLink
from bench.hosts.job import start_hosts


def main(run_dir: str, *command: str) -> int:
    link = HostLink(name="any", uplink_bps=100e6, downlink_bps=100e6)
    with start_hosts(Cluster.uniform(2, link=link), Path(run_dir), lambda index: (command, {})) as job:
        print("running", flush=True)
        return job.wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
