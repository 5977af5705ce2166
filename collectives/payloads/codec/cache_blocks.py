"""Long CPU tensors in cache-sized cache_blocks.

A temporary as long as a model is fresh memory each time, and the kernel's page faults cost ten times the arithmetic;
one of a stretch's length is reused from the cache. GPUs have their own allocator and want long kernels: there, one
stretch is everything.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

LENGTH = 2**16
Stretch = slice


def cache_blocks(numel: int, device: torch.device, multiple_of: int = 1) -> Iterator[Stretch]:
    """Slices that cover 0..numel in order.

    Args:
        numel: elements to cover.
        device: where they lie.
        multiple_of: every slice but the last is that many elements long, or a multiple of it.
    """
    step = -(-LENGTH // multiple_of) * multiple_of if device.type == "cpu" else max(1, numel)
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))
