"""Processes and links of virtual hosts, as tests reach them from outside."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.hosts.network import INTERFACE, namespace
from bench.hosts.support import search_path
from bench.hosts.virtual_network import VirtualNetwork


def set_link(network: VirtualNetwork, index: int, *, up: bool) -> None:
    """Disconnect a host from all others, or connect it again."""
    in_supervisor(network, ["ip", "-n", namespace(index), "link", "set", INTERFACE, "up" if up else "down"])


def in_supervisor(network: VirtualNetwork, command: Sequence[str]) -> str:
    """Run a command in the supervisor's namespaces, where the switch is, and return its output."""
    enter = ["nsenter", f"--target={network.pid}", "--user", "--net", "--mount", "--preserve-credentials", "--"]
    environment = os.environ | {"PATH": search_path()}
    return subprocess.run([*enter, *command], env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def processes_on(network: VirtualNetwork, index: int) -> list[psutil.Process]:
    """Return this process's descendants on the host with this index."""
    inode = network.namespaces(index)[1].stat().st_ino
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):  # the process has ended
            if Path(f"/proc/{process.pid}/ns/net").stat().st_ino == inode:
                found.append(process)
    return found
