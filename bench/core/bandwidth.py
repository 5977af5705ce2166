"""Bandwidths of an all-reduce, so that sizes and numbers of ranks can be compared.

The algorithm bandwidth is what a user feels: bytes of the tensor over the time its sum took. For links it must be
scaled: whatever the algorithm, each of n ranks has to send at least 2(n-1)/n of the tensor (all but its own share of
the sum, once to gather the terms and once to hand out the total), so the bus bandwidth, algbw x 2(n-1)/n, of a dense
payload can be held against the rate of a link for every n. A compressed payload moves less than that; its two figures
are those of the dense tensor that it stands for, and may exceed the link's rate.

Source: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations


def algorithm_bandwidth(size_bytes: int, time_s: float) -> float:
    """Bytes per second of the tensor that is summed; `time_s` > 0."""
    return size_bytes / time_s


def bus_bandwidth(algbw: float, world_size: int) -> float:
    """Bytes per second that each of `world_size` >= 1 ranks must have sent at least."""
    return algbw * 2 * (world_size - 1) / world_size
