"""Describe the environment of a run without importing torch: machine, package versions, this project's checkout.

Also find environment variables and resource limits that may have made torch fail.
"""

import functools
import importlib.metadata
import os
import platform
import resource
import socket
import subprocess
import textwrap
import traceback
from pathlib import Path
from typing import Any

from bench.core.errors import UsageError
from collectives.kernels.library import Kernels, cpu_flags, kernels_in_use
from collectives.options import OptionError

PACKAGES = ("gradwire", "torch", "torchvision", "typer", "rich", "pandas", "scipy", "scikit-learn", "pydantic")

# Flag of the processor -> name of its vector instructions, widest first.
VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}

# Prefixes of the environment variables that only torch reads.
TORCH_VARIABLES = ("TORCH_", "PYTORCH_", "GLOO_", "NCCL_")

# Limit of open files that is enough for a process of a job.
ENOUGH_FILES = 1024


def try_without_variables(beginnings: tuple[str, ...] = TORCH_VARIABLES) -> str:
    """Return a suggestion to unset environment variables, to append to an error message; empty if none is set.

    Args:
        beginnings: prefixes of the variables' names.
    """
    given = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(beginnings)]
    return f"; try without {' and '.join(given)} in the environment" if given else ""


def possible_causes() -> str:
    """Return the limits and environment variables that may make torch fail, as text to append to an error message."""
    files, memory = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS))
    return (
        (f"; `ulimit -n` is {files}; raise it to {ENOUGH_FILES}" if 0 <= files < ENOUGH_FILES else "")
        + (f"; `ulimit -v` is {memory >> 10}; set it to unlimited" if memory != resource.RLIM_INFINITY else "")
        + try_without_variables()
    )


def failure_to_import_torch(error: BaseException) -> UsageError | None:
    """Return the error to show if `error` was raised while torch was being imported; None for any other error."""
    modules = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>")
    if not any(frame.f_globals.get("__name__", "").partition(".")[0] == "torch" for frame in modules):
        return None
    reason = textwrap.shorten(str(error), 160, placeholder=" ...").rstrip(".") or type(error).__name__
    return UsageError(f"torch cannot be imported: {reason}{try_without_variables(('TORCH_', 'PYTORCH_'))}")


def usable_cores() -> int:
    """Return how many cores this process may use: the number in its CPU affinity, or its CPU quota if that is lower."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the smallest CPU quota of the control groups that hold this process, in cores; None if there is none.

    Containers limit their processes by such quotas. Inside a container, the container's group may appear as the root.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
    """
    groups, quotas = root / "sys" / "fs" / "cgroup", []
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            mounted, read = groups, _quota_of_version_2
        elif "cpu" in controllers.split(","):
            name = controllers if (groups / controllers).is_dir() else "cpu"  # usually one is a link to the other
            mounted, read = groups / name, _quota_of_version_1
        else:
            continue
        group = mounted / path.lstrip("/")
        quotas += [read(each) for each in (group, *group.parents) if each.is_relative_to(mounted)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of_version_2(group: Path) -> float | None:
    quota, *period = _text(group / "cpu.max").split() or ["max"]
    return None if quota == "max" else int(quota) / int(period[0])


def _quota_of_version_1(group: Path) -> float | None:
    quota, period = (_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _text(path: Path) -> str:
    """Return the text of a kernel file, such as `/proc/cpuinfo`; empty if the file is missing or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@functools.cache
def cpu_model() -> str:
    """Return the processor's name and its widest vector instructions, such as "... with AVX-512".

    The name alone is not enough: virtual machines give processors with and without AVX-512 the same name, but torch
    rounds sums differently on the two, and encoding takes up to twice as long without AVX-512.
    """
    vectors = [name for flag, name in VECTORS.items() if flag in cpu_flags()]
    return " with ".join([_name_of_cpu(), *vectors[:1]])


def _name_of_cpu() -> str:
    lines = _text(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


@functools.cache
def version_of(package: str) -> str:
    """Return the installed version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def checkout() -> tuple[str, bool | None]:
    """Return the commit of the git checkout that holds this package, and True if tracked files have changes.

    The result is ("", None) if the package is not in a checkout.
    """
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return "", None
    command = ["git", "-C", str(here), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "", None
    # The first line is "# branch.oid COMMIT"; lines without "#" are changed files.
    first, *lines = done.stdout.splitlines()
    return first.split()[-1], any(not line.startswith("#") for line in lines)


def kernels(device: str = "cpu") -> Kernels:
    """Return the implementation of the compute kernels in use on "cpu" or "cuda": native, triton or reference.

    Raises:
        UsageError: an environment variable requests kernels that are not available.
    """
    try:
        return kernels_in_use(device)
    except OptionError as error:
        raise UsageError(str(error)) from None


def origin_columns(device: str = "cpu") -> dict[str, Any]:
    """Return the values of the column group `origin` (machine and versions), except `started_at`, by column name.

    Args:
        device: device of the ranks, "cpu" or "cuda".
    """
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
    """Return the content of `environment.json`: machine, versions, checkout and environment variables.

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
