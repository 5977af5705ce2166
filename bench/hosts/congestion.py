"""TCP's congestion control on virtual hosts: one that does not depend on how this machine is set up.

A new namespace inherits the machine's. With `bbr`, for one, connections that take turns on a link slow each other
down and one sum in three takes half as long again; results would hang on a setting that nobody sees.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from bench.hosts.cluster import Cluster
from bench.hosts.namespace_thread import start_in
from bench.hosts.network_script import namespace

# The only one that every kernel has and every namespace may choose.
CONGESTION_CONTROL = "reno"
_SETTING = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def settle(cluster: Cluster) -> str:
    """Set it on every virtual host, whose namespaces must exist; returns what stands there now."""
    names = {start_in(namespace(index), partial(_write, _SETTING)).result() for index in range(len(cluster.hosts))}
    return " ".join(sorted(names))


def congestion_warnings(congestion_control: str) -> list[str]:
    """What the user must know of what `settle` returned."""
    if congestion_control == CONGESTION_CONTROL:
        return []
    return [
        f"TCP runs with this machine's congestion control ({congestion_control}), as {CONGESTION_CONTROL} could not be"
        " set; compare times only with runs that did likewise"
    ]


def _write(setting: Path) -> str:
    """Returns what stands there afterwards: some sandboxes show the setting and let nobody write it."""
    with contextlib.suppress(OSError):  # the warning tells it
        setting.write_text(CONGESTION_CONTROL, encoding="ascii")
    return setting.read_text(encoding="ascii").strip()
