"""Algorithm bandwidth and bus bandwidth of an all-reduce, which compare sums of different sizes and numbers of ranks.

The algorithm bandwidth is the bytes of the tensor divided by the time of its sum. In any all-reduce each of n ranks
must send at least 2(n-1)/n of the tensor: all but its own share, once to gather the terms and once to distribute the
total. So the bus bandwidth, algbw x 2(n-1)/n, of a dense payload can be compared with the rate of a link for every n.
For a compressed payload both numbers use the size of the dense tensor, so they may exceed the link's rate.

Source: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations


def algorithm_bandwidth(size_bytes: int, time_s: float) -> float:
    """Return the tensor's bytes summed per second; `time_s` > 0."""
    return size_bytes / time_s


def bus_bandwidth(algbw: float, world_size: int) -> float:
    """Return the least bytes per second that each of `world_size` >= 1 ranks must have sent."""
    return algbw * 2 * (world_size - 1) / world_size
