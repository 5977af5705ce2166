"""Residuals and velocities: one fp32 tensor of a layer's length each, with proposed values beside accepted ones.

Tensors are stored in the groups in which buckets hand their layers over, so that one addition serves a whole bucket;
the engine regroups its buckets after the first step, and the store then regroups its tensors and loses nothing.
"""

from __future__ import annotations

import torch

from collectives.base import Key
from compressors.ddp.unit import EncodeGroup
from compressors.layer import Tensors, copies


class LayerStore:
    """Takes turns between two buffers per unit, so that a step allocates nothing."""

    def __init__(self) -> None:
        self._accepted: dict[Key, torch.Tensor] = {}
        self._proposed: dict[Key, torch.Tensor] = {}
        self._spare: dict[Key, torch.Tensor] = {}
        self._sizes: dict[int, int] = {}

    def accepted(self, unit: EncodeGroup) -> torch.Tensor | None:
        """Return the unit's fp32 tensor as of the last `commit`, 1-D, not to be changed; None before the first.

        Raises:
            ValueError: what was loaded is of another model.
        """
        if unit.key not in self._accepted:
            self._regroup(unit)
        accepted = self._accepted.get(unit.key)
        if accepted is not None and accepted.numel() != unit.layer.numel:  # the loops that add it do not look
            raise ValueError(
                f"the state that was loaded has {accepted.numel()} elements for layer {unit.layer.name}, which has "
                f"{unit.layer.numel}: it is of another model"
            )
        if accepted is not None and accepted.device != unit.device:  # it was loaded
            accepted = self._accepted[unit.key] = accepted.to(unit.device)
        return accepted

    def propose(self, unit: EncodeGroup) -> torch.Tensor:
        """Return an fp32 tensor of undefined contents, for the caller to fill; `commit` makes it the accepted one.

        Asked for again at the same step, it is the same tensor.
        """
        self._sizes.update((layer.id, layer.numel) for layer in unit.layers)
        proposed = self._proposed.get(unit.key, self._spare.pop(unit.key, None))
        if proposed is None:
            proposed = torch.empty(unit.layer.numel, dtype=torch.float32, device=unit.device)
        self._proposed[unit.key] = proposed
        return proposed

    def proposed(self, unit: EncodeGroup) -> torch.Tensor:
        """Return what `propose` returned for this unit at this step."""
        return self._proposed[unit.key]

    def commit(self) -> None:
        """Accept what was proposed; the old tensors are kept as spare memory."""
        for key, tensor in self._proposed.items():
            if key in self._accepted:
                self._spare[key] = self._accepted[key]
            self._accepted[key] = tensor
        self._proposed = {}

    def drop(self) -> None:
        """Turn what was proposed into spare memory; accepted tensors stay bit for bit what they were."""
        self._spare.update(self._proposed)
        self._proposed = {}

    def by_layer(self) -> Tensors:
        """Return the accepted tensors, one view per layer id."""
        views: Tensors = {}
        for key, flat in self._accepted.items():
            views.update(zip(key, torch.split(flat, [self._sizes[layer_id] for layer_id in key]), strict=True))
        return views

    def load(self, tensors: Tensors) -> None:
        """Replace everything by copies of these tensors, given by layer id."""
        self._accepted = {(layer_id,): tensor for layer_id, tensor in copies(tensors).items()}
        self._sizes = {layer_id: tensor.numel() for layer_id, tensor in tensors.items()}
        self._proposed, self._spare = {}, {}

    def _regroup(self, unit: EncodeGroup) -> None:
        """Lay the accepted tensors of the unit's layers end to end; others of their old groups go on alone."""
        wanted = set(unit.key)
        for key in [key for key in self._spare if wanted & set(key) and key != unit.key]:
            del self._spare[key]
        views = self.by_layer()
        if not wanted & views.keys():
            return
        device = unit.device
        parts = [
            views[layer.id].to(device)
            if layer.id in views
            else torch.zeros(layer.numel, dtype=torch.float32, device=device)
            for layer in unit.layers
        ]
        for key in [key for key in self._accepted if wanted & set(key)]:
            del self._accepted[key]
            self._accepted.update({(layer_id,): views[layer_id].clone() for layer_id in set(key) - wanted})
        self._sizes.update((layer.id, layer.numel) for layer in unit.layers)
        self._accepted[unit.key] = torch.cat(parts)
