"""Compiles the forwarder of virtual hosts, as the native loops are compiled: `python -m bench.hosts.forwarder.build`.

The C library that it calls is found in the process that loads it.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from collectives.kernels.build import build_or_say_why, compile_library, processors_of_this_machine

HERE = Path(__file__).parent
LIBRARY = f"forwarder-{platform.machine()}.so"


def sources() -> list[Path]:
    """The C file; none in an installation, which holds the library only."""
    return sorted((HERE / "native").glob("*.c"))


def build(folder: Path) -> Path:
    """Compile it into `folder`; returns its path.

    Raises:
        BuildError: there is none for this machine, there is no compiler, or it failed.
    """
    return compile_library(folder / LIBRARY, sources(), processors_of_this_machine()[0])


if __name__ == "__main__":
    sys.exit(build_or_say_why(HERE, build) or None)
