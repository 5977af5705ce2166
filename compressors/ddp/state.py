"""State of a reducer that persists between steps: residuals, velocities and memory of messages, per encode group."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from collectives.base import Key
from collectives.payloads.dense import Dense
from compressors.ddp.encode_group import EncodeGroup
from compressors.layer import Tensors, copies


class BufferPool:
    """Reuse send buffers from step to step: touching new pages costs more than copying into old ones.

    A buffer that is not released by the end of a step is left to the holder of its message, and not reused.
    """

    def __init__(self) -> None:
        self._free: dict[Key, torch.Tensor] = {}
        self._lent: dict[Key, torch.Tensor] = {}
        self._returned: dict[Key, torch.Tensor] = {}

    def acquire(self, group: EncodeGroup) -> torch.Tensor:
        """Return an uninitialised buffer [group.layer.numel] of the group's dtype."""
        buffer = self._free.pop(group.key, None)
        if buffer is None or buffer.numel() != group.layer.numel or buffer.dtype != group.dtype:
            buffer = Dense.room(group.layer.numel, group.dtype, group.device)
        self._lent[group.key] = buffer
        return buffer

    def release(self, groups: Iterable[EncodeGroup]) -> None:
        """Mark the buffers of these groups as free for the next step."""
        for group in groups:
            if (buffer := self._lent.pop(group.key, None)) is not None:
                self._returned[group.key] = buffer

    def end_step(self) -> None:
        """Keep the released buffers; drop those of groups that no longer exist and those not released."""
        self._free, self._lent, self._returned = self._returned, {}, {}


class LayerStore:
    """Keep one tensor per group from step to step, for example residuals, with a proposed next value.

    Two buffers per group alternate, so that a step allocates nothing.
    """

    def __init__(self) -> None:
        self._accepted: dict[Key, torch.Tensor] = {}
        self._proposed: dict[Key, torch.Tensor] = {}
        self._spare: dict[Key, torch.Tensor] = {}
        self._sizes: dict[int, int] = {}

    def accepted(self, group: EncodeGroup) -> torch.Tensor | None:
        """Return the group's fp32 tensor [numel] of the last `commit`, or None before the first; do not change it.

        Raises:
            ValueError: the state that was loaded belongs to another model.
        """
        if group.key not in self._accepted:
            self._regroup(group)
        accepted = self._accepted.get(group.key)
        if accepted is not None and accepted.numel() != group.layer.numel:  # the native loops do not check
            raise ValueError(
                f"the state that was loaded has {accepted.numel()} elements for layer {group.layer.name}, which has "
                f"{group.layer.numel}: it is of another model"
            )
        if accepted is not None and accepted.device != group.device:  # after `load`
            accepted = self._accepted[group.key] = accepted.to(group.device)
        return accepted

    def propose(self, group: EncodeGroup) -> torch.Tensor:
        """Return an uninitialised fp32 tensor for the caller to fill; `commit` makes it the accepted one.

        Later calls for the same group in the same step return the same tensor.
        """
        self._sizes.update((layer.id, layer.numel) for layer in group.layers)
        proposed = self._proposed.get(group.key, self._spare.pop(group.key, None))
        if proposed is None:
            proposed = torch.empty(group.layer.numel, dtype=torch.float32, device=group.device)
        self._proposed[group.key] = proposed
        return proposed

    def proposed(self, group: EncodeGroup) -> torch.Tensor:
        """Return what `propose` returned for this group at this step."""
        return self._proposed[group.key]

    def commit(self) -> None:
        """Accept the proposed tensors, and keep the old ones as spare memory."""
        for key, tensor in self._proposed.items():
            if key in self._accepted:
                self._spare[key] = self._accepted[key]
            self._accepted[key] = tensor
        self._proposed = {}

    def drop(self) -> None:
        """Discard the proposed tensors and keep them as spare memory; accepted tensors do not change."""
        self._spare.update(self._proposed)
        self._proposed = {}

    def by_layer(self) -> Tensors:
        """Return a view of each layer's accepted elements, by layer id."""
        views: Tensors = {}
        for key, flat in self._accepted.items():
            views.update(zip(key, torch.split(flat, [self._sizes[layer_id] for layer_id in key]), strict=True))
        return views

    def load(self, tensors: Tensors) -> None:
        """Replace the whole state by copies of these tensors, given by layer id."""
        self._accepted = {(layer_id,): tensor for layer_id, tensor in copies(tensors).items()}
        self._sizes = {layer_id: tensor.numel() for layer_id, tensor in tensors.items()}
        self._proposed, self._spare = {}, {}

    def _regroup(self, group: EncodeGroup) -> None:
        """Concatenate the accepted tensors of the group's layers; other layers of their old groups become single."""
        wanted = set(group.key)
        for key in [key for key in self._spare if wanted & set(key) and key != group.key]:
            del self._spare[key]
        views = self.by_layer()
        if not wanted & views.keys():
            return
        device = group.device
        parts = [
            views[layer.id].to(device)
            if layer.id in views
            else torch.zeros(layer.numel, dtype=torch.float32, device=device)
            for layer in group.layers
        ]
        for key in [key for key in self._accepted if wanted & set(key)]:
            del self._accepted[key]
            self._accepted.update({(layer_id,): views[layer_id].clone() for layer_id in set(key) - wanted})
        self._sizes.update((layer.id, layer.numel) for layer in group.layers)
        self._accepted[group.key] = torch.cat(parts)
