"""TCP's congestion control on virtual hosts: one that does not depend on how this machine is set up.

A new namespace inherits the machine's. With `bbr`, for one, connections that take turns on a link slow each other
down and one sum in three takes half as long again; results would hang on a setting that nobody sees.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from bench.launch.cluster import Cluster
from bench.launch.namespace_thread import start_in
from bench.launch.network_script import namespace

# cubic is what Linux comes with; a private namespace may choose it only where the machine uses or permits it, and
# reno always. On links without loss and with a short round trip the two hardly differ.
_PREFERRED = ("cubic", "reno")
_SETTING = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def settle(cluster: Cluster) -> str:
    """Set it on every virtual host, whose namespaces must exist; returns its name."""
    names = {start_in(namespace(index), partial(_choose, _SETTING)).result() for index in range(len(cluster.hosts))}
    return " ".join(sorted(names))


def _choose(setting: Path) -> str:
    """Write the first that is permitted; returns what then stands there."""
    for name in _PREFERRED:
        try:
            setting.write_text(name, encoding="ascii")
            break
        except OSError:
            continue  # not permitted here; the next one is simpler
    return setting.read_text(encoding="ascii").strip()
