"""Groups of layers that are encoded in one call, and the tensors that a reducer keeps per group from step to step."""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence

import torch

from collectives.base import Key
from compressors.base import Compressor
from compressors.floats import NoCompression
from compressors.layer import Layer, Step, Tensors, copies, end_to_end, memory_nbytes

UNCOMPRESSED = NoCompression()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EncodeGroup:
    """Layers of a bucket that a compressor encodes in one call.

    Attributes:
        compressor: the compressor; `UNCOMPRESSED` for the layers that are sent in fp32.
        layers: the layers.
        key: the layers' ids.
        gradients: the layers' flat gradients, in the same order; empty if only sizes are needed.
        updates: the flat tensors that the layers' updates are written to, in the same order.
    """

    compressor: Compressor
    layers: Sequence[Layer]
    key: Key
    gradients: list[torch.Tensor] = dataclasses.field(default_factory=list)
    updates: list[torch.Tensor] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def layer(self) -> Layer:
        """Return the group's only layer, or one flat layer that stands for all layers of the group."""
        return end_to_end(self.layers)

    @property
    def device(self) -> torch.device:
        """Return the device of the updates."""
        return self.updates[0].device

    @functools.cached_property
    def is_plain(self) -> bool:
        """Return True if all gradients are contiguous fp32, so that the native loops can read them in place."""
        return all(gradient.dtype == torch.float32 and gradient.is_contiguous() for gradient in self.gradients)

    def units(self) -> list[tuple[Layer, list[torch.Tensor]]]:
        """Return (layer, its updates) for each part of the group that the compressor encodes separately.

        These parts are the layers; if the compressor treats a bucket as one vector, the only part is one flat layer.
        """
        if self.compressor.granularity == "bucket":
            return [(self.layer, self.updates)]
        return [(layer, [update]) for layer, update in zip(self.layers, self.updates, strict=True)]


def group_layers(
    compressor: Compressor,
    layers: Iterable[Layer],
    step: Step | None = None,
    gradients: Sequence[torch.Tensor] = (),
    updates: Sequence[torch.Tensor] = (),
    *,
    apart: bool = False,
) -> list[EncodeGroup]:
    """Divide layers into a group that the compressor encodes and a group that is sent uncompressed, in model order.

    Layers without elements are left out: they send nothing and keep no state.

    Args:
        compressor: decides which layers are sent uncompressed.
        layers: the layers, in any order.
        step: the training step; None for a step after any warm-up.
        gradients: flat gradients in the order of `layers`; empty if only sizes are needed.
        updates: flat tensors for the updates in the same order; if empty, the gradients are overwritten.
        apart: give each compressed layer its own group, unless the compressor treats all layers as one vector.
    """
    gradient_of = {layer.id: gradient for layer, gradient in zip(layers, gradients, strict=False)}
    update_of = {layer.id: update for layer, update in zip(layers, updates or gradients, strict=False)}
    all_dense = step is not None and step.index < compressor.traits.dense_steps
    compressed: list[Layer] = []
    dense: list[Layer] = []
    for layer in sorted([layer for layer in layers if layer.numel], key=operator.attrgetter("id")):
        (dense if all_dense or compressor.leaves_dense(layer) else compressed).append(layer)
    apart &= compressor.granularity == "layer"
    groups = [[layer] for layer in compressed] if apart else [compressed]
    return [
        EncodeGroup(
            compressor=UNCOMPRESSED if group is dense else compressor,
            layers=group,
            key=tuple([layer.id for layer in group]),
            gradients=[gradient_of[layer.id] for layer in group] if gradient_of else [],
            updates=[update_of[layer.id] for layer in group] if update_of else [],
        )
        for group in (*groups, dense)
        if group
    ]


@dataclasses.dataclass(eq=False)
class LayerStore:
    """Keeps one tensor per group of layers from step to step, such as a residual, and prepares the next tensor.

    Two buffers per group alternate, so that a step allocates nothing.
    """

    _accepted: dict[Key, torch.Tensor] = dataclasses.field(default_factory=dict)
    _proposed: dict[Key, torch.Tensor] = dataclasses.field(default_factory=dict)
    _spare: dict[Key, torch.Tensor] = dataclasses.field(default_factory=dict)
    _sizes: dict[int, int] = dataclasses.field(default_factory=dict)

    def accepted(self, group: EncodeGroup) -> torch.Tensor | None:
        """Return a group's tensor as of the last `commit`, fp32 [numel]; None before the first `commit`.

        The caller must not change the tensor.

        Raises:
            ValueError: the state that was loaded belongs to another model.
        """
        if group.key not in self._accepted:
            self._regroup(group)
        accepted = self._accepted.get(group.key)
        if accepted is None:
            return None
        if accepted.numel() != group.layer.numel:  # the native loops do not check
            raise ValueError(
                f"the state that was loaded has {accepted.numel()} elements for layer {group.layer.name}, which has "
                f"{group.layer.numel}: it is of another model"
            )
        if accepted.device != group.device:  # after `load`
            accepted = self._accepted[group.key] = accepted.to(group.device)
        return accepted

    def propose(self, group: EncodeGroup) -> torch.Tensor:
        """Return an uninitialised fp32 tensor for the caller to fill; `commit` makes it the group's tensor.

        Later calls for the same group in the same step return the same tensor.
        """
        if group.key not in self._proposed:
            self._sizes.update((layer.id, layer.numel) for layer in group.layers)
            spare = self._spare.pop(group.key, None)
            fresh = torch.empty(group.layer.numel, dtype=torch.float32, device=group.device) if spare is None else spare
            self._proposed[group.key] = fresh
        return self._proposed[group.key]

    def commit(self) -> None:
        """Make the tensors from `propose` the accepted (current) ones, and reuse the old tensors' memory later."""
        self._spare.update((key, self._accepted[key]) for key in self._proposed if key in self._accepted)
        self._accepted |= self._proposed
        self._proposed = {}

    def drop(self) -> None:
        """Discard the tensors from `propose` since the last `commit`, and reuse their memory; current tensors stay."""
        self._spare |= self._proposed
        self._proposed = {}

    @property
    def accepted_nbytes(self) -> int:
        """Return the bytes of the accepted tensors: the current ones, as of the last `commit`."""
        return memory_nbytes(self._accepted.values())

    @property
    def proposed_nbytes(self) -> int:
        """Return the bytes of the tensors from `propose`, before `commit`, and of memory kept for later ones."""
        return memory_nbytes([*self._proposed.values(), *self._spare.values()])

    def by_layer(self) -> Tensors:
        """Return a view of the current tensor of each layer, as of the last `commit`, by layer id."""
        views: Tensors = {}
        for key, flat in self._accepted.items():
            views.update(zip(key, torch.split(flat, [self._sizes[layer_id] for layer_id in key]), strict=True))
        return views

    def load(self, tensors: Tensors) -> None:
        """Drop all tensors of this group, and store copies of `tensors` (by layer id) instead."""
        self._accepted = {(layer_id,): tensor for layer_id, tensor in copies(tensors).items()}
        self._sizes = {layer_id: tensor.numel() for layer_id, tensor in tensors.items()}
        self._proposed, self._spare = {}, {}

    def _regroup(self, group: EncodeGroup) -> None:
        """Concatenate the accepted tensors of the group's layers, after DDP has changed its buckets.

        A layer that shared an earlier group with one of these layers, but is not in this group, gets its own tensor.
        """
        wanted = set(group.key)
        self._spare = {key: spare for key, spare in self._spare.items() if key == group.key or not wanted & set(key)}
        views = self.by_layer()
        if not wanted & views.keys():
            return
        parts = [
            views[layer.id].to(group.device)
            if layer.id in views
            else torch.zeros(layer.numel, dtype=torch.float32, device=group.device)
            for layer in group.layers
        ]
        for key in [key for key in self._accepted if wanted & set(key)]:
            del self._accepted[key]
            self._accepted.update({(layer_id,): views[layer_id].clone() for layer_id in set(key) - wanted})
        self._sizes.update((layer.id, layer.numel) for layer in group.layers)
        self._accepted[group.key] = torch.cat(parts)
