"""Parts: tensors laid end to end, such as the layers of a bucket, which loops read as one where they lie."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from collectives.kernels.loop import longs


class Parts:
    """One tensor in several pieces of memory.

    Args:
        tensors: fp32 and 1-D, at least one; made contiguous where they are not.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor.contiguous() for tensor in tensors]
        self.numel = sum(tensor.numel() for tensor in tensors)
        self.device = tensors[0].device

    @functools.cached_property
    def flat(self) -> torch.Tensor:
        """All as one tensor, fp32 [numel]; a single one itself."""
        return self.tensors[0] if len(self.tensors) == 1 else torch.cat(self.tensors)

    @functools.cached_property
    def starts(self) -> Any:
        """Addresses of the parts, for an argument of a loop that is `Longs`."""
        return longs([tensor.data_ptr() for tensor in self.tensors])

    @functools.cached_property
    def borders(self) -> Any:
        """Where each part begins, counted over all, and the end; likewise."""
        return longs([0, *itertools.accumulate(tensor.numel() for tensor in self.tensors)])
