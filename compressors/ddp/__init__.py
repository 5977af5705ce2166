"""Exchange the gradients of a DistributedDataParallel model through a compressor and a collective; see `attach`."""

from compressors.ddp.attach import attach
from compressors.ddp.hook import CompressionHook
from compressors.ddp.reducer import Reducer
from compressors.ddp.reducers import reducer_for

__all__ = ["CompressionHook", "Reducer", "attach", "reducer_for"]
