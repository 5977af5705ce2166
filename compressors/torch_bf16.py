"""PyTorch's bf16 hook: divides by the number of ranks, rounds to bf16, all-reduces.

Source: torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook.
"""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from typing_extensions import override

from compressors.families.torch_comm_hook import DDPHook, TorchCommHook
from compressors.layer import Layer


@dataclasses.dataclass(kw_only=True)
class TorchBf16(TorchCommHook):
    """The hook as it is.

    Bytes: 2 m for a bucket of m elements, all-reduced by the backend.
    """

    @override
    def hook(self, process_group: dist.ProcessGroup) -> tuple[object, DDPHook]:
        return process_group, default_hooks.bf16_compress_hook

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return 2 * layer.numel
