"""The base of the methods whose ranks can agree on a scale for each layer before they encode."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from typing_extensions import override

from collectives.payloads import Codes, Dense, Payload
from collectives.transport.base import Transport
from compressors.base import DenseEnds, ErrorFeedback, Given, MinNumel, PerLayer, Skip
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class SharedScale(PerLayer):
    """Base of the methods that can send integer levels with one scale per layer for all ranks.

    Attributes:
        combine: the operation that makes the shared scale from the scales of all ranks.
    """

    averages: ClassVar[bool] = False
    combine: ClassVar[Literal["max", "mean"]]

    error_feedback: ErrorFeedback = False
    min_numel: MinNumel = 0
    skip: Skip = ()
    dense_ends: DenseEnds = False

    def kind_for(self, layer: Layer) -> type[Payload]:
        """Return the class of the payload that `encode` returns for this layer after any warm-up."""
        return Dense if self.shares_scale(layer) else Codes

    def shares_scale(self, layer: Layer) -> bool:
        """Return True if this layer is sent as levels with a shared scale; by default if any layer is."""
        return self.traits.needs_all_ranks

    @abc.abstractmethod
    def local_scale(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's scale for `x`, fp32 [1]; 0 if there is nothing to send."""

    def rounded_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """Return scales that all ranks share, fp32 of any shape, rounded as the method needs; by default unchanged."""
        return scale

    def agree(self, given: Given, step: Step, transport: Transport) -> None:
        """Agree with the other ranks on the scales for `encode`, and write the scales to `step.memory.scales`.

        Every rank must call this method, before it encodes, if `traits.needs_all_ranks`.

        Args:
            given: the layers and tensors that `encode` will get.
            step: the current step.
            transport: connection to the other ranks.
        """
        own = {layer.id: float(self.local_scale(x)) for layer, x in given if self.shares_scale(layer)}
        if not own:
            return
        scales = transport.all_reduce_scalars([*own.values()], "max" if self.combine == "max" else "sum")
        if self.combine == "mean":
            scales = [total / step.world_size for total in scales]
        rounded = self.rounded_scale(torch.tensor(scales, dtype=torch.float32))
        step.memory.scales.update(zip(own, rounded.tolist(), strict=True))

    @override
    def _subtract(self, x: torch.Tensor, payload: Payload, layer: Layer, step: Step) -> None:
        if self.shares_scale(layer):
            x.sub_(payload.values, alpha=step.memory.scales[layer.id])
        else:
            super()._subtract(x, payload, layer, step)

    @override
    def finish(self, total: Payload, layer: Layer, step: Step, updates: Sequence[torch.Tensor]) -> None:
        super().finish(total, layer, step, updates)
        if self.shares_scale(layer):
            for update in updates:
                update.mul_(step.memory.scales[layer.id])
