"""Per-layer tensors that a compressor keeps between steps, with proposed values beside accepted ones.

A step may be thrown away (a non-finite value on any rank), so nothing is overwritten before `commit`. Tensors are
stored in the groups in which buckets hand their layers over, so that one addition serves a whole bucket; the engine
regroups its buckets after the first step, and the store then regroups its tensors and loses nothing.
"""

from __future__ import annotations

from typing import Protocol

import torch

from compressors.unit import Unit

Key = tuple[int, ...]


class Store(Protocol):
    """What `Compressor` asks of every store of per-layer tensors."""

    def commit(self) -> None:
        """Proposed tensors become accepted."""

    def drop(self) -> None:
        """Proposed tensors are forgotten; accepted ones stay bit for bit what they were."""

    def by_layer(self) -> dict[int, torch.Tensor]:
        """Accepted tensors by layer id."""

    def load(self, tensors: dict[int, torch.Tensor]) -> None:
        """Replace everything by copies of these tensors, given by layer id."""


class LayerDict:
    """One tensor of any shape per layer: thresholds, ages, warm starts."""

    def __init__(self) -> None:
        self._accepted: dict[int, torch.Tensor] = {}
        self._proposed: dict[int, torch.Tensor] = {}

    def get(self, layer_id: int) -> torch.Tensor | None:
        """The layer's tensor as of the last `commit`, not to be changed; None before the first."""
        return self._accepted.get(layer_id)

    def propose(self, layer_id: int, tensor: torch.Tensor) -> None:
        """Make `tensor` the layer's one at the next `commit`; it must not be changed after that."""
        self._proposed[layer_id] = tensor

    def commit(self) -> None:
        """Proposed tensors become accepted."""
        self._accepted.update(self._proposed)
        self._proposed = {}

    def drop(self) -> None:
        """Proposed tensors are forgotten."""
        self._proposed = {}

    def by_layer(self) -> dict[int, torch.Tensor]:
        """Accepted tensors by layer id."""
        return self._accepted

    def load(self, tensors: dict[int, torch.Tensor]) -> None:
        """Replace everything by copies of these tensors, given by layer id."""
        self._accepted = {layer_id: tensor.clone() for layer_id, tensor in tensors.items()}
        self._proposed = {}


class LayerStore:
    """fp32 tensors of a layer's length: residuals, velocities."""

    def __init__(self) -> None:
        self._accepted: dict[Key, torch.Tensor] = {}
        self._proposed: dict[Key, torch.Tensor] = {}
        self._spare: dict[Key, torch.Tensor] = {}
        self._sizes: dict[int, int] = {}

    def accepted(self, unit: Unit) -> torch.Tensor | None:
        """The unit's tensor as of the last `commit`, fp32 [unit.numel], not to be changed; None before the first."""
        if unit.key not in self._accepted:
            self._regroup(unit)
        return self._accepted.get(unit.key)

    def propose(self, unit: Unit) -> torch.Tensor:
        """fp32 [unit.numel] with undefined contents, for the caller to fill; `commit` makes it the accepted one."""
        self._sizes.update((layer.id, layer.numel) for layer in unit.layers)
        proposed = self._spare.pop(unit.key, None)
        if proposed is None:
            proposed = torch.empty(unit.numel, device=unit.gradients[0].device)
        self._proposed[unit.key] = proposed
        return proposed

    def proposed(self, unit: Unit) -> torch.Tensor:
        """What `propose` returned for this unit at this step."""
        return self._proposed[unit.key]

    def commit(self) -> None:
        """Proposed tensors become accepted; the old ones are kept as spare memory."""
        for key, tensor in self._proposed.items():
            if key in self._accepted:
                self._spare[key] = self._accepted[key]
            self._accepted[key] = tensor
        self._proposed = {}

    def drop(self) -> None:
        """Proposed tensors become spare memory; accepted ones stay bit for bit what they were."""
        self._spare.update(self._proposed)
        self._proposed = {}

    def by_layer(self) -> dict[int, torch.Tensor]:
        """Accepted tensors, one view per layer id."""
        views: dict[int, torch.Tensor] = {}
        for key, flat in self._accepted.items():
            views.update(zip(key, torch.split(flat, [self._sizes[layer_id] for layer_id in key]), strict=True))
        return views

    def load(self, tensors: dict[int, torch.Tensor]) -> None:
        """Replace everything by copies of these tensors, given by layer id."""
        self._accepted = {(layer_id,): tensor.clone() for layer_id, tensor in tensors.items()}
        self._sizes = {layer_id: tensor.numel() for layer_id, tensor in tensors.items()}
        self._proposed, self._spare = {}, {}

    def _regroup(self, unit: Unit) -> None:
        """Lay the accepted tensors of the unit's layers end to end; others of their old groups go on alone."""
        wanted = set(unit.key)
        views = self.by_layer()
        if not wanted & views.keys():
            return
        parts = [
            views[layer.id] if layer.id in views else torch.zeros(layer.numel, device=unit.gradients[0].device)
            for layer in unit.layers
        ]
        merged = torch.cat([part.to(unit.gradients[0].device) for part in parts])
        for key in [key for key in self._accepted if wanted & set(key)]:
            del self._accepted[key]
            self._spare.pop(key, None)
            self._accepted.update({(layer_id,): views[layer_id].clone() for layer_id in set(key) - wanted})
        self._sizes.update((layer.id, layer.numel) for layer in unit.layers)
        self._accepted[unit.key] = merged
