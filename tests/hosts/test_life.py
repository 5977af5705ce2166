"""The life of a network of virtual hosts: what its processes get, and clean-up after any process is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.core.counters import WIRE_HEADERS_VARIABLE
from bench.core.errors import RunFailed, UsageError
from bench.hosts import support, virtual_network
from bench.hosts.cluster import Cluster, HostLink
from bench.hosts.support import hosts_supported
from bench.hosts.virtual_network import VirtualNetwork
from tests.hosts.conftest import processes_of, wait_for_end_of

REPOSITORY = Path(__file__).parents[2]
PAIR = Cluster.uniform(2)
SUPERVISOR = f"{sys.executable} -m bench.hosts.supervisor"
WAS_KILLED = "^the supervisor of the virtual hosts was killed by SIGKILL"


def replace_tool(folder: Path, name: str, script: str) -> Path:
    """Return a folder in which a system's tool is replaced with this shell script."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (tools / name).chmod(0o755)
    assert hosts_supported()[0]  # the result, with the real tool, is cached
    return tools


@contextmanager
def launcher(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a launcher with two sleeping hosts."""
    arguments = [sys.executable, "-m", "tests.testing.hosts_launcher", "sleep", "600"]
    with subprocess.Popen(arguments, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        while sum(line.startswith("sleep 600") for line in processes_of(folder).values()) < 2:
            time.sleep(0.02)
        try:
            yield process
        finally:
            process.kill()


def kill_supervisor(folder: Path) -> None:
    os.kill(next(number for number, line in processes_of(folder).items() if line.startswith(SUPERVISOR)), 9)


def test_every_host_runs_its_command_with_its_address_and_variables(tmp_path: Path) -> None:
    script = f'echo "$INDEX ${WIRE_HEADERS_VARIABLE} $GLOO_SOCKET_IFNAME $(ip -br -4 addr show eth0)" > {tmp_path}/'
    with VirtualNetwork(PAIR) as network:
        for index in range(2):
            host = network.start(index, ["sh", "-c", f"{script}{index}"], {"INDEX": str(index)})
            assert host.wait() == 0
    for index in range(2):
        number, headers, interface, *shown = (tmp_path / str(index)).read_text(encoding="utf-8").split()
        assert (number, headers, interface) == (str(index), "estimated", "eth0")
        assert shown[1:] == ["UP", f"10.77.0.{index + 1}/24"]
    assert [flow.configured_bps for flow in network.report.flows] == [None, None]
    assert network.report.warnings == ()


def test_a_supervisor_that_was_killed_is_named(tmp_path: Path) -> None:
    with VirtualNetwork(PAIR) as network:
        network.restart(1)
        kill_supervisor(tmp_path)
        with pytest.raises(RunFailed, match=WAS_KILLED):
            network.restart(2)


def test_a_supervisor_that_was_killed_during_the_set_up_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    # The first `ip` of the set-up never ends, so the kill comes in the middle of the set-up on any machine.
    tools = replace_tool(tmp_path, "ip", f"touch {begun}\nexec sleep 600")

    def kill_once_begun() -> None:
        while not begun.exists():
            time.sleep(0.005)
        kill_supervisor(tmp_path)

    killer = threading.Thread(target=kill_once_begun)
    with monkeypatch.context() as during_set_up:
        during_set_up.setenv("PATH", str(tools), prepend=os.pathsep)
        killer.start()
        with pytest.raises(RunFailed, match=WAS_KILLED):
            VirtualNetwork(PAIR)
    killer.join()


def test_leaving_the_block_by_an_error_closes_the_network(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), VirtualNetwork(PAIR):
        raise ZeroDivisionError
    assert processes_of(tmp_path) == {}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_end_of_the_launcher_is_the_end_of_all_hosts(tmp_path: Path, number: signal.Signals) -> None:
    with launcher(tmp_path) as process:
        process.send_signal(number)
        process.wait()
        wait_for_end_of(tmp_path)


def test_a_launcher_killed_during_the_set_up_leaves_nothing(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "tests.testing.hosts_launcher", "sleep", "600"]
    with subprocess.Popen(arguments, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
        while not any(line.startswith(SUPERVISOR) for line in processes_of(tmp_path).values()):
            time.sleep(0.005)
        process.kill()
    wait_for_end_of(tmp_path)


def test_a_network_that_cannot_be_built_is_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = replace_tool(tmp_path, "tc", "echo no such kernel >&2\nexit 2")
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    link = HostLink(name="any", uplink_bps=1e7, downlink_bps=1e7)
    sentence = r"network could not be set up \(bench doctor .*\): `tc .*` said: no such kernel$"
    with pytest.raises(RunFailed, match=sentence):
        VirtualNetwork(Cluster.uniform(2, link=link))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ({"netem_supported": "no network emulator", "forwarder_supported": "no forwarder"},
         "no forwarder; and no network emulator; or leave them out"),
        ({"hosts_supported": "forbidden"}, "virtual hosts do not work here: forbidden"),
    ],
)  # fmt: skip
def test_what_this_machine_cannot_do_is_refused(
    missing: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, reason in missing.items():
        monkeypatch.setattr(support, name, lambda reason=reason: (False, reason))
    with pytest.raises(UsageError, match=sentence):
        VirtualNetwork(Cluster.uniform(2, link=HostLink(name="any", latency_s=0.001)))


def test_a_package_that_the_supervisor_cannot_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_network, "__file__", "/run/bench/hosts/virtual_network.py")
    with pytest.raises(UsageError, match=re.escape("bench is /run/bench/hosts/virtual_network.py, and virtual hosts")):
        VirtualNetwork(PAIR)
