"""Environment variables of a job's processes: threads, memory allocation, network interface, import path."""

from __future__ import annotations

import os
import sys

from bench.core.processes import import_variables

# By default glibc returns large blocks to the kernel and gets new, zeroed pages in every step, which takes up to a
# tenth of a step's time on a CPU. These thresholds make it keep the blocks. Before version 2.35, glibc rejects a first
# threshold above 32 MiB; setting only one of the two would be worse than setting neither, because glibc then stops
# adapting the other.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
# With all ranks on one machine, gloo need not be reachable from others.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


def job_variables(threads: int) -> dict[str, str]:
    """Return the variables to add to this process's own; without OMP_NUM_THREADS, torchrun would set it to 1."""
    limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return _unless_given(KEEP_MEMORY) | limits | {"PYTHONUNBUFFERED": "1"} | import_variables()


def local_variables(threads: int) -> dict[str, str]:
    """Return the variables for a job whose ranks are all on this machine."""
    return job_variables(threads) | _unless_given(LOOPBACK)


def _unless_given(defaults: dict[str, str]) -> dict[str, str]:
    return {name: os.environ.get(name, value) for name, value in defaults.items()}
