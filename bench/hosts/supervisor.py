"""The supervisor of virtual hosts: a process that builds their network, measures it, and keeps it while it runs.

`bench.hosts.virtual_network` starts the supervisor as ``python -m bench.hosts.supervisor CONNECTION`` in private user,
network and mount namespaces. The supervisor reads requests from the connection. The first request is the cluster; the
answer has the measurements of the links and the environment variables for processes on hosts. Each further request is
the seed of a job, sent right before the job starts. The supervisor ends when the launcher ends or closes the
connection.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from bench.core.counters import FORWARDER_VARIABLE, WIRE_HEADERS_VARIABLE
from bench.core.errors import BenchError, RunFailed
from bench.core.processes import die_with_parent
from bench.hosts import network, probe
from bench.hosts.cluster import Cluster
from bench.hosts.forwarder.forwarder import Forwarder, open_tap
from bench.hosts.network import start_in

_PERIOD_S = 0.01
_SEARCH_EVERY_S = 0.25


def limit_cpu(namespace: Path, cpu_share: float) -> None:
    """Slow down every process of a host, by stopping all of them periodically; the function never returns.

    Args:
        namespace: file of the host's network namespace.
        cpu_share: share of the time in which the host's processes may run, above 0 and below 1.
    """
    inode = namespace.stat().st_ino
    running_s = cpu_share * _PERIOD_S
    searched, processes = -_SEARCH_EVERY_S, list[int]()
    while True:
        if time.monotonic() - searched >= _SEARCH_EVERY_S:
            searched, processes = time.monotonic(), []
            for folder in Path("/proc").iterdir():
                if folder.name.isdecimal():
                    with contextlib.suppress(OSError):  # the process has ended, or is another user's
                        if (folder / "ns" / "net").stat().st_ino == inode:
                            processes.append(int(folder.name))
        _signal(processes, signal.SIGSTOP)
        time.sleep(_PERIOD_S - running_s)
        _signal(processes, signal.SIGCONT)
        time.sleep(running_s)


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(OSError):  # the process has ended
            os.kill(process, number)


def main(connection: int) -> None:
    """Build the network that the launcher requests, then prepare it for one job after the other.

    Args:
        connection: file descriptor of this process's end of the connection.
    """
    launcher: Connection[Any, Any] = Connection(connection)
    with contextlib.suppress(EOFError):
        cluster: Cluster = launcher.recv()
        try:
            forwarder = _build(cluster)
            report = probe.measure(cluster, network.set_congestion_control(cluster))
        except (BenchError, OSError) as error:
            launcher.send(error if isinstance(error, BenchError) else RunFailed(str(error)))
            return
        variables = {WIRE_HEADERS_VARIABLE: cluster.wire_headers, "GLOO_SOCKET_IFNAME": network.INTERFACE}
        if forwarder is not None:
            variables[FORWARDER_VARIABLE] = forwarder.task
        launcher.send((report, variables))
        sockets = [start_in(network.namespace(index), _open_sockets).result() for index in range(len(cluster.hosts))]
        while True:
            seed = launcher.recv()
            if forwarder is not None:
                _wait_for_silence(sockets)
                forwarder.restart(seed)
            launcher.send(None)


def _build(cluster: Cluster) -> Forwarder | None:
    """Build the network; return its forwarder, or None if the kernel forwards frames."""
    names = [network.namespace(index) for index in range(len(cluster.hosts))]
    # `ip netns` keeps its files in /run/netns. Outside of the private namespaces, only root may create this folder.
    run_commands([["mount", "-t", "tmpfs", "none", "/run"], ["ip", "link", "set", "lo", "up"]])
    run_commands([["ip", "netns", "add", name] for name in names])
    for setting in Path("/proc/sys/net/bridge").glob("bridge-nf-call-*"):  # switch off packet filters of bridges
        with contextlib.suppress(OSError):  # some sandboxes forbid it; frames are then slower, but arrive
            setting.write_text("0", encoding="ascii")
    forwarder = None
    if cluster.forwarded:
        taps = [start_in(name, partial(open_tap, network.INTERFACE)).result() for name in names]
        forwarder = Forwarder(cluster.hosts, taps)
    run_commands(network.link_commands(cluster))
    for name, host in zip(names, cluster.hosts, strict=True):
        if host.cpu_share < 1:
            arguments = network.NAMESPACES / name, host.cpu_share
            threading.Thread(target=limit_cpu, args=arguments, name=f"slow-{host.name}", daemon=True).start()
    return forwarder


def run_commands(commands: Sequence[Sequence[str]]) -> None:
    """Run `ip`, `tc` and `mount` one after the other.

    Raises:
        RunFailed: a command failed; the message includes its error output.
    """
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=die_with_parent)
        if done.returncode != 0:
            said = done.stderr.strip().replace("\n", "; ")
            raise RunFailed(
                "the virtual network could not be set up (bench doctor says what it needs): "
                f"`{' '.join(command)}` said: {said}"
            )


# States in /proc/net/tcp of sockets that send nothing by themselves: TIME_WAIT, CLOSE and LISTEN.
_SILENT = {"06", "07", "0A"}
_SILENT_WITHIN_S = 5.0
_POLL_S = 0.005


def _open_sockets() -> IO[str]:
    """Open the kernel's list of TCP sockets in this thread's network namespace."""
    return Path("/proc/thread-self/net/tcp").open(encoding="ascii")


def _wait_for_silence(sockets: Iterable[IO[str]]) -> None:
    """Wait until no host has a connection that may still send frames of an earlier job, but at most five seconds.

    Frames of an earlier job would change which frames of the next job are lost, and how long frames wait.
    """
    deadline = time.monotonic() + _SILENT_WITHIN_S
    for file in sockets:
        while time.monotonic() < deadline:
            file.seek(0)
            if {line.split()[3] for line in file.readlines()[1:]} <= _SILENT:
                break
            time.sleep(_POLL_S)


if __name__ == "__main__":
    main(int(sys.argv[1]))
