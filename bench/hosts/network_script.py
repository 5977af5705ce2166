"""The commands that build the private network: one namespace with one link per virtual host, and a switch.

The switch is the kernel's bridge, joined by pairs of virtual interfaces, or our own forwarder, which makes a TAP device
in every namespace between the two lists of commands.
They run inside a fresh network and mount namespace, so nothing of the machine's own network is seen or touched.
Source: Linux ip-netns(8), ip-link(8), veth(4).
"""

from __future__ import annotations

from bench.hosts import shaping
from bench.hosts.cluster import Cluster

INTERFACE = "eth0"
"""The interface's name on every virtual host."""
_SWITCH = "switch"
_TAP_FRAMES = "10000"


def namespace(index: int) -> str:
    """Name of a host's network namespace."""
    return f"bench{index}"


def port(index: int) -> str:
    """The switch's end of a host's link; what it sends is what the host receives."""
    return f"port{index}"


def namespace_commands(cluster: Cluster) -> list[list[str]]:
    """The namespaces, as argument lists of `mount` and `ip`, in order."""
    return [
        # `ip netns` keeps its names in /run/netns, which only root may make on the machine itself.
        ["mount", "-t", "tmpfs", "none", "/run"],
        ["ip", "link", "set", "lo", "up"],
        *(["ip", "netns", "add", namespace(index)] for index in range(len(cluster.hosts))),
    ]


def link_commands(cluster: Cluster) -> list[list[str]]:
    """Interfaces, addresses and links, as argument lists of `ip` and `tc`, in order."""
    commands = [] if cluster.forwarded else _switch_commands()
    for index in range(len(cluster.hosts)):
        commands += _tap_commands(cluster, index) if cluster.forwarded else _pair_commands(cluster, index)
    return commands


def ethernet_address(index: int) -> str:
    """By which the forwarder knows a host."""
    return f"02:00:00:00:{(index + 1) >> 8:02x}:{(index + 1) & 255:02x}"


def inside(index: int, argv: list[str]) -> list[str]:
    """The command that runs another one on a virtual host."""
    return ["ip", "netns", "exec", namespace(index), *argv]


def name_lines(cluster: Cluster) -> str:
    """The hosts' names and addresses as lines of /etc/hosts; torch's sockets know IPv4 addresses by their IPv6 form."""
    named = [(cluster.address(index), host.name) for index, host in enumerate(cluster.hosts)]
    return "".join(f"\n{prefix}{address} {name}" for prefix in ("", "::ffff:") for address, name in named) + "\n"


def _switch_commands() -> list[list[str]]:
    return [
        ["ip", "link", "add", _SWITCH, "type", "bridge", "mcast_snooping", "0"],
        ["ip", "link", "set", _SWITCH, "addrgenmode", "none", "up"],
    ]


def _pair_commands(cluster: Cluster, index: int) -> list[list[str]]:
    host, name, far_end = cluster.hosts[index], namespace(index), port(index)
    offload, own_offload = shaping.offload_arguments(cluster), shaping.own_offload_arguments(cluster, host)
    real_frames = cluster.wire_headers == "exact"
    return [
        ["ip", "link", "add", far_end, "type", "veth", "peer", "name", INTERFACE, "netns", name],
        # No link-local addresses: their discovery traffic would show in the counters.
        ["ip", "link", "set", far_end, "addrgenmode", "none"],
        ["ip", "link", "set", far_end, "master", _SWITCH, *offload, "up"],
        *_interface_commands(cluster, index, own_offload),
        *_on(name, shaping.uplink_commands(INTERFACE, host, real_frames=real_frames)),
        *shaping.downlink_commands(far_end, host, real_frames=real_frames),
    ]


def _tap_commands(cluster: Cluster, index: int) -> list[list[str]]:
    """The rest of a link is the forwarder's work; the queue holds what comes while other processes keep it waiting."""
    rate = shaping.uplink_rate_commands(INTERFACE, cluster.hosts[index], real_frames=True)
    own = ["address", ethernet_address(index), "txqueuelen", _TAP_FRAMES, *shaping.offload_arguments(cluster)]
    return [*_interface_commands(cluster, index, own), *_on(namespace(index), rate)]


def _interface_commands(cluster: Cluster, index: int, settings: list[str]) -> list[list[str]]:
    on_host = ["ip", "-n", namespace(index)]
    return [
        [*on_host, "link", "set", INTERFACE, "addrgenmode", "none"],
        [*on_host, "addr", "add", f"{cluster.address(index)}/24", "dev", INTERFACE],
        [*on_host, "link", "set", INTERFACE, *settings, "up"],
        [*on_host, "link", "set", "lo", "up"],
    ]


def _on(name: str, commands: list[list[str]]) -> list[list[str]]:
    """Commands of `tc` for interfaces of another namespace."""
    return [[command[0], "-n", name, *command[1:]] for command in commands]
