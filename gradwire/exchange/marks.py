"""Marks in the traces of `torch.profiler`: when this project encodes, sends, waits and decodes.

A thread that the profiler did not start in is recorded only if the profiler records all threads.
"""

import contextlib
from typing import Literal

from torch.autograd import profiler

_NO_MARK = contextlib.nullcontext()


def mark(
    part: Literal["encode", "send", "wait", "decode", "exchange"],
) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that marks a part of the exchange, and does nothing unless a profiler records.

    Args:
        part: "exchange" is an exchange during which this thread does nothing else. Otherwise a message is under way
            from "send" until its sum is decoded, in the order in which messages were sent.
    """
    return profiler.record_function(f"gradwire: {part}") if profiler._is_profiler_enabled else _NO_MARK
