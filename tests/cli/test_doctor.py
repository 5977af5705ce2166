"""`bench doctor`: each check distinguishes the good case from the bad one, and says what to do."""

from __future__ import annotations

import json
import os
from collections import namedtuple
from pathlib import Path

import pytest
import torch.distributed as dist

from bench.cli import doctor
from bench.core import environment
from bench.core.errors import Interrupted, UsageError
from bench.hosts import support
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from collectives.transport import mapped_memory
from tests.testing.invoke import invoke

DiskUsage = namedtuple("DiskUsage", ["total", "used", "free"])


def levels(*arguments: str) -> tuple[int, dict[str, str]]:
    """Run `bench doctor`, and return its exit code and the level of each check."""
    answer = invoke("doctor", "--no-smoke", "--json", *arguments)
    return answer.code, {check["name"]: check["level"] for check in json.loads(answer.out)}


def test_a_healthy_machine_has_no_failure(tmp_path: Path) -> None:
    code, found = levels("--out", str(tmp_path), "--data-dir", str(tmp_path))
    assert code == 0
    assert "fail" not in found.values()
    assert found["versions"] == found["backends"] == found["results"] == found["data: digits"] == "ok"
    assert found["data: cifar10"] == "warn"
    assert "smoke" not in found


def test_each_check_is_a_line_with_what_to_do(tmp_path: Path) -> None:
    answer = invoke("doctor", "--no-smoke", "--data-dir", str(tmp_path), "--world-size", "4096")
    lines = answer.out.splitlines()
    assert all(line.startswith(("ok    ", "warn  ", "fail  ")) for line in lines)
    (cores,) = (line for line in lines if " cores: " in line)
    assert cores.startswith("warn")
    assert "use --world-size" in cores


def test_a_failed_check_ends_with_exit_code_3_and_names_itself(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    answer = invoke("doctor", "--no-smoke", "--out", str(file / "runs"))
    assert answer.code == 3
    assert "(results)" in answer.error
    assert f"fail  results: {file / 'runs'} cannot be written: Not a directory ({file}); choose" in answer.out


def test_results_folder_is_made_by_nobody(tmp_path: Path) -> None:
    assert doctor.results_folder(tmp_path / "a" / "b").level == "ok"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_a_failure(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert doctor.results_folder(tmp_path).level == "fail"


@pytest.mark.parametrize(("free", "level"), [(5e9, "ok"), (5e8, "warn"), (1e6, "fail")])
def test_disk(free: float, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: DiskUsage(0, 0, free))
    check = doctor.disk(tmp_path)
    assert check.level == level
    assert bool(check.fix) == (level != "ok")


@pytest.mark.parametrize(("free", "level"), [(5e9, "ok"), (64e6, "warn")])
def test_shared_memory(free: float, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: DiskUsage(0, 0, free))
    check = doctor.shared_memory(tmp_path)
    assert check.level == level
    assert f"free in {tmp_path}" in check.finding
    assert bool(check.fix) == (level != "ok")
    assert doctor.shared_memory(tmp_path / "absent").level == "warn"


def test_dax_devices_are_told_with_their_alignment(tmp_path: Path) -> None:
    assert doctor.dax(tmp_path).finding == "no DAX device"
    for name, alignment in (("dax1.0", 1 << 30), ("dax0.0", 2 << 20), ("damaged", 0)):
        facts = tmp_path / "bus" / "dax" / "devices" / name
        facts.mkdir(parents=True)
        (facts / "size").write_text(f"{16 * 10**9}\n")
        if alignment:
            (facts / "align").write_text(f"{alignment}\n")
    assert doctor.dax(tmp_path).finding == (
        "/dev/dax0.0 of 16 GB in units of 2048 KiB, /dev/dax1.0 of 16 GB in units of 1048576 KiB"
    )


@pytest.mark.parametrize(("machine", "order"), [("x86_64", "are seen in order"), ("riscv64", "need fences")])
def test_flushing_without_a_compiler(machine: str, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.cache_lines().level == "ok"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("platform.machine", lambda: machine)
    mapped_memory.cache_lines.cache_clear()
    check = doctor.cache_lines()
    mapped_memory.cache_lines.cache_clear()
    assert check.level == "warn"
    assert f"stores {order}; pool: flushing" in check.finding


@pytest.mark.parametrize(("busy", "level"), [(0.9, "ok"), (1.1, "warn")])
def test_load(busy: float, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (busy, 9.0, 9.0))
    assert doctor.load().level == level


def test_ranks_share_the_cores_of_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    for module in (environment, doctor):
        monkeypatch.setattr(module, "cpu_quota", lambda: 2.0)
    cores = doctor.cores(4)
    assert (cores.level, cores.fix) == ("warn", "use --world-size 2 or fewer if times matter")
    assert cores.finding.startswith("4 ranks share 2 cores (the CPU quota is 2 cores), so step times")


def test_a_missing_package_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda package: "" if package == "pandas" else "1.0")
    check = doctor.versions()
    assert (check.level, check.finding) == ("fail", "not installed: pandas")


def test_a_torch_without_gloo_is_a_failure_and_ends_the_examination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    checks = list(doctor.examine(world_size=2, out=tmp_path, data_dir=tmp_path, smoke=True))
    assert (checks[-1].name, checks[-1].level) == ("backends", "fail")


def test_hosts_that_are_not_permitted_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "hosts_supported", lambda: (False, "ip is missing; install iproute2"))
    check = doctor.namespaces()
    assert (check.level, check.finding) == ("warn", "ip is missing; install iproute2")


@pytest.mark.parametrize(
    ("netem", "forwarder", "level", "finding"),
    [
        (
            False,
            True,
            "ok",
            "latency, jitter, loss and traces by the forwarder, which carries 2 Gbit/s over all links",
        ),
        (
            True,
            True,
            "ok",
            "latency and loss by the kernel, jitter and traces by the forwarder, which carries 2 Gbit/s",
        ),
        (True, False, "warn", "no tun"),
        (False, False, "warn", "no tun; no netem"),
    ],
)
def test_the_way_links_work(
    netem: bool, forwarder: bool, level: str, finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "netem_supported", lambda: (netem, "" if netem else "no netem"))
    monkeypatch.setattr(support, "forwarder_supported", lambda: (forwarder, "" if forwarder else "no tun"))
    monkeypatch.setattr(doctor, "forwarded_bps", lambda: 2e9)
    check = doctor.links(measure=True)
    assert check.level == level
    assert check.finding.startswith(finding)


def test_the_smoke_test_trains_on_two_ranks_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ForkServer(TRAIN) as server:
        check = doctor.smoke_test(tmp_path, server)
    assert (check.level, check.finding) == ("ok", "2 ranks trained 3 steps")
    assert not list(tmp_path.glob("bench-doctor-*"))


def test_a_smoke_test_that_cannot_start_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_request: object) -> None:
        raise UsageError("no such thing")

    monkeypatch.setattr(doctor, "plan", refuse)
    assert doctor.smoke_test(tmp_path, ForkServer(TRAIN)) == doctor.Check(
        "fail", "smoke", "no such thing", "fix what the other lines name"
    )


def test_who_stops_it_while_links_are_measured_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> float:
        raise Interrupted("interrupted")

    monkeypatch.setattr(doctor, "forwarded_bps", stopped)
    monkeypatch.setattr(support, "netem_supported", lambda: (False, "no netem"))
    monkeypatch.setattr(support, "forwarder_supported", lambda: (True, ""))
    with pytest.raises(Interrupted):
        doctor.links(measure=True)
