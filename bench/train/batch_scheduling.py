"""Batch scheduling: threads that share a core switch less often, so that caches stay warm for the one that computes.

A rank has three busy threads (training, exchange, the backend's), often more than the cores available to it. By
default, Linux lets every arriving message interrupt the training thread, and switches threads every few milliseconds.
Batch scheduling prevents the former and longer time slices the latter. A core is never idle while a thread waits for
it: a message waits only for computation that has to be done anyway.

Source: sched(7), SCHED_BATCH; sched_setattr(2), whose `sched_runtime` is a thread's slice since Linux 6.12 (earlier
kernels ignore it).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

SLICE_S = 0.02

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "armv7l": 380}  # number of the system call
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def use_batch_scheduling() -> None:
    """Request batch scheduling and long slices for the calling thread and all threads that it starts later.

    Only the order of work changes, not its result. If the run was started under another policy (`chrt --idle`), that
    policy stays. If the kernel refuses or is not Linux, scheduling stays as it is, with a message on standard error
    (the rank's log).
    """
    number = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        print(
            "batch scheduling is not supported on this platform; ranks that share cores interrupt each other",
            file=sys.stderr,
        )
        return
    if os.sched_getscheduler(0) not in (os.SCHED_OTHER, os.SCHED_BATCH):
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_BATCH, 0, nice, 0, round(SLICE_S * 1e9), 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, 0, ctypes.c_char_p(attributes), 0):
        reason = os.strerror(ctypes.get_errno())
        print(
            f"the kernel refused batch scheduling ({reason}); ranks that share cores interrupt each other",
            file=sys.stderr,
        )
