"""The commands that build the private network: one namespace with one link per virtual host, and a switch.

The switch is the kernel's bridge, joined by pairs of virtual interfaces, or our own forwarder, which makes a TAP device
in every namespace between the two lists of commands.
They run inside a fresh network and mount namespace, so nothing of the machine's own network is seen or touched.
Source: Linux ip-netns(8), ip-link(8), veth(4).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from bench.core.interface import FRAME_BYTES
from bench.hosts.cluster import Cluster, HostLink

# What a full queue may hold: below it the link drops, as a switch or a home router does.
_QUEUE_S = 0.2
_MIN_QUEUE_BYTES = 65536
_BURST_S = 1e-3
_NUM_PACKETS_UNLIMITED = 100_000
_MAX_FRAMES_OFFLOADED = 65536 // FRAME_BYTES
"""in one packet, of 64 kB at most"""


def burst_bytes(rate_bps: float, *, real_frames: bool) -> int:
    """How much may pass at once after a silence: max(2 frames, rate x 1 ms), but at most 3 frames if frames are real.

    A bucket too small loses the tokens of a timer that fires late; one too large lets short messages travel free: with
    1 ms (12.5 kB) at 100 Mbit/s, 100 kB after a silence pass 12 % too fast, with 3 frames 4 %. With offload one packet
    alone may be 64 kB, so the cap does not apply.
    """
    burst = max(2 * FRAME_BYTES, math.ceil(rate_bps / 8 * _BURST_S))
    return min(burst, 3 * FRAME_BYTES) if real_frames else burst


def queue_bytes(rate_bps: float) -> int:
    """What may wait for a link of this rate: 200 ms of it, at least 64 kB; more is dropped."""
    return max(_MIN_QUEUE_BYTES, math.ceil(rate_bps / 8 * _QUEUE_S))


def offload_arguments(cluster: Cluster) -> list[str]:
    """Arguments of `ip link set` that make every packet one real frame; none where offload stays on."""
    if cluster.wire_headers == "estimated":
        return []
    return ["gso_max_size", str(FRAME_BYTES), "gso_max_segs", "1"]


def own_offload_arguments(cluster: Cluster, host: HostLink) -> list[str]:
    """The same for a host's own end, whose packets are to pass its rate limiter whole.

    A larger one would be cut into single frames there, each of which costs as much as a whole packet.
    """
    if cluster.wire_headers == "exact" or host.uplink_bps is None:
        return offload_arguments(cluster)
    frames = burst_bytes(host.uplink_bps, real_frames=False) // FRAME_BYTES
    return ["gso_max_segs", str(frames)] if frames < _MAX_FRAMES_OFFLOADED else []


def uplink_rate_commands(device: str, host: HostLink, *, real_frames: bool) -> list[list[str]]:
    """`tc` commands for the rate at which a host sends."""
    return _rate_commands(device, host.uplink_bps, real_frames=real_frames)


def uplink_commands(device: str, host: HostLink, *, real_frames: bool) -> list[list[str]]:
    """`tc` commands for what a host sends: its rate, and below it delay and loss."""
    commands = uplink_rate_commands(device, host, real_frames=real_frames)
    if not host.impaired:
        return commands
    place = ["parent", "1:1", "handle", "10:"] if commands else ["root", "handle", "10:"]
    netem = ["tc", "qdisc", "add", "dev", device, *place, "netem", "limit", str(_num_delayed_packets(host))]
    if host.latency_s:
        netem += ["delay", f"{round(host.latency_s * 1e6)}us"]
    if host.loss:
        netem += ["loss", f"{host.loss * 100:.6f}%"]
    return [*commands, netem]


def downlink_commands(device: str, host: HostLink, *, real_frames: bool) -> list[list[str]]:
    """`tc` commands for what a host receives: only its rate, delay belongs to the sender."""
    return _rate_commands(device, host.downlink_bps, real_frames=real_frames)


def _rate_commands(device: str, rate_bps: float | None, *, real_frames: bool) -> list[list[str]]:
    if rate_bps is None:
        return []
    burst = burst_bytes(rate_bps, real_frames=real_frames)
    queue = queue_bytes(rate_bps) + burst
    tbf = ["tbf", "rate", f"{round(rate_bps)}bit", "burst", str(burst), "limit", str(queue)]
    return [["tc", "qdisc", "add", "dev", device, "root", "handle", "1:", *tbf]]


def _num_delayed_packets(host: HostLink) -> int:
    """Room for the packets under way and a full queue; netem's default of 1000 would silently cap the rate."""
    if host.uplink_bps is None:
        return _NUM_PACKETS_UNLIMITED
    held_s = host.latency_s + _QUEUE_S
    return 100 + math.ceil(host.uplink_bps / 8 * held_s / FRAME_BYTES)


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
    offload, own_offload = offload_arguments(cluster), own_offload_arguments(cluster, host)
    real_frames = cluster.wire_headers == "exact"
    return [
        ["ip", "link", "add", far_end, "type", "veth", "peer", "name", INTERFACE, "netns", name],
        # No link-local addresses: their discovery traffic would show in the counters.
        ["ip", "link", "set", far_end, "addrgenmode", "none"],
        ["ip", "link", "set", far_end, "master", _SWITCH, *offload, "up"],
        *_interface_commands(cluster, index, own_offload),
        *_on(name, uplink_commands(INTERFACE, host, real_frames=real_frames)),
        *downlink_commands(far_end, host, real_frames=real_frames),
    ]


def _tap_commands(cluster: Cluster, index: int) -> list[list[str]]:
    """The rest of a link is the forwarder's work; the queue holds what comes while other processes keep it waiting."""
    rate = uplink_rate_commands(INTERFACE, cluster.hosts[index], real_frames=True)
    own = ["address", ethernet_address(index), "txqueuelen", _TAP_FRAMES, *offload_arguments(cluster)]
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


Result = TypeVar("Result")

_CLONE_NEWNET = 0x40000000


def start_in(namespace: str, fn: Callable[[], Result]) -> Future[Result]:
    """Run `fn` in a new thread whose network namespace is the given one; the thread ends with `fn`.

    Args:
        namespace: a name that `ip netns` knows.
        fn: what to run.
    """
    outcome: Future[Result] = Future()

    def body() -> None:
        try:
            _enter(namespace)
            outcome.set_result(fn())
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            outcome.set_exception(error)

    threading.Thread(target=body, name=f"in-{namespace}", daemon=True).start()
    return outcome


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns exists from Python 3.12 on
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), namespace)
    finally:
        os.close(descriptor)


# The only one that every kernel has and every namespace may choose.
CONGESTION_CONTROL = "reno"
_SETTING = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def set_congestion_control(cluster: Cluster) -> str:
    """Set it on every virtual host, whose namespaces must exist; returns what stands there now."""
    names = {start_in(namespace(index), partial(_write, _SETTING)).result() for index in range(len(cluster.hosts))}
    return " ".join(sorted(names))


def congestion_warnings(congestion_control: str) -> list[str]:
    """What the user must know of what `set_congestion_control` returned."""
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


_SETTINGS = Path("/proc/sys/net/bridge")


def disable_packet_filters() -> None:
    """For the bridges of this process's own network namespace."""
    for setting in _SETTINGS.glob("bridge-nf-call-*"):
        with contextlib.suppress(OSError):  # some sandboxes let nobody write it: frames then take longer, and arrive
            setting.write_text("0", encoding="ascii")
