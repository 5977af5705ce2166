"""PyTorch's fp16 hook: divides by the number of ranks, rounds to fp16, all-reduces.

Source: torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook.
"""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from compressors.families.torch_comm_hook import DDPHook, TorchCommHook
from compressors.layer import Layer


@dataclasses.dataclass(kw_only=True)
class TorchFp16(TorchCommHook):
    """The hook as it is.

    Bytes: 2 m for a bucket of m elements, all-reduced by the backend.
    """

    def hook(self, process_group: dist.ProcessGroup) -> tuple[object, DDPHook]:
        """The process group is its state."""
        return process_group, default_hooks.fp16_compress_hook

    def expected_nbytes(self, layer: Layer) -> int:
        """2 bytes per element."""
        return 2 * layer.numel
