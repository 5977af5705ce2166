"""Cuts of the links of virtual hosts, made by a command in the same private namespaces."""

from __future__ import annotations

import os
import subprocess

import psutil

from bench.hosts.job import HostsJob
from bench.hosts.network import INTERFACE, namespace
from bench.hosts.support import search_path


def set_link(job: HostsJob, index: int, *, up: bool) -> None:
    """Disconnect a host from all others, or connect it again."""
    (supervisor,) = psutil.Process(job._unshare.pid).children()
    enter = ["nsenter", f"--target={supervisor.pid}", "--user", "--net", "--mount", "--preserve-credentials", "--"]
    command = ["ip", "-n", namespace(index), "link", "set", INTERFACE, "up" if up else "down"]
    subprocess.run([*enter, *command], env=os.environ | {"PATH": search_path()}, check=True)
