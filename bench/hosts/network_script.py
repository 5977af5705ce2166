"""The commands that build the private network: a switch, and one namespace with one link per virtual host.

They run inside a fresh network and mount namespace, so nothing of the machine's own network is seen or touched.
Source: Linux ip-netns(8), ip-link(8), veth(4).
"""

from __future__ import annotations

from bench.hosts import shaping
from bench.hosts.cluster import Cluster

INTERFACE = "eth0"
"""The interface's name on every virtual host."""
_SWITCH = "switch"


def namespace(index: int) -> str:
    """Name of a host's network namespace."""
    return f"bench{index}"


def port(index: int) -> str:
    """The switch's end of a host's link; what it sends is what the host receives."""
    return f"port{index}"


def build_commands(cluster: Cluster) -> list[list[str]]:
    """All commands, in order, as argument lists of `mount`, `ip` and `tc`."""
    commands = [
        # `ip netns` keeps its names in /run/netns, which only root may make on the machine itself.
        ["mount", "-t", "tmpfs", "none", "/run"],
        ["ip", "link", "set", "lo", "up"],
        ["ip", "link", "add", _SWITCH, "type", "bridge", "mcast_snooping", "0"],
        ["ip", "link", "set", _SWITCH, "addrgenmode", "none", "up"],
    ]
    for index in range(len(cluster.hosts)):
        commands += _host_commands(cluster, index)
    return commands


def inside(index: int, argv: list[str]) -> list[str]:
    """The command that runs another one on a virtual host."""
    return ["ip", "netns", "exec", namespace(index), *argv]


def name_lines(cluster: Cluster) -> str:
    """The hosts' names and addresses as lines of /etc/hosts; torch's sockets know IPv4 addresses by their IPv6 form."""
    named = [(cluster.address(index), host.name) for index, host in enumerate(cluster.hosts)]
    return "".join(f"\n{prefix}{address} {name}" for prefix in ("", "::ffff:") for address, name in named) + "\n"


def _host_commands(cluster: Cluster, index: int) -> list[list[str]]:
    host, name, far_end = cluster.hosts[index], namespace(index), port(index)
    on_host = ["ip", "-n", name]
    offload = shaping.offload_arguments(cluster)
    real_frames = cluster.wire_headers == "exact"
    commands = [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", far_end, "type", "veth", "peer", "name", INTERFACE, "netns", name],
        # No link-local addresses: their discovery traffic would show in the counters.
        ["ip", "link", "set", far_end, "addrgenmode", "none"],
        [*on_host, "link", "set", INTERFACE, "addrgenmode", "none"],
        ["ip", "link", "set", far_end, "master", _SWITCH, *offload, "up"],
        [*on_host, "addr", "add", f"{cluster.address(index)}/24", "dev", INTERFACE],
        [*on_host, "link", "set", INTERFACE, *offload, "up"],
        [*on_host, "link", "set", "lo", "up"],
    ]
    commands += [
        [command[0], "-n", name, *command[1:]]
        for command in shaping.uplink_commands(INTERFACE, host, real_frames=real_frames)
    ]
    return commands + shaping.downlink_commands(far_end, host, real_frames=real_frames)
