"""A compressor and a collective at work in DistributedDataParallel: `from compressors.ddp import attach`."""

from __future__ import annotations

from compressors.ddp.hook import CompressionHook, attach

__all__ = ["CompressionHook", "attach"]
