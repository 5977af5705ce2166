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
    tools = tmp_path / "tools"
    tools.mkdir()
    # The first `ip` of the set-up never ends, so the kill comes in the middle of the set-up on any machine.
    (tools / "ip").write_text(f"#!/bin/sh\ntouch {begun}\nexec sleep 600\n", encoding="utf-8")
    (tools / "ip").chmod(0o755)

    def kill_once_begun() -> None:
        while not begun.exists():
            time.sleep(0.005)
        kill_supervisor(tmp_path)

    killer = threading.Thread(target=kill_once_begun)
    assert hosts_supported()[0]  # the result is cached, so that only the supervisor runs this `ip`
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
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "tc").write_text("#!/bin/sh\necho no such kernel >&2\nexit 2\n", encoding="utf-8")
    (tools / "tc").chmod(0o755)
    assert hosts_supported()[0]  # the result, with the real `tc`, is cached
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    link = HostLink(name="any", uplink_bps=1e7, downlink_bps=1e7)
    sentence = r"network could not be set up \(bench doctor .*\): `tc .*` said: no such kernel$"
    with pytest.raises(RunFailed, match=sentence):
        VirtualNetwork(Cluster.uniform(2, link=link))
    assert "Traceback" not in capfd.readouterr().err


def test_latency_is_refused_where_nothing_can_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "netem_supported", lambda: (False, "no network emulator"))
    monkeypatch.setattr(support, "forwarder_supported", lambda: (False, "no forwarder"))
    link = HostLink(name="any", latency_s=0.001)
    with pytest.raises(UsageError, match="no forwarder; and no network emulator; or leave them out"):
        VirtualNetwork(Cluster.uniform(2, link=link))


def test_a_machine_without_namespaces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "hosts_supported", lambda: (False, "forbidden"))
    with pytest.raises(UsageError, match="virtual hosts do not work here: forbidden"):
        VirtualNetwork(PAIR)


def test_a_package_that_the_supervisor_cannot_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_network, "__file__", "/run/bench/hosts/virtual_network.py")
    with pytest.raises(UsageError, match=re.escape("bench is /run/bench/hosts/virtual_network.py, and virtual hosts")):
        VirtualNetwork(PAIR)
