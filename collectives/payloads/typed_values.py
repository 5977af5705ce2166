"""What the kinds share that hold one tensor of values, in the type that travels."""

from __future__ import annotations

import torch
from typing_extensions import override

from collectives.payloads.base import Payload


class TypedValues(Payload):
    """Values of one type.

    Attributes:
        values: what is transmitted; the wire tensor of element-wise kinds.
    """

    values: torch.Tensor

    @property
    @override
    def device(self) -> torch.device:
        return self.values.device

    @property
    @override
    def num_entries(self) -> int:
        return self.values.numel()

    @property
    @override
    def wire(self) -> torch.Tensor:
        return self.values if self.elementwise else super().wire
