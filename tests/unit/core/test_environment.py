"""The environment of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.core import environment


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    environment.cpu_model.cache_clear()
    yield
    environment.cpu_model.cache_clear()


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        ({"avx2", "avx512f"}, "AMD EPYC with AVX-512"),
        ({"avx2"}, "AMD EPYC with AVX2"),
        ({"sse2"}, "AMD EPYC"),
        (set(), "AMD EPYC"),
    ],
)
def test_processors_of_one_name_are_told_apart_by_their_vectors(
    flags: set[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_name_of_cpu", lambda: "AMD EPYC")
    monkeypatch.setattr(environment, "cpu_flags", lambda: frozenset(flags))
    assert environment.cpu_model() == model
    assert environment.origin_columns()["cpu"] == f"{model} ({environment.usable_cores()} cores)"


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),
        ("0::/docker/1", {"cpu.max": "50000 100000"}, 0.5),  # the container's own group is the root
        ("4:cpu,cpuacct:/docker/1", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3.0),
        (  # without the link cpu
            "4:cpu,cpuacct:/docker/1",
            {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            3.0,
        ),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("9:name=systemd:/\n2:cpuset:/", {"cpuset/cpuset.cpus": "0-1"}, None),
    ],
)
def test_a_containers_cpu_quota_limits_the_cores(
    groups: str, files: dict[str, str], quota: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{n}": t for n, t in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    found = environment.cpu_quota(tmp_path)
    assert found == quota
    monkeypatch.setattr(environment, "cpu_quota", lambda: found)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert environment.usable_cores() == {None: 8, 0.5: 1, 1.5: 1, 2.0: 2, 3.0: 3}[quota]
