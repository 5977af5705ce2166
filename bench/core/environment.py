"""The environment of a run: machine, versions and the tool's own checkout, without importing torch."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import socket
import subprocess
from pathlib import Path
from typing import Any

from bench.core.errors import UsageError
from collectives.kernels.library import Kernels, cpu_flags, kernels_in_use
from collectives.options import OptionError

PACKAGES = ("gradwire", "torch", "torchvision", "typer", "rich", "pandas", "scipy", "scikit-learn", "pydantic")

VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}
"""flag of the processor -> how its widest vectors are called, the widest first"""


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


@functools.cache
def cpu_model() -> str:
    """The processor's name as the system gives it, and its widest vectors.

    Virtual machines call processors with and without AVX-512 by one name; torch rounds sums otherwise on these, and
    encoding takes up to twice as long without.
    """
    flags = cpu_flags()
    vectors = next((name for flag, name in VECTORS.items() if flag in flags), None)
    return " with ".join(filter(None, (_name_of_cpu(), vectors)))


def _name_of_cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache
def version_of(package: str) -> str:
    """The installed version, or an empty text."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def checkout() -> tuple[str, bool | None]:
    """(commit, has uncommitted changes) of the checkout this package is run from; ("", None) outside of one."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return "", None
    try:
        sha = _git(here, "rev-parse", "HEAD")
        return sha, bool(_git(here, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return "", None


def kernels(device: str = "cpu") -> Kernels:
    """What loops over elements on "cpu" or "cuda".

    Raises:
        UsageError: the environment asks for what there is not.
    """
    try:
        return kernels_in_use(device)
    except OptionError as error:
        raise UsageError(str(error)) from None


def origin_columns(device: str = "cpu") -> dict[str, Any]:
    """The `origin` columns of `metrics.csv`, all but `started_at`, of ranks on "cpu" or "cuda"."""
    sha, dirty = checkout()
    return {
        "host": socket.gethostname(),
        "cpu": f"{cpu_model()} ({usable_cores()} cores)",
        "torch_version": version_of("torch"),
        "kernels": kernels(device),
        "git_sha": sha,
        "git_dirty": dirty,
    }


def describe(command: list[str], device: str) -> dict[str, Any]:
    """All that `environment.json` holds.

    Args:
        command: the command line that started the run.
        device: "cpu" or "cuda".
    """
    return {
        **origin_columns(device),
        "command": command,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {package: version_of(package) for package in PACKAGES},
        "variables": {
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(("OMP_", "MKL_", "GLOO_", "NCCL_", "CUDA_VISIBLE", "TORCH", "GRADWIRE_"))
        },
    }


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
