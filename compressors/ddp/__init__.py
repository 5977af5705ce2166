"""A compressor and a collective at work in DistributedDataParallel: `from compressors.ddp import attach`."""

from __future__ import annotations

from compressors.ddp.hook import CompressionHook, attach
from compressors.ddp.reducer import Reducer

__all__ = ["CompressionHook", "Reducer", "attach"]
