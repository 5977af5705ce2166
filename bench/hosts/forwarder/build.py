"""Compile the forwarder of virtual hosts: `python -m bench.hosts.forwarder.build`.

The compiled library is linked without the C library: it uses the C functions of the process that loads it.
"""

import platform
import sys
from pathlib import Path

from collectives.kernels.build import build_or_say_why, compile_library, processors_of_this_machine

HERE = Path(__file__).parent
LIBRARY = f"forwarder-{platform.machine()}.so"


def sources() -> list[Path]:
    """Return the C source files; empty in an installation, which contains only the compiled library."""
    return sorted((HERE / "native").glob("*.c"))


def build(folder: Path) -> Path:
    """Compile the library into `folder` and return its path.

    Raises:
        BuildError: this machine is not supported, there is no compiler, or the compiler failed.
    """
    return compile_library(folder / LIBRARY, sources(), processors_of_this_machine()[0])


if __name__ == "__main__":
    sys.exit(build_or_say_why(HERE, build) or None)
