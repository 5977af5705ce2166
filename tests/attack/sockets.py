"""Strangers connect to everything that listens during runs of every kind."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.hosts.support import hosts_supported
from tests.attack.job import Job, free_port
from tests.attack.kills import CODES, PLACEMENTS, SMALL
from tests.attack.tally import Tally
from tests.testing.invoke import REPOSITORY

METHODS = (
    ("--compressor", "none", "--collective", "native"),
    ("--compressor", "group_topk", "--collective", "ring"),
    ("--compressor", "topk", "--strategy", "async_server:mode=asp"),
)
LISTENING = "0A"
OWN = {"0.0.0.0": "127.0.0.1", "::": "::1"}
Address = tuple[str, int]


def attack(rng: random.Random, tally: Tally, tries: int) -> None:
    """Start jobs and connect to everything that listens.

    Args:
        rng: source of what is sent.
        tally: gets one count per port and one per job.
        tries: number of jobs.
    """
    placements = [name for name in PLACEMENTS if name != "virtual hosts" or hosts_supported()[0]]
    for index in range(tries):
        if not tally.has_time():
            return
        with tempfile.TemporaryDirectory(prefix="bench-attack-") as folder:
            _one(rng, tally, placements[index % len(placements)], rng.choice(METHODS), Path(folder))


def listeners(job: Job) -> dict[int, set[Address]]:
    """Return the addresses on which the job listens, by one process id of each network namespace."""
    found: dict[str, tuple[int, set[Address]]] = {}
    for process in job.processes().values():
        with contextlib.suppress(psutil.Error, OSError):
            namespace = str(Path(f"/proc/{process.pid}/ns/net").readlink())
            found.setdefault(namespace, (process.pid, set()))[1].update(_accepting(process))
    return dict(found.values())


def _accepting(process: psutil.Process) -> Iterator[Address]:
    """Yield the process's listening sockets, from the kernel's tables in its network namespace."""
    folder = Path(f"/proc/{process.pid}")
    inodes = set()
    for descriptor in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(descriptor.readlink()))
    for table in ("tcp", "tcp6"):
        for line in (folder / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
                yield str(ipaddress.ip_address(b"".join(words))), int(port, 16)


def _one(rng: random.Random, tally: Tally, placement: str, method: tuple[str, ...], folder: Path) -> None:
    endpoint = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}") if placement == "two launchers" else ()
    job = Job(folder, [[*SMALL, *method, *where, *endpoint] for where in PLACEMENTS[placement]])
    marker = folder / "a stranger's command ran"
    seen: set[tuple[int, Address]] = set()
    try:
        while any(launcher.poll() is None for launcher in job.launchers) and tally.has_time():
            for pid, addresses in listeners(job).items():
                new = {address for address in addresses if (pid, address) not in seen}
                seen |= {(pid, address) for address in new}
                if new:
                    _visit(rng, pid, new, marker)
                for host, port in new:
                    is_wide = placement == "one machine" and not ipaddress.ip_address(host).is_loopback
                    tally.count(f"port, {placement}", f"{host}:{port} is open to all" if is_wide else None)
            time.sleep(0.2)
        if not tally.has_time():
            for launcher in job.launchers:
                launcher.send_signal(signal.SIGINT)
        answers = job.wait()
        said = [answer.error for answer in answers if answer.code not in CODES or "Traceback" in answer.error]
        failure = f"a stranger's command ran ({placement})" if marker.exists() else ", ".join(said + job.left())
        tally.count(f"job, {placement}, exit {max(answer.code for answer in answers)}", failure or None)
    except TimeoutError as error:
        tally.count(f"job, {placement}", f"{error} [{' '.join(method)}]")
    finally:
        job.close()


def _visit(rng: random.Random, pid: int, addresses: set[Address], marker: Path) -> None:
    """Send a stranger to these addresses, in the network namespace of the process."""
    where = [f"{OWN.get(host, host)} {port}" for host, port in sorted(addresses)]
    stranger = [sys.executable, "-m", "tests.attack.hostile", str(rng.random()), str(marker), *where]
    enter = ["nsenter", f"--target={pid}", "--user", "--net", "--preserve-credentials", "--"]
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):  # the process may have ended
        if Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink():
            stranger = [*enter, *stranger]
        subprocess.run(stranger, cwd=REPOSITORY, capture_output=True, timeout=60, check=False)
