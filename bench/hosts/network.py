"""The private network: commands that build a namespace and a link per virtual host, and settings inside namespaces.

The switch is either the kernel's bridge, connected by pairs of virtual interfaces, or this project's forwarder, for
which a TAP device is made in every namespace before the commands for links run. All commands run inside new network and
mount namespaces, so the machine's own network is neither visible nor changed.
Source: Linux ip-netns(8), ip-link(8), veth(4).
"""

import contextlib
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from bench.core.counters import FRAME_BYTES
from bench.core.processes import enter_namespaces
from bench.hosts.cluster import Cluster, HostLink

# Size of a link's queue, in seconds at the link's rate. A full queue drops packets, as in a switch or a home router.
_QUEUE_S = 0.2
_MIN_QUEUE_BYTES = 65536
_BURST_S = 1e-3
_NUM_PACKETS_UNLIMITED = 100_000
# Frames in the largest packet with segmentation offload, which has 64 kB.
_MAX_FRAMES_OFFLOADED = 65536 // FRAME_BYTES


def burst_bytes(rate_bps: float, *, real_frames: bool) -> int:
    """Return a token bucket's size in bytes: 1 ms at the link's rate, but at least 2 frames (`real_frames`: at most 3).

    A bucket that is too small loses tokens when a timer fires late. A bucket that is too large lets short messages pass
    too fast: at 100 Mbit/s, 100 kB after a silence pass 12 % too fast with a bucket of 1 ms (12.5 kB), and 4 % too fast
    with a bucket of 3 frames.

    Args:
        rate_bps: the link's rate in bits per second.
        real_frames: True if every packet is a single Ethernet frame. If not, segmentation offload allows packets of up
            to 64 kB, and the bucket's size has no upper limit.
    """
    burst = max(2 * FRAME_BYTES, math.ceil(rate_bps / 8 * _BURST_S))
    return min(burst, 3 * FRAME_BYTES) if real_frames else burst


def queue_bytes(rate_bps: float) -> int:
    """Return the size in bytes of a link's queue: 200 ms at its rate, at least 64 kB; a full queue drops frames."""
    return max(_MIN_QUEUE_BYTES, math.ceil(rate_bps / 8 * _QUEUE_S))


def offload_arguments(cluster: Cluster, uplink_bps: float | None = None) -> list[str]:
    """Return arguments of `ip link set` that limit the size of packets; none if segmentation offload is not limited.

    Args:
        cluster: the hosts and their links.
        uplink_bps: rate to which a host's own interface is limited by a token bucket; None: the interface has no
            bucket. Packets must fit into the bucket: a larger packet would be split into single frames, each of which
            costs as much CPU time as a packet.
    """
    if cluster.wire_headers == "exact":  # every packet is one real frame
        return ["gso_max_size", str(FRAME_BYTES), "gso_max_segs", "1"]
    if uplink_bps is None:
        return []
    frames = burst_bytes(uplink_bps, real_frames=False) // FRAME_BYTES
    return ["gso_max_segs", str(frames)] if frames < _MAX_FRAMES_OFFLOADED else []


def rate_commands(device: str, rate_bps: float | None, *, real_frames: bool) -> list[list[str]]:
    """Return the `tc` commands that limit the rate at which a device sends; none if the rate is not limited.

    Args:
        device: name of the network interface.
        rate_bps: the rate in bits per second; None: not limited.
        real_frames: True if every packet is a single Ethernet frame, without segmentation offload.
    """
    if rate_bps is None:
        return []
    burst = burst_bytes(rate_bps, real_frames=real_frames)
    tbf = ["tbf", "rate", f"{round(rate_bps)}bit", "burst", str(burst), "limit", str(queue_bytes(rate_bps) + burst)]
    return [["tc", "qdisc", "add", "dev", device, "root", "handle", "1:", *tbf]]


def uplink_commands(device: str, host: HostLink, *, real_frames: bool) -> list[list[str]]:
    """Return the `tc` commands that apply a link's rate, delay and loss to the packets that its host sends.

    Args:
        device: name of the network interface through which the host sends.
        host: the host's link.
        real_frames: True if every packet is a single Ethernet frame, without segmentation offload.
    """
    commands = rate_commands(device, host.uplink_bps, real_frames=real_frames)
    if not host.impaired:
        return commands
    num_packets = _NUM_PACKETS_UNLIMITED
    if host.uplink_bps is not None:  # packets in flight plus a full queue; netem's default limit would cap the rate
        num_packets = 100 + math.ceil(host.uplink_bps / 8 * (host.latency_s + _QUEUE_S) / FRAME_BYTES)
    place = ["parent", "1:1", "handle", "10:"] if commands else ["root", "handle", "10:"]
    netem = ["tc", "qdisc", "add", "dev", device, *place, "netem", "limit", str(num_packets)]
    if host.latency_s:
        netem += ["delay", f"{round(host.latency_s * 1e6)}us"]
    if host.loss:
        netem += ["loss", f"{host.loss * 100:.6f}%"]
    return [*commands, netem]


# Where `ip netns` keeps the files of namespaces.
NAMESPACES = Path("/run/netns")
# Name of the network interface on every virtual host.
INTERFACE = "eth0"
_SWITCH = "switch"
_TAP_FRAMES = "10000"


def namespace(index: int) -> str:
    """Return the name of a host's network namespace."""
    return f"bench{index}"


def link_commands(cluster: Cluster) -> list[list[str]]:
    """Return the commands that make interfaces, addresses and links, in order, as argument lists of `ip` and `tc`.

    Delay and loss are set at the sender, so the switch only limits the rate at which a host receives.
    """
    indices = range(len(cluster.hosts))
    if cluster.forwarded:
        return [command for index in indices for command in _tap_commands(cluster, index)]
    return [
        ["ip", "link", "add", _SWITCH, "type", "bridge", "mcast_snooping", "0"],
        ["ip", "link", "set", _SWITCH, "addrgenmode", "none", "up"],
        *(command for index in indices for command in _pair_commands(cluster, index)),
    ]


def ethernet_address(index: int) -> str:
    """Return the Ethernet address by which the forwarder identifies a host."""
    return f"02:00:00:00:{(index + 1) >> 8:02x}:{(index + 1) & 255:02x}"


def _pair_commands(cluster: Cluster, index: int) -> list[list[str]]:
    host = cluster.hosts[index]
    port = f"port{index}"  # the switch's end of the link; what it sends is what the host receives
    real_frames = cluster.wire_headers == "exact"
    return [
        ["ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", namespace(index)],
        # No link-local addresses: the counters would include their discovery traffic.
        ["ip", "link", "set", port, "addrgenmode", "none"],
        ["ip", "link", "set", port, "master", _SWITCH, *offload_arguments(cluster), "up"],
        *_interface_commands(cluster, index, offload_arguments(cluster, host.uplink_bps)),
        *_on(namespace(index), uplink_commands(INTERFACE, host, real_frames=real_frames)),
        *rate_commands(port, host.downlink_bps, real_frames=real_frames),
    ]


def _tap_commands(cluster: Cluster, index: int) -> list[list[str]]:
    """Return the commands that configure a host's TAP device and limit its uplink.

    The device's long queue holds frames while the forwarder waits for a processor. The kernel limits only the uplink's
    rate; the forwarder limits the downlink's rate, and delays and loses frames.
    """
    rate = rate_commands(INTERFACE, cluster.hosts[index].uplink_bps, real_frames=True)
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
    """Return `tc` commands, changed to run in the network namespace `name`."""
    return [[command[0], "-n", name, *command[1:]] for command in commands]


Result = TypeVar("Result")


def start_in(namespace: str, fn: Callable[[], Result]) -> Future[Result]:
    """Start `fn` in a new thread inside a network namespace, and return a future with its result or exception.

    Args:
        namespace: the namespace's name for `ip netns`.
        fn: the function to run; the thread ends when it returns.
    """
    outcome: Future[Result] = Future()

    def body() -> None:
        try:
            enter_namespaces(NAMESPACES / namespace)
            outcome.set_result(fn())
        except BaseException as error:  # noqa: BLE001 - raised by the future's `result`
            outcome.set_exception(error)

    threading.Thread(target=body, name=f"in-{namespace}", daemon=True).start()
    return outcome


# TCP's congestion control: the only one that every kernel has and that every namespace may choose.
CONGESTION_CONTROL = "reno"
_SETTING = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def set_congestion_control(cluster: Cluster) -> str:
    """Set TCP's congestion control on every virtual host to "reno", if the kernel allows it.

    Return the name of the congestion control that is then in effect; if hosts differ, all names, separated by spaces.
    The hosts' namespaces must exist.
    """
    namespaces = map(namespace, range(len(cluster.hosts)))
    return " ".join(sorted({start_in(each, partial(_write, _SETTING)).result() for each in namespaces}))


def _write(setting: Path) -> str:
    with contextlib.suppress(OSError):  # some sandboxes forbid the setting; `congestion_warnings` then warns
        setting.write_text(CONGESTION_CONTROL, encoding="ascii")
    return setting.read_text(encoding="ascii").strip()


def congestion_warnings(congestion_control: str) -> list[str]:
    """Return a warning if the congestion control in effect is not "reno", else an empty list."""
    if congestion_control == CONGESTION_CONTROL:
        return []
    return [
        f"TCP runs with this machine's congestion control ({congestion_control}), as {CONGESTION_CONTROL} could not be"
        " set; compare times only with runs that used the same one"
    ]
