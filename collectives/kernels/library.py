"""Which library of native loops serves here, if any. Imports no torch.

GRADWIRE_KERNELS=reference in the environment turns them off: the same numbers from plain torch and numpy, slowly.
"""

from __future__ import annotations

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
CPU_INFO = Path("/proc/cpuinfo")
AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
AVX512 = AVX2 | frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
NEEDS = {"x86_64_v3": AVX2, "x86_64_v4": AVX512}
"""processor of `TARGETS` -> what it can do beyond the first one, by the kernel's names"""

Kernels = Literal["native", "triton", "reference"]

_forced: Kernels | None = None


@dataclasses.dataclass(frozen=True)
class Library:
    """What was found.

    Attributes:
        handle: the loaded library; None where the reference path serves.
        finding: which one, or why none, for people.
    """

    handle: ctypes.CDLL | None
    finding: str


def kernels_in_use(device: str = "cpu") -> Kernels:
    """What serves on a kind of device, by torch's name.

    Raises:
        OptionError: "GRADWIRE_KERNELS=fast: ...".
    """
    if _forced is not None:
        return _forced
    if device == "cuda":
        return "reference" if triton_missing() else "triton"
    return "native" if device == "cpu" and library() is not None else "reference"


def library() -> ctypes.CDLL | None:
    """The library of native loops; None where the reference path serves."""
    return found().handle if _forced is None else None


@functools.cache
def found() -> Library:
    """Look for a library that this processor can run; done once.

    Raises:
        OptionError: the environment asks for what there is not.
    """
    if _wanted() == "reference":
        return Library(None, f"{VARIABLE}=reference")
    return load(HERE)


def load(folder: Path) -> Library:
    """Of the libraries in `folder` the one that suits this processor best; where none is, why not."""
    refused = []
    for processor in reversed(suitable_processors() or ["none"]):
        found = open_library(folder / library_name(processor), sources(), f"compiled for {processor}")
        if found.handle is not None:
            return found
        refused.append(found)
    return refused[0]


def open_library(path: Path, files: list[Path], finding: str) -> Library:
    """A library that `compile_library` made of these files; of a library without sources beside it nothing is asked."""
    note = path.parent / NOT_BUILT
    failed = note.read_text(encoding="utf-8").strip() if note.exists() else ""
    if not path.exists():
        return Library(None, failed or "nothing has been built here")
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return Library(None, f"the library cannot be loaded: {error}")
    if files and _built_from(handle) != digest(files):
        reason = "they were built from other sources than those beside them, or with other flags"
        return Library(None, f"{reason}; building them anew failed: {failed}" if failed else reason)
    return Library(handle, finding)


def _built_from(handle: ctypes.CDLL) -> str:
    try:
        handle.sources_digest.restype = ctypes.c_char_p
        return str(handle.sources_digest().decode())
    except AttributeError:  # a library of something else
        return ""


def _wanted() -> str:
    wanted = os.environ.get(VARIABLE, "native")
    if wanted not in ("native", "reference"):
        raise OptionError(f"{VARIABLE}={wanted}: set it to native or reference, or leave it out")
    return wanted


def suitable_processors() -> list[str]:
    """The processors of `TARGETS` whose code this one runs, the most able last."""
    flags = cpu_flags()
    return [name for name in TARGETS.get(platform.machine(), ()) if NEEDS.get(name, frozenset()) <= flags]


def cpu_flags() -> frozenset[str]:
    """What processor and system can do, by the kernel's names; empty where it does not say."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split()) for line in lines if line.startswith("flags")), frozenset())


@functools.cache
def triton_missing() -> str:
    """Why Triton does not serve on GPUs; empty where it does.

    Raises:
        OptionError: the environment asks for what there is not.
    """
    if _wanted() == "reference":
        return f"{VARIABLE}=reference"
    if importlib.util.find_spec("triton") is None:
        return "this torch brings no Triton"
    if not ("CC" in os.environ or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs gcc or clang, and there is none"
    return ""


@contextlib.contextmanager
def serving(kernels: Literal["triton", "reference"]) -> Iterator[None]:
    """Within, these serve on all devices and in all threads: for tests and benchmarks.

    On CPUs Triton needs its interpreter: TRITON_INTERPRET=1 in the environment before it is imported.
    """
    global _forced
    before, _forced = _forced, kernels
    try:
        yield
    finally:
        _forced = before


def reference_path() -> contextlib.AbstractContextManager[None]:
    """Within, the reference path serves."""
    return serving("reference")
