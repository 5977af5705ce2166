"""The supervisor of virtual hosts: it builds the network, measures it, and runs one command per host.

`bench.hosts.job` starts it as ``python -m bench.hosts.supervisor PATH STATUS_FD``. It is process 1 of its private
process namespace: when it ends, for whatever reason, the kernel kills every other process of the job, and the network
disappears with the last process. The supervisor's standard input is a pipe that only the launcher holds: a line
requests to stop all hosts, and end-of-file means that the launcher is dead. SIGUSR1 means that `unshare` is dead. The
supervisor writes messages to STATUS_FD, one JSON object per line; unless it is killed, the last message is ``ended``,
or ``alone`` if the launcher or `unshare` is dead.
"""

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pydantic

from bench.core.counters import FORWARDER_VARIABLE
from bench.core.errors import BenchError, RunFailed
from bench.core.processes import STOP_GRACE_S, killed_by
from bench.core.run_folder import RunFolder, write_json
from bench.hosts import network, probe
from bench.hosts.cluster import Cluster
from bench.hosts.forwarder.forwarder import Forwarder, open_tap
from bench.hosts.network import start_in

_PERIOD_S = 0.01
_SEARCH_EVERY_S = 0.25


def limit_cpu(namespace: str, cpu_share: float, released: threading.Event) -> None:
    """Slow down every process of a host, by stopping all of them periodically.

    Args:
        namespace: name of the host's network namespace for `ip netns`.
        cpu_share: share of the time in which the host's processes may run, above 0 and below 1.
        released: event that ends the slowdown, so that the processes can handle SIGTERM.
    """
    inode = Path("/run/netns", namespace).stat().st_ino
    running_s = cpu_share * _PERIOD_S
    searched, processes = -_SEARCH_EVERY_S, list[int]()
    while not released.is_set():
        if time.monotonic() - searched >= _SEARCH_EVERY_S:
            searched, processes = time.monotonic(), []
            for folder in Path("/proc").iterdir():  # private, so it lists only this job's processes
                if folder.name.isdecimal() and folder.name != str(os.getpid()):
                    with contextlib.suppress(OSError):  # the process has ended
                        if (folder / "ns" / "net").stat().st_ino == inode:
                            processes.append(int(folder.name))
        _signal(processes, signal.SIGSTOP)
        released.wait(_PERIOD_S - running_s)
        _signal(processes, signal.SIGCONT)
        time.sleep(running_s)


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


_POLL_S = 0.05
_ALONE = 137


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instructions:
    """The launcher's instructions to the supervisor.

    Attributes:
        cluster: the hosts and their links.
        commands: the command of each host, as an argument list.
        environments: environment variables for each host's command, added to those of the launcher.
        run_dir: the run's folder, into which the measurements are written.
        grace_s: number of seconds for which the other commands may continue after the first one failed.
        seed: seed of the losses and jitter that the forwarder makes.
    """

    cluster: Cluster
    commands: tuple[tuple[str, ...], ...]
    environments: tuple[dict[str, str], ...]
    run_dir: Path
    grace_s: float
    seed: int


def main(path: str, status_fd: str) -> int:
    """Build the network, run the commands, and return the exit code of the first command that failed, or 0.

    Args:
        path: file with the `Instructions` as JSON.
        status_fd: number of the file descriptor to which messages for the launcher are written.
    """
    status = int(status_fd)
    os.set_inheritable(status, False)  # the pipe closes when this process ends
    _tell(status, {"begun": True})
    signal.signal(signal.SIGUSR1, lambda *_: _end_alone(status))
    stop_requested = threading.Event()
    threading.Thread(target=_listen, args=(stop_requested, status), daemon=True).start()
    try:
        instructions = pydantic.TypeAdapter(Instructions).validate_json(Path(path).read_bytes())
        try:
            forwarder = _prepare(instructions)
        except (BenchError, OSError) as error:
            code = error.exit_code if isinstance(error, BenchError) else RunFailed.exit_code
            _tell(status, {"error": str(error), "exit_code": code})
            return code
        _tell(status, {"ready": True})
        return _run_on_hosts(instructions, stop_requested, forwarder)
    finally:
        _tell(status, {"ended": True})


def _prepare(instructions: Instructions) -> Forwarder | None:
    """Build and measure the network; return its forwarder, or None if the kernel forwards frames."""
    cluster = instructions.cluster
    # `ip netns` keeps its names in /run/netns, which on the machine itself only root may create.
    run_commands([["mount", "-t", "tmpfs", "none", "/run"], ["ip", "link", "set", "lo", "up"]])
    run_commands([["ip", "netns", "add", network.namespace(index)] for index in range(len(cluster.hosts))])
    for setting in Path("/proc/sys/net/bridge").glob("bridge-nf-call-*"):  # packet filters, here only for bridges
        with contextlib.suppress(OSError):  # some sandboxes forbid it; frames are then slower, but arrive
            setting.write_text("0", encoding="ascii")
    forwarder = None
    if cluster.forwarded:
        taps = [
            start_in(network.namespace(index), partial(open_tap, network.INTERFACE)).result()
            for index in range(len(cluster.hosts))
        ]
        forwarder = Forwarder(cluster.hosts, taps, seed=instructions.seed)
    run_commands(network.link_commands(cluster))
    names = Path("/etc/hosts")
    if names.exists():
        # torch looks up names of the addresses that it connects to, also of their IPv6 forms, and there is no name
        # server in the namespace.
        lines = [
            f"{prefix}{cluster.address(index)} {host.name}"
            for prefix in ("", "::ffff:")
            for index, host in enumerate(cluster.hosts)
        ]
        own = Path("/run/hosts")
        own.write_text("\n".join([names.read_text(encoding="utf-8"), *lines, ""]), encoding="utf-8")
        run_commands([["mount", "--bind", str(own), str(names)]])
    report = probe.measure(cluster, network.set_congestion_control(cluster))
    write_json(RunFolder(instructions.run_dir).link, dataclasses.asdict(report))
    return forwarder


def _tell(status: int, message: dict[str, Any]) -> None:
    os.write(status, json.dumps(message).encode() + b"\n")


def run_commands(commands: Sequence[Sequence[str]]) -> None:
    """Run `ip`, `tc` and `mount` one after the other.

    Raises:
        RunFailed: a command failed; the message includes its error output.
    """
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = done.stderr.strip().replace("\n", "; ")
            raise RunFailed(
                "the virtual network could not be set up (bench doctor says what it needs): "
                f"`{' '.join(command)}` said: {said}"
            )


def _listen(stop_requested: threading.Event, status: int) -> None:
    """Wait for lines of the launcher on stdin: set `stop_requested` for each; at end-of-file, end the job."""
    for _ in sys.stdin:
        stop_requested.set()
    _end_alone(status)


def _end_alone(status: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the launcher is dead
        _tell(status, {"alone": True})
    os._exit(_ALONE)


def _run_on_hosts(instructions: Instructions, stop_requested: threading.Event, forwarder: Forwarder | None) -> int:
    """Run the commands, one per host; return the exit code of the first command that failed, 0 if none did."""
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())
    released = threading.Event()
    for index, host in enumerate(instructions.cluster.hosts):
        if host.cpu_share < 1:
            threading.Thread(
                target=limit_cpu,
                args=(network.namespace(index), host.cpu_share, released),
                name=f"slow-{host.name}",
                daemon=True,
            ).start()
    variables: dict[str, str] = {}
    if forwarder:
        forwarder.restart()
        variables = {FORWARDER_VARIABLE: forwarder.task}
    alive: dict[int, str] = {}  # name of the host, by process
    for index, host in enumerate(instructions.cluster.hosts):
        process = os.posix_spawnp(
            "ip",
            ["ip", "netns", "exec", network.namespace(index), *instructions.commands[index]],
            os.environ | variables | instructions.environments[index],
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)],
            setpgroup=0,
            setsigmask=[],
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGPIPE],
        )
        alive[process] = host.name

    exit_code, stop_at, kill_at = 0, math.inf, math.inf
    while alive:
        if stop_requested.wait(_POLL_S):
            stop_requested.clear()
            stop_at = time.monotonic()
        # Collect ended processes; as process 1, also those whose parent ended before them.
        while alive and (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            process, status = ended
            code = os.waitstatus_to_exitcode(status) if process in alive else 0
            if code < 0 and kill_at == math.inf:  # killed, and not by this process
                print(killed_by(f"torchrun on {alive[process]}", -code), flush=True)
            if code != 0 and exit_code == 0:
                exit_code = code if code > 0 else 128 - code
                stop_at = min(stop_at, time.monotonic() + instructions.grace_s)
            alive.pop(process, None)
        now = time.monotonic()
        if now >= stop_at:
            stop_at = math.inf
            kill_at = min(kill_at, now + STOP_GRACE_S)
            released.set()
            _signal(alive, signal.SIGTERM)
        if now >= kill_at:
            _signal(alive, signal.SIGKILL)
    return exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
