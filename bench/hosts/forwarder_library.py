"""The forwarder's compiled loop, where there is one."""

from __future__ import annotations

import ctypes
import functools

from bench.core.errors import UsageError
from bench.hosts.forwarder_build import HERE, LIBRARY, sources
from collectives.kernels.library import Library, open_library


@functools.cache
def found() -> Library:
    """The library, or why there is none; looked for once."""
    return open_library(HERE / LIBRARY, sources(), "compiled")


def library() -> ctypes.CDLL:
    """The library.

    Raises:
        UsageError: there is none.
    """
    handle = found().handle
    if handle is None:
        raise UsageError(f"the forwarder between virtual hosts is missing: {found().finding}; run `make setup`")
    return handle
