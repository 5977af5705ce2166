"""Support of virtual hosts: every missing permission or tool is detected, with advice on what to enable."""

from __future__ import annotations

import shutil
import subprocess
import sys
from ctypes import CDLL
from pathlib import Path

import pytest

from bench.hosts import support
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
    ("steps", "hint"),
    [
        (["tmpfs"], "--privileged"),
        (["tmpfs", "netns", "bridge"], "modprobe bridge"),
        (["tmpfs", "netns", "bridge", "veth"], "modprobe veth"),
        (["tmpfs", "netns", "bridge", "veth", "gso"], "iproute2 6.0"),
        (["tmpfs", "netns", "bridge", "veth", "gso", "tbf"], "modprobe sch_tbf"),
    ],
)
def test_the_step_that_failed_says_what_to_enable(monkeypatch: pytest.MonkeyPatch, steps: list[str], hint: str) -> None:
    trial_ends(monkeypatch, steps, "Error: no.")
    works, reason = supported()
    assert not works
    assert hint in reason
    assert "(Error: no.)" in reason


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


def test_no_network_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    trial_ends(monkeypatch, ["netem"], "Specified qdisc kind is unknown")
    works, reason = netem_supported()
    assert not works
    assert "modprobe sch_netem" in reason


@pytest.mark.parametrize(
    ("steps", "hint"),
    [
        (["node"], "modprobe tun"),
        (["node", "open"], "chmod 666 /dev/net/tun"),
        (["node", "open", "tap"], "modprobe tun"),
    ],
)
def test_no_tap_devices(monkeypatch: pytest.MonkeyPatch, steps: list[str], hint: str) -> None:
    monkeypatch.setattr(support, "found", lambda: Library(CDLL(None), "compiled"))
    trial_ends(monkeypatch, steps, "no")
    works, reason = forwarder_supported()
    assert not works
    assert hint in reason


def test_no_forwarder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "found", lambda: Library(None, "the compiler did not run"))
    assert forwarder_supported() == (
        False, "the forwarder is missing (the compiler did not run); run `make setup` in the checkout"
    )  # fmt: skip
