"""Try in a temporary namespace whether virtual hosts work on this machine; find out what to enable if they do not."""

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.core.errors import UsageError
from bench.hosts.cluster import Cluster
from bench.hosts.forwarder.forwarder import found

# Folders of `ip` and `tc`, which are often missing from an ordinary user's PATH.
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")

_SETTINGS = Path("/proc/sys")

# The command that starts another command in private user, network and mount namespaces.
UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount")

# Each step's name is printed before the step is tried, so the last name printed is that of the step that failed.
_TRIAL = """set -e
echo tmpfs; mount -t tmpfs none /run
echo netns; ip netns add trial
echo bridge; ip link add switch type bridge mcast_snooping 0
echo veth; ip link add port0 type veth peer name eth0 netns trial
echo gso; ip link set port0 gso_max_size 1514 gso_max_segs 1
echo tbf; tc qdisc add dev port0 root handle 1: tbf rate 1mbit burst 4542 limit 65536
"""
_TRIAL_TUN = """set -e
echo node; test -c /dev/net/tun
echo open; : <> /dev/net/tun
echo tap; ip tuntap add dev tap0 mode tap
"""
_TRIAL_NETEM = "echo netem; ip link add port0 type veth peer name port1; tc qdisc add dev port0 root netem delay 1ms"

_REASONS = {
    "tmpfs": "a private /run cannot be mounted; a container must be allowed to mount (for Docker: --privileged)",
    "netns": "network namespaces cannot be named; a container must be allowed to mount (for Docker: --privileged)",
    "bridge": "the kernel has no network bridge; load it with `sudo modprobe bridge`",
    "veth": "the kernel has no virtual Ethernet pairs; load them with `sudo modprobe veth`",
    "gso": "this version of iproute2 cannot switch segmentation off (gso_max_size); install iproute2 6.0 or newer",
    "tbf": "the kernel has no token bucket filter; load it with `sudo modprobe sch_tbf`",
    "node": "the kernel has no TAP devices; load them with `sudo modprobe tun`",
    "open": "TAP devices are forbidden here; allow them with `sudo chmod 666 /dev/net/tun`",
    "tap": "TAP devices cannot be made; load them with `sudo modprobe tun`",
    "netem": "the kernel has no network emulator; load it with `sudo modprobe sch_netem`",
}


def search_path() -> str:
    """Return PATH with the folders of system tools appended."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), *_SYSTEM_FOLDERS))


@functools.cache
def hosts_supported() -> tuple[bool, str]:
    """Return (True, "") if virtual hosts work here, else (False, what is missing and how to enable it)."""
    if sys.platform != "linux":
        return False, "virtual hosts are Linux network namespaces, which this system does not have"
    for tool, package in (("unshare", "util-linux"), ("ip", "iproute2"), ("tc", "iproute2")):
        if shutil.which(tool, path=search_path()) is None:
            return False, f"`{tool}` is not installed; install it, for example with `sudo apt-get install {package}`"
    return _try(_TRIAL)


@functools.cache
def netem_supported() -> tuple[bool, str]:
    """Return (True, "") if the kernel can delay and lose packets, else (False, the reason and the remedy).

    Call only if virtual hosts work here (`hosts_supported`).
    """
    return _try(_TRIAL_NETEM)


@functools.cache
def forwarder_supported() -> tuple[bool, str]:
    """Return (True, "") if the forwarder can connect virtual hosts, else (False, the reason and the remedy).

    Call only if virtual hosts work here (`hosts_supported`).
    """
    if found().handle is None:
        return False, f"the forwarder is missing ({found().finding}); run `make setup` in the checkout"
    return _try(_TRIAL_TUN)


def _try(script: str) -> tuple[bool, str]:
    """In private namespaces, run a shell script that prints the name of each step before trying the step.

    Return (True, "") if all steps succeeded, else (False, why the last printed step failed and what it needs).
    """
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", script],
        env=os.environ | {"PATH": search_path()},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    if done.returncode == 0:
        return True, ""
    steps = done.stdout.split()
    complaint = "; ".join(done.stderr.strip().splitlines()) or f"exit code {done.returncode}"
    return False, f"{_REASONS[steps[-1]] if steps else _why_not_private()} ({complaint})"


def _why_not_private() -> str:
    """Return a sentence on why private namespaces are forbidden here, and on how to allow them."""
    for setting, forbidding, remedy in (
        ("kernel/unprivileged_userns_clone", "0", "sudo sysctl kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sudo sysctl user.max_user_namespaces=10000"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ):
        path = _SETTINGS / setting
        if path.exists() and path.read_text(encoding="ascii").strip() == forbidding:
            return f"private namespaces are forbidden here; allow them with `{remedy}`"
    return "private namespaces are forbidden here; a container must be allowed to make them (for Docker: --privileged)"


# Largest sum of latency and jitter, because hosts resolve addresses over these links, and the kernel waits only 3 s.
MOST_LATENCY_S = 1.4


def check_and_choose_backend(cluster: Cluster) -> Cluster:
    """Check that virtual hosts work on this machine, and choose whether the kernel or the forwarder makes their links.

    Return the cluster with the choice in `forwarded`: False for the kernel, True for the forwarder.

    Raises:
        UsageError: virtual hosts, or the settings of their links, are not possible here.
    """
    is_supported, reason = hosts_supported()
    if not is_supported:
        raise UsageError(f"virtual hosts do not work here: {reason}")
    return choose_backend(cluster)


def choose_backend(cluster: Cluster) -> Cluster:
    """Return the cluster with `forwarded` set: False if the kernel can do what the links need, True if it cannot.

    A cluster whose `forwarded` is True already is returned unchanged.

    Raises:
        UsageError: neither the kernel nor the forwarder can do what the links need, or a latency is above 1.4 s.
    """
    slowest_s = max(host.latency_s + host.jitter_s for host in cluster.hosts)
    if slowest_s > MOST_LATENCY_S:
        raise UsageError(
            f"with a latency of {slowest_s:g} s, including jitter, virtual hosts do not find each other; choose "
            f"{MOST_LATENCY_S:g} s at most"
        )
    wanted = {
        "latency": any(host.latency_s for host in cluster.hosts),
        "jitter": any(host.jitter_s for host in cluster.hosts),
        "loss": any(host.loss for host in cluster.hosts),
        "traces": bool(cluster.traces),
    }
    if cluster.forwarded or not any(wanted.values()):
        return cluster
    by_kernel, no_netem = (False, "") if wanted["jitter"] or wanted["traces"] else netem_supported()
    by_forwarder, no_forwarder = (False, "") if by_kernel else forwarder_supported()
    if not by_kernel and not by_forwarder:
        reasons = "; and ".join(reason for reason in (no_forwarder, no_netem) if reason)
        settings = " and ".join(name for name, is_wanted in wanted.items() if is_wanted)
        raise UsageError(f"{settings} cannot be set here: {reasons}; or leave them out")
    return dataclasses.replace(cluster, forwarded=by_forwarder)
