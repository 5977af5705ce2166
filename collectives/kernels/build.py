"""Compiles the native loops, a library for each level of processors: `python -m collectives.kernels.build`.

The compiler is the one that the package `ziglang` brings, so every machine builds the same code, with or without a
compiler of its own. The loops need no C library (which would take ten times as long as they to prepare); what a
compiler turns into memcpy is found in the process. Contracting a product and a sum into one rounding is off: results
are those of the reference path, to the last bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDERS = ("collectives/kernels/native", "collectives/payloads/codec/native", "compressors/kernels/native")
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno", "-fno-sanitize=undefined")
FLAGS_OF = {"x86_64_v4": ("-mprefer-vector-width=512",)}  # random numbers and sums take half the time
GLIBC = "2.17"  # the oldest C library that has all that is called; wheels are tagged with it
LINKED = ("-shared", "-fPIC", "-nostdlib", "-s")
TARGETS = {
    "x86_64": ("x86_64", "x86_64_v3", "x86_64_v4"),
    "aarch64": ("generic",),
}
"""machine -> the processors, by the compiler's names, that get a library; the first one runs everywhere"""
NOT_BUILT = "not-built.txt"
TIMEOUT_S = 300


class BuildError(Exception):
    """The loops cannot be compiled here; the message says why."""


def sources() -> list[Path]:
    """The C files and their headers; none in an installation, which holds libraries only."""
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.[ch]"))


def digest(files: list[Path]) -> str:
    """What tells one state of the sources, and of what the compiler is told, from another: 16 hexadecimal digits."""
    texts = b"".join(path.name.encode() + b"\0" + path.read_bytes() + b"\0" for path in files)
    told = repr((FLAGS, FLAGS_OF, LINKED, TARGETS)).encode()
    return hashlib.sha256(texts + told).hexdigest()[:16]


def library_name(processor: str) -> str:
    """File name of the library for a processor of `TARGETS`."""
    return f"loops-{processor}.so"


def build(folder: Path) -> list[Path]:
    """Compile the libraries for this machine into `folder`; returns their paths.

    Raises:
        BuildError: this machine is not one of `TARGETS`, there is no compiler, or it failed.
    """
    files = sources()

    def compiled(processor: str) -> Path:
        return compile_library(folder / library_name(processor), files, processor)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compiled, processors_of_this_machine()))


def processors_of_this_machine() -> tuple[str, ...]:
    """By the compiler's names; the first one's code runs everywhere.

    Raises:
        BuildError: nothing is compiled for machines like this one.
    """
    processors = TARGETS.get(platform.machine(), ())
    if platform.system() != "Linux" or not processors:
        raise BuildError(f"there are no native loops for {platform.system()} on {platform.machine()}")
    return processors


def build_or_say_why(folder: Path, build: Callable[[Path], object] = build) -> str:
    """`build`; where it fails, leave the reason in `folder` for `bench doctor`. Returns it, or an empty text."""
    note = folder / NOT_BUILT
    try:
        note.unlink(missing_ok=True)
        build(folder)
    except (BuildError, OSError) as error:
        with contextlib.suppress(OSError):  # a folder in which nothing can be left
            folder.mkdir(parents=True, exist_ok=True)
            note.write_text(f"{error}\n", encoding="utf-8")
        return str(error)
    return ""


def compile_library(library: Path, files: list[Path], processor: str) -> Path:
    """Compile C files, with the headers among them, into one library, which is there at once or not at all.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        compiled = Path(cache) / library.name
        _compile(compiled, files, processor, cache)
        return _moved(compiled, library)


def _compile(library: Path, files: list[Path], processor: str, cache: str) -> None:
    command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{platform.machine()}-linux-gnu.{GLIBC}"]
    command += [
        f"-mcpu={processor}",
        *FLAGS,
        *FLAGS_OF.get(processor, ()),
        *LINKED,
        f'-DSOURCES="{digest(files)}"',
        "-o",
        str(library),
    ]
    command += [str(path) for path in files if path.suffix == ".c"]
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": f"{cache}/zig", "ZIG_LOCAL_CACHE_DIR": f"{cache}/zig"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the compiler did not run: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BuildError(f"the compiler failed: {last}")


def _moved(library: Path, to: Path) -> Path:
    """Put a library into its place in one step: a process that has loaded the old one keeps it."""
    beside = to.with_name(f".{to.name}.{os.getpid()}")
    beside.write_bytes(library.read_bytes())
    beside.replace(to)
    return to


if __name__ == "__main__":
    sys.exit(build_or_say_why(HERE) or None)
