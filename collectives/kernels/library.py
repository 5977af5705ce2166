"""Choose how loops are computed: by native C code on CPUs, by Triton on GPUs, or by the reference path.

This module does not import torch.

GRADWIRE_KERNELS=reference in the environment selects the reference path: plain torch and numpy, slower, same results.
"""

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from collectives.kernels.build import HERE, NOT_BUILT, TARGETS, digest, library_name, sources
from collectives.options import OptionError

VARIABLE = "GRADWIRE_KERNELS"
AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
NEEDS = {  # flags in /proc/cpuinfo that a target in `TARGETS` needs
    "x86_64_v3": AVX2,
    "x86_64_v4": AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}

Kernels = Literal["native", "triton", "reference"]

_forced: Kernels | None = None


@dataclasses.dataclass(frozen=True)
class Library:
    """The result of the search for native loops.

    Attributes:
        handle: the loaded library; None if the reference path (torch and numpy) is used.
        finding: a phrase for users: which library was found, or why none was found.
    """

    handle: ctypes.CDLL | None
    finding: str


def kernels_in_use(device: str = "cpu") -> Kernels:
    """Return the implementation of loops for tensors on a torch device type ("cpu" or "cuda").

    "native" is C code, "triton" GPU kernels, and "reference" plain torch and numpy.

    Raises:
        OptionError: GRADWIRE_KERNELS has an unknown value.
    """
    if _forced is not None:
        return _forced
    if device == "cuda":
        return "reference" if triton_missing() else "triton"
    return "native" if device == "cpu" and library() is not None else "reference"


def library() -> ctypes.CDLL | None:
    """Return the library of native loops; None if native loops are not used."""
    return found().handle if _forced is None else None


@functools.cache
def found() -> Library:
    """Find the library of native loops that this processor can run; later calls return the same result.

    Raises:
        OptionError: GRADWIRE_KERNELS has an unknown value.
    """
    if _wanted() == "reference":
        return Library(None, f"{VARIABLE}=reference")
    return load(HERE)


def load(folder: Path) -> Library:
    """Load the library of native loops in `folder` that suits this processor best; if none does, return why."""
    refused = []
    for processor in reversed(suitable_processors() or ["none"]):
        found = open_library(folder / library_name(processor), sources(), f"compiled for {processor}")
        if found.handle is not None:
            return found
        refused.append(found)
    return refused[0]


def open_library(path: Path, files: list[Path], finding: str) -> Library:
    """Load one library of native loops, if it can be used on this machine.

    Args:
        path: path of the library.
        files: the source files from which the library must have been compiled. If the list is empty, as in an
            installation, this is not checked.
        finding: the `finding` of the result if the library is loaded; otherwise, the `finding` of the result says why
            the library is not loaded.
    """
    note = path.parent / NOT_BUILT
    failed = note.read_text(encoding="utf-8").strip() if note.exists() else ""
    if not path.exists():
        return Library(None, failed or "the library has not been built here")
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return Library(None, f"the library cannot be loaded: {error}")
    sources_digest = getattr(handle, "sources_digest", None)  # None: a library of another program with the same name
    if sources_digest is not None:
        sources_digest.restype = ctypes.c_char_p
    if files and (sources_digest is None or sources_digest().decode() != digest(files)):
        reason = "the library was built from other sources than the present ones, or with other flags"
        return Library(None, f"{reason}; building it again failed: {failed}" if failed else reason)
    return Library(handle, finding)


def _wanted() -> str:
    wanted = os.environ.get(VARIABLE, "native")
    if wanted not in ("native", "reference"):
        raise OptionError(f"{VARIABLE}={wanted}: set it to native or reference, or leave it out")
    return wanted


def suitable_processors() -> list[str]:
    """Return the processor levels in `TARGETS` whose code this processor can run, the most capable last."""
    flags = cpu_flags()
    return [name for name in TARGETS.get(platform.machine(), ()) if NEEDS.get(name, frozenset()) <= flags]


def cpu_flags() -> frozenset[str]:
    """Return the processor's flags, such as ``avx2``, from /proc/cpuinfo; empty if that file has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split()) for line in lines if line.startswith("flags")), frozenset())


@functools.cache
def triton_missing() -> str:
    """Return the reason why Triton is not used on GPUs; an empty string if Triton is used.

    Raises:
        OptionError: GRADWIRE_KERNELS has an unknown value.
    """
    if _wanted() == "reference":
        return f"{VARIABLE}=reference"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; it is part of PyTorch's default build for GPUs"
    if not ("CC" in os.environ or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs gcc or clang, and neither was found"
    return ""


@contextlib.contextmanager
def serving(kernels: Literal["triton", "reference"]) -> Iterator[None]:
    """Use the implementation `kernels` for all loops, on all devices and in all threads, inside a `with` block.

    It is meant for tests and benchmarks.

    Triton on CPUs needs Triton's interpreter: set TRITON_INTERPRET=1 in the environment before Triton is imported.
    """
    global _forced
    before, _forced = _forced, kernels
    try:
        yield
    finally:
        _forced = before
