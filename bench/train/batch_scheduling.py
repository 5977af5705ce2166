"""Long turns: threads that share a core change places less often, so caches stay warm for the one that computes.

A rank has three busy threads (training, exchange, the backend's), and a machine often has fewer cores than that. Left
alone, Linux lets every message that arrives interrupt the training thread, and changes threads every few milliseconds.
Batch scheduling ends the first, a longer slice the second. No core is ever idle while a thread waits for it, so what a
message waits for is computing that had to be done anyway.

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

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "armv7l": 380}  # the call's number
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def use_batch_scheduling() -> None:
    """Ask for batch scheduling and long slices, for the calling thread and all threads that it starts later.

    Only the order of work changes, never its result. Whoever started the run under another policy (`chrt --idle`) keeps
    it. Where the kernel refuses, or is not Linux, standard error (the rank's log) says so and everything runs
    as before.
    """
    number = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        print("long turns are not known on this platform; ranks that share cores interrupt each other", file=sys.stderr)
        return
    if os.sched_getscheduler(0) not in (os.SCHED_OTHER, os.SCHED_BATCH):
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_BATCH, 0, nice, 0, round(SLICE_S * 1e9), 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, 0, ctypes.c_char_p(attributes), 0):
        reason = os.strerror(ctypes.get_errno())
        print(f"long turns are refused here ({reason}); ranks that share cores interrupt each other", file=sys.stderr)
