"""Support for virtual hosts: advice about missing permissions and tools, and the choice of the links' backend."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path

import pytest

from bench.core.errors import UsageError
from bench.hosts import support
from bench.hosts.cluster import Cluster, HostLink, Trace
from collectives.kernels.library import Library

supported = support.hosts_supported.__wrapped__
forwarder_supported = support.forwarder_supported.__wrapped__
netem_supported = support.netem_supported.__wrapped__


def trial_ends(monkeypatch: pytest.MonkeyPatch, steps: list[str], complaint: str) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool, path: f"/usr/bin/{tool}")
    done = subprocess.CompletedProcess([], 1 if complaint else 0, stdout="\n".join(steps), stderr=complaint)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)


def test_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert supported() == (False, "virtual hosts are Linux network namespaces, which this system does not have")


@pytest.mark.parametrize(("tool", "package"), [("tc", "iproute2"), ("ip", "iproute2"), ("unshare", "util-linux")])
def test_a_missing_tool(monkeypatch: pytest.MonkeyPatch, tool: str, package: str) -> None:
    trial_ends(monkeypatch, [], "")
    monkeypatch.setattr(shutil, "which", lambda name, path: None if name == tool else name)
    works, reason = supported()
    assert not works
    assert f"`{tool}` is not installed" in reason
    assert reason.endswith(f"apt-get install {package}`")


@pytest.mark.parametrize(
    ("asked", "steps", "hint"),
    [
        (supported, "tmpfs", "--privileged"),
        (supported, "tmpfs netns bridge", "modprobe bridge"),
        (supported, "tmpfs netns bridge veth", "modprobe veth"),
        (supported, "tmpfs netns bridge veth gso", "iproute2 6.0"),
        (supported, "tmpfs netns bridge veth gso tbf", "modprobe sch_tbf"),
        (netem_supported, "netem", "modprobe sch_netem"),
        (forwarder_supported, "node", "modprobe tun"),
        (forwarder_supported, "node open", "chmod 666 /dev/net/tun"),
        (forwarder_supported, "node open tap", "modprobe tun"),
    ],
)
def test_the_step_that_failed_says_what_to_enable(
    monkeypatch: pytest.MonkeyPatch, asked: Callable[[], tuple[bool, str]], steps: str, hint: str
) -> None:
    monkeypatch.setattr(support, "found", lambda: Library(CDLL(None), "compiled"))
    trial_ends(monkeypatch, steps.split(), "Error: no.")
    works, reason = asked()
    assert not works
    assert hint in reason
    assert asked is not supported or "(Error: no.)" in reason


@pytest.mark.parametrize(
    ("setting", "value", "hint"),
    [
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "0", "--privileged"),
    ],
)
def test_the_setting_that_forbids_namespaces_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str, value: str, hint: str
) -> None:
    trial_ends(monkeypatch, [], "unshare failed")
    monkeypatch.setattr(support, "_SETTINGS", tmp_path)
    (tmp_path / setting).parent.mkdir()
    (tmp_path / setting).write_text(f"{value}\n", encoding="ascii")
    works, reason = supported()
    assert not works
    assert hint in reason


def test_all_well(monkeypatch: pytest.MonkeyPatch) -> None:
    trial_ends(monkeypatch, ["tmpfs", "exec"], "")
    assert supported() == (True, "")
    assert netem_supported() == (True, "")


def test_no_forwarder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "found", lambda: Library(None, "the compiler did not run"))
    assert forwarder_supported() == (
        False, "the forwarder is missing (the compiler did not run); run `make setup` in the checkout"
    )  # fmt: skip


LATE = {"latency_s": 0.01}
SHAKY = {"latency_s": 0.01, "jitter_s": 0.001}
LOSSY = {"loss": 0.01}
TRACED = {"uplink_trace": Trace(path="/cell", digest="0" * 10, mean_bps=1e7)}


def machine(monkeypatch: pytest.MonkeyPatch, *, netem: bool, forwarder: bool) -> None:
    monkeypatch.setattr(support, "netem_supported", lambda: (netem, "" if netem else "no netem"))
    monkeypatch.setattr(support, "forwarder_supported", lambda: (forwarder, "" if forwarder else "no tun"))


def cluster(link: dict[str, object]) -> Cluster:
    return Cluster.uniform(2, link=HostLink(name="any", **link))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("link", "netem", "forwarded"),
    [
        ({}, False, False),
        ({"uplink_bps": 1e9}, False, False),
        (LATE, True, False),
        (LATE, False, True),
        (LOSSY, True, False),
        (LOSSY, False, True),
        (SHAKY, True, True),
        (TRACED, True, True),
    ],
    ids=str,
)
def test_the_kernel_where_it_can(
    link: dict[str, object], netem: bool, forwarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, netem=netem, forwarder=True)
    settled = support.choose_backend(cluster(link))
    assert settled.forwarded is forwarded
    assert settled.hosts == cluster(link).hosts
    assert settled.wire_headers == ("exact" if forwarded or link == LOSSY else "estimated")


@pytest.mark.parametrize(
    ("link", "netem", "sentence"),
    [
        (LATE, False, "latency cannot be set here: no tun; and no netem; or leave them out"),
        (LOSSY, False, "loss cannot be set here: no tun; and no netem"),
        (SHAKY, True, "latency and jitter cannot be set here: no tun; or leave"),
        (TRACED, True, "traces cannot be set here: no tun; or leave"),
    ],
    ids=str,
)
def test_neither_is_one_sentence(
    link: dict[str, object], netem: bool, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, netem=netem, forwarder=False)
    with pytest.raises(UsageError, match=sentence):
        support.choose_backend(cluster(link))


def test_the_forwarder_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, netem=True, forwarder=True)
    assert support.choose_backend(Cluster(hosts=cluster({}).hosts, forwarded=True)).forwarded


def test_what_hosts_do_not_find_each_other_over_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, netem=True, forwarder=True)
    assert support.choose_backend(cluster({"latency_s": 1.0, "jitter_s": 0.4}))
    with pytest.raises(
        UsageError, match=r"with a latency of 1\.5 s, including jitter, virtual hosts do not find each other"
    ):
        support.choose_backend(cluster({"latency_s": 1.0, "jitter_s": 0.5}))
