"""Levels on a scale that all ranks share: sums of small integers, exact in any order, which may ride a ring.

The scales of a bucket are agreed on first, in one control message; a level then takes a byte, for the sum needs room.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Literal

import torch
from typing_extensions import override

from collectives.payloads.base import HEADER_BYTES, Payload
from collectives.payloads.codes import Codes
from collectives.payloads.dense import Dense
from collectives.transport.base import Transport
from compressors.base import Given, LossyCompressor
from compressors.kernels.ternary import level_dtype
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class SharedScale(LossyCompressor):
    """A compressor that can send integer levels on a shared scale for some layers."""

    combine: ClassVar[Literal["max", "mean"]]

    @property
    @override
    def needs_all_ranks(self) -> bool:
        """Where scales are shared; levels on a scale of their own travel as `Codes`."""
        return Codes not in self.kinds

    @abc.abstractmethod
    def shares_scale(self, layer: Layer) -> bool:
        """Whether this layer is sent as levels on a shared scale."""

    @abc.abstractmethod
    def local_scale(self, x: torch.Tensor) -> torch.Tensor:
        """The scale that this rank would choose for `x`, fp32 [1]; 0 for nothing to send."""

    def rounded_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """What becomes of fp32 scales that the ranks agreed on; the same shape."""
        return scale

    def shared_payload(self, levels: torch.Tensor, step: Step) -> Dense:
        """Integer levels [numel] in a type that holds their sum."""
        return Dense(levels.to(level_dtype(step.world_size)))

    def shared_nbytes(self, layer: Layer) -> int:
        """Packed bytes of `shared_payload`, up to 127 ranks."""
        return HEADER_BYTES + layer.numel

    @override
    def agree(self, given: Given, step: Step, transport: Transport) -> None:
        shared = [(layer.id, float(self.local_scale(x))) for layer, x in given if self.shares_scale(layer)]
        if not shared:
            return
        scales = transport.all_reduce_scalars([scale for _, scale in shared], "max" if self.combine == "max" else "sum")
        if self.combine == "mean":
            scales = [total / step.world_size for total in scales]
        rounded = self.rounded_scale(torch.tensor(scales, dtype=torch.float32)).tolist()
        step.memory.scales.update(zip([layer_id for layer_id, _ in shared], rounded, strict=True))

    @override
    def subtract_(self, x: torch.Tensor, payload: Payload, layer: Layer, step: Step) -> None:
        if isinstance(payload, Dense) and self.shares_scale(layer):
            x.sub_(payload.values, alpha=step.memory.scales[layer.id])
        else:
            super().subtract_(x, payload, layer, step)

    @override
    def finish(self, total: Payload, layer: Layer, step: Step, out: torch.Tensor) -> None:
        """The mean; of levels on a shared scale, times that scale."""
        super().finish(total, layer, step, out)
        if self.shares_scale(layer):
            out.mul_(step.memory.scales[layer.id])
