"""The environment of a run: machine, versions and the tool's own checkout, without importing torch."""

from __future__ import annotations

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
from types import FrameType
from typing import Any

from bench.core.errors import UsageError
from collectives.kernels.library import Kernels, cpu_flags, kernels_in_use
from collectives.options import OptionError

PACKAGES = ("gradwire", "torch", "torchvision", "typer", "rich", "pandas", "scipy", "scikit-learn", "pydantic")

VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}
"""flag of the processor -> how its widest vectors are called, the widest first"""


TORCH_VARIABLES = ("TORCH_", "PYTORCH_", "GLOO_", "NCCL_")
"""how the names of the variables begin that only torch reads"""

ENOUGH_FILES = 1024
"""that a process may have open at once"""


def try_without_variables(beginnings: tuple[str, ...] = TORCH_VARIABLES) -> str:
    """Return the end of a sentence about a failure inside torch: which of the user's variables to try without."""
    given = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(beginnings)]
    return f"; try without {' and '.join(given)} in the environment" if given else ""


def possible_causes() -> str:
    """Return the end of a sentence about a failure inside torch: the variables and limits here that may be why."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits = [f"`ulimit -n` is {files}; raise it to {ENOUGH_FILES}"] if 0 <= files < ENOUGH_FILES else []
    limits += [f"`ulimit -v` is {memory >> 10}; set it to unlimited"] if memory != resource.RLIM_INFINITY else []
    return "".join(f"; {limit}" for limit in limits) + try_without_variables()


def failure_to_import_torch(error: BaseException) -> UsageError | None:
    """Return the sentence for an error that came up while torch was being imported; None for another one."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(_is_module_of_torch(frame) for frame in frames):
        return None
    reason = textwrap.shorten(str(error), 160, placeholder=" ...").rstrip(".") or type(error).__name__
    return UsageError(f"torch cannot be imported: {reason}{try_without_variables(('TORCH_', 'PYTORCH_'))}")


def _is_module_of_torch(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__", "").partition(".")[0] == "torch"


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
