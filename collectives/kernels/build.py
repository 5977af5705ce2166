"""Compile the native loops into one library per processor level: `python -m collectives.kernels.build`.

The compiler is that of the package `ziglang`, so every machine builds the same code and needs no compiler of its own.
The libraries are not linked with a C library, because zig would take ten times as long to prepare one. The compiler
inserts calls to memcpy; they are resolved in the running process. Fused multiply-add is off, so results equal those of
the reference path bit for bit.
"""

import contextlib
import hashlib
import itertools
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
FLAGS_OF = {"x86_64_v4": ("-mprefer-vector-width=512",)}  # halves the time of random numbers and sums
GLIBC = "2.17"  # oldest C library with all functions that the loops call; part of the wheels' platform tag
LINKED = ("-shared", "-fPIC", "-nostdlib", "-s")
# machine -> processor levels (names of the compiler) that get a library; every such machine can run the first level
TARGETS = {
    "x86_64": ("x86_64", "x86_64_v3", "x86_64_v4"),
    "aarch64": ("generic",),
}
NOT_BUILT = "not-built.txt"
TIMEOUT_S = 300


class BuildError(Exception):
    """The loops cannot be compiled here; the message says why."""


def sources() -> list[Path]:
    """Return the paths of the C files and headers; empty in an installation, which has only the libraries."""
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.[ch]"))


def digest(files: list[Path]) -> str:
    """Return a hash of these source files and of the compiler's flags: 16 hexadecimal digits."""
    texts = b"".join(path.name.encode() + b"\0" + path.read_bytes() + b"\0" for path in files)
    return hashlib.sha256(texts + repr((FLAGS, FLAGS_OF, LINKED, TARGETS)).encode()).hexdigest()[:16]


def library_name(processor: str) -> str:
    """Return the file name of the library for a processor level such as ``x86_64_v3``."""
    return f"loops-{processor}.so"


def build(folder: Path) -> list[Path]:
    """Compile the libraries for this machine into `folder` and return their paths.

    Raises:
        BuildError: this machine is not in `TARGETS`, there is no compiler, or the compiler failed.
    """
    processors = processors_of_this_machine()
    libraries = [folder / library_name(processor) for processor in processors]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_library, libraries, itertools.repeat(sources()), processors))


def processors_of_this_machine() -> tuple[str, ...]:
    """Return the processor levels for which libraries are built on this machine, such as ``x86_64_v3``.

    Raises:
        BuildError: this machine's operating system is not Linux, or its architecture is not in `TARGETS`.
    """
    processors = TARGETS.get(platform.machine(), ())
    if platform.system() != "Linux" or not processors:
        raise BuildError(f"native loops are not available for {platform.system()} on {platform.machine()}")
    return processors


def build_or_say_why(folder: Path, build: Callable[[Path], object] = build) -> str:
    """Compile the native loops into `folder`; return an empty string, or the reason if the build failed.

    The reason is also written into a file in `folder`, where `bench doctor` finds it.
    """
    note = folder / NOT_BUILT
    try:
        note.unlink(missing_ok=True)
        build(folder)
    except (BuildError, OSError) as error:
        with contextlib.suppress(OSError):  # the folder may be read-only
            folder.mkdir(parents=True, exist_ok=True)
            note.write_text(f"{error}\n", encoding="utf-8")
        return str(error)
    return ""


def compile_library(library: Path, files: list[Path], processor: str) -> Path:
    """Compile C files into one library, and return its path.

    The library is replaced atomically: other processes never see an incomplete file.

    Args:
        library: path of the library to write.
        files: source files and headers; only files that end in ``.c`` are compiled.
        processor: the compiler's name of the processors for which the library is built, such as ``x86_64_v3``.

    Raises:
        BuildError: there is no compiler, or the compiler failed.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        compiled = Path(cache) / library.name
        command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{platform.machine()}-linux-gnu.{GLIBC}"]
        command += [f"-mcpu={processor}", *FLAGS, *FLAGS_OF.get(processor, ()), *LINKED]
        command += [f'-DSOURCES="{digest(files)}"', "-o", str(compiled)]
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
        beside = library.with_name(f".{library.name}.{os.getpid()}")
        beside.write_bytes(compiled.read_bytes())
        return beside.replace(library)  # atomically: a process that has loaded the old library keeps it


if __name__ == "__main__":
    sys.exit(build_or_say_why(HERE) or None)
