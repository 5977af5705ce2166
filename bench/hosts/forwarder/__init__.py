"""The forwarder between virtual hosts: where its compiled library is, and how the library is compiled.

The library is linked without the C library: it uses the C functions of the process that loads it. `setup.py` imports
this file, so this file imports nothing that has to be installed.
"""

import platform
from pathlib import Path

from collectives.kernels.build import compile_library, processors_of_this_machine

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
