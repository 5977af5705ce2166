"""A compressor and a collective at work in DistributedDataParallel: `from compressors.ddp import attach`."""

from __future__ import annotations

from compressors.ddp.attach import attach
from compressors.ddp.hook import CompressionHook
from compressors.ddp.reducer import Reducer

__all__ = ["CompressionHook", "Reducer", "attach"]
