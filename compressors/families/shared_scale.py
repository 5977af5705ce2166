"""Levels on a scale that all ranks share: sums of small integers, exact in any order, which may ride a ring.

The scales of a bucket are agreed on first, in one control message; a level then takes a byte, for the sum needs room.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Literal

import torch

from collectives.base import Collective
from collectives.payloads.base import HEADER_BYTES, Payload
from collectives.payloads.codes import Codes
from collectives.payloads.dense import Dense
from compressors.base import LossyCompressor
from compressors.kernels.ternary import level_dtype
from compressors.layer import Layer, Step
from compressors.unit import Unit


@dataclasses.dataclass(kw_only=True)
class SharedScale(LossyCompressor):
    """A compressor that can send integer levels on a shared scale for some layers."""

    combine: ClassVar[Literal["max", "mean"]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._agreed: dict[int, float] = {}

    @property
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

    def finish(self, total: Payload, layer: Layer, step: Step, out: torch.Tensor) -> None:
        """The mean; of levels on a shared scale, times that scale."""
        super().finish(total, layer, step, out)
        if self.shares_scale(layer):
            out.mul_(self._agreed[layer.id])

    def _agree(self, units: list[Unit], inputs: list[torch.Tensor], step: Step, collective: Collective) -> None:
        shared = [
            (unit.layer.id, x)
            for unit, x in zip(units, inputs, strict=True)
            if not unit.dense and self.shares_scale(unit.layer)
        ]
        if not shared:
            return
        scales = [float(self.local_scale(x)) for _, x in shared]
        if self.combine == "max":
            agreed = collective.transport.all_reduce_scalars(scales, "max")
        else:
            agreed = [total / step.world_size for total in collective.transport.all_reduce_scalars(scales, "sum")]
        rounded = self.rounded_scale(torch.tensor(agreed))
        self._agreed.update(zip([layer_id for layer_id, _ in shared], rounded.tolist(), strict=True))

    def _settle(self, unit: Unit, x: torch.Tensor, payload: Payload) -> None:
        if self.keeps_residual and isinstance(payload, Dense) and self.shares_scale(unit.layer):
            x.sub_(payload.values, alpha=self._agreed[unit.layer.id])
        else:
            super()._settle(unit, x, payload)
