"""The environment variables of a job's processes: threads, memory, and where Python finds its modules."""

from __future__ import annotations

import os
import sys

from bench.core.processes import import_variables

# glibc gives large blocks back to the kernel and asks for new, zeroed pages at every step: up to a tenth of a step's
# time on a CPU. So it keeps them, unless the user chose otherwise. Before version 2.35 it refuses to keep blocks above
# 32 MiB, and refusing one of the two is worse than neither: it then no longer adapts the threshold by itself.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
# On one machine gloo has no reason to listen where others could connect.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


def job_variables(threads: int) -> dict[str, str]:
    """What a job gets beside this process's own variables; torchrun would force one thread where OMP's is unset."""
    limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return _unless_given(KEEP_MEMORY) | limits | {"PYTHONUNBUFFERED": "1"} | import_variables()


def local_variables(threads: int) -> dict[str, str]:
    """The same for a job whose ranks are all on this machine."""
    return job_variables(threads) | _unless_given(LOOPBACK)


def _unless_given(defaults: dict[str, str]) -> dict[str, str]:
    return {name: os.environ.get(name, value) for name, value in defaults.items()}
