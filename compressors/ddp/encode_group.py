"""EncodeGroup: what one `encode` call covers, and how layers are cut into units."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from collectives.base import Key
from collectives.payloads.base import Payload
from collectives.payloads.dense import Dense
from compressors.base import Compressor
from compressors.ddp.report import EncodedLayer
from compressors.kernels.residuals import accelerate, add
from compressors.layer import Layer, Step, Tensors, copies, end_to_end


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EncodeGroup:
    """One layer, or several layers laid end to end.

    Attributes:
        layer: the layer, or a flat stand-in for several.
        layers: the layers inside.
        key: their ids.
        dense: sent as it is, by the per-layer policy.
        gradients: the layers' flat gradients, in the same order; empty where only sizes are asked for.
        updates: where their updates go, likewise.
    """

    layer: Layer
    layers: Sequence[Layer]
    key: Key
    dense: bool
    gradients: list[torch.Tensor] = dataclasses.field(default_factory=list)
    updates: list[torch.Tensor] = dataclasses.field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where gradients and updates lie."""
        return self.updates[0].device

    @property
    def dtype(self) -> torch.dtype:
        """fp64 for dense fp64 gradients, which may be beyond the range of fp32; otherwise fp32."""
        return torch.promote_types(self.updates[0].dtype, torch.float32) if self.dense else torch.float32

    @property
    def borders(self) -> list[int]:
        """Where each layer starts, and the end."""
        return list(itertools.accumulate((layer.numel for layer in self.layers), initial=0))

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether loops can read the gradients where they lie."""
        return all(gradient.dtype == torch.float32 and gradient.is_contiguous() for gradient in self.gradients)

    def add_gradient(self, base: torch.Tensor | None, *, factor: float = 1.0, out: torch.Tensor) -> None:
        """Write gradient + factor * base into `out`, without laying the gradient end to end first.

        Args:
            base: fp32 [numel], or None for zeros.
            factor: of `base`.
            out: fp32 [numel], overwritten; may be `base`.
        """
        for gradient, part in self._parts():
            if base is None:
                out[part].copy_(gradient)
            else:
                add(gradient, base[part], factor=factor, out=out[part])

    def accelerate(
        self,
        velocity: torch.Tensor | None,
        residual: torch.Tensor | None,
        momentum: float,
        *,
        nesterov: bool,
        now: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """`accelerate` of the gradient, likewise; arguments as there, fp32 [numel] each."""
        for gradient, part in self._parts():
            old = None if velocity is None else velocity[part]
            unsent = None if residual is None else residual[part]
            accelerate(gradient, old, unsent, momentum, nesterov=nesterov, now=now[part], out=out[part])

    def _parts(self) -> Iterator[tuple[torch.Tensor, slice]]:
        """Each layer's gradient, and where it stands among all."""
        for gradient, borders in zip(self.gradients, itertools.pairwise(self.borders), strict=True):
            yield gradient, slice(*borders)

    def scatter_to_updates(self, update: torch.Tensor) -> None:
        """Copy an update, floating [numel], to where the layers' updates go."""
        parts = torch.split(update, [layer.numel for layer in self.layers])
        for out, part in zip(self.updates, parts, strict=True):
            out.copy_(part)

    def account(self, payload: Payload, seconds: float, density_wanted: float | None) -> list[EncodedLayer]:
        """Share the payload's bytes out over the layers inside by what each sends, the seconds by their sizes."""
        counts = payload.entries_between(self.borders) if len(self.layers) > 1 else [payload.num_entries]
        total, nbytes = sum(counts), payload.nbytes
        return [
            EncodedLayer(
                layer=layer,
                payload=type(payload).__name__,
                nbytes=nbytes * (count / total if total else layer.numel / self.layer.numel),
                num_entries=count,
                seconds=seconds * layer.numel / self.layer.numel,
                density_wanted=density_wanted,
            )
            for layer, count in zip(self.layers, counts, strict=True)
        ]


def group_layers(
    compressor: Compressor,
    layers: Iterable[Layer],
    step: Step | None = None,
    gradients: Sequence[torch.Tensor] = (),
    updates: Sequence[torch.Tensor] = (),
) -> list[EncodeGroup]:
    """Return compressed units first, in model order, then one unit of all layers that stay dense.

    Layers without elements send nothing and keep no state.

    Args:
        compressor: decides how layers are grouped and which stay dense.
        layers: in any order.
        step: where training is; None for full compression.
        gradients: of these layers, in the same order; none where only sizes are asked for.
        updates: where their updates go, likewise; the gradients themselves where none are given.
    """
    gradient_of = {layer.id: gradient for layer, gradient in zip(layers, gradients, strict=False)}
    update_of = {layer.id: update for layer, update in zip(layers, updates or gradients, strict=False)}
    compressed: list[Layer] = []
    dense: list[Layer] = []
    all_dense = step is not None and compressor.is_dense_at(step.index)
    for layer in sorted((layer for layer in layers if layer.numel), key=lambda layer: layer.id):
        (dense if all_dense or compressor.leaves_dense(layer) else compressed).append(layer)
    groups = [[layer] for layer in compressed] if compressor.granularity == "layer" else [compressed]
    return [
        EncodeGroup(
            layer=end_to_end(group),
            layers=group,
            key=tuple(layer.id for layer in group),
            dense=group is dense,
            gradients=[gradient_of[layer.id] for layer in group] if gradient_of else [],
            updates=[update_of[layer.id] for layer in group] if update_of else [],
        )
        for group in (*groups, dense)
        if group
    ]


class BufferPool:
    """A message's memory comes back once its sum is done, and serves the same unit at the next step.

    What does not come back belongs to whoever has the message.
    """

    def __init__(self) -> None:
        self._free: dict[Key, torch.Tensor] = {}
        self._lent: dict[Key, torch.Tensor] = {}
        self._returned: dict[Key, torch.Tensor] = {}

    def acquire(self, unit: EncodeGroup) -> torch.Tensor:
        """Return a tensor [numel] of the unit's type, of undefined contents; a message around it needs no copy."""
        room = self._free.pop(unit.key, None)
        if room is None or room.numel() != unit.layer.numel or room.dtype != unit.dtype:
            room = Dense.room(unit.layer.numel, unit.dtype, unit.device)
        self._lent[unit.key] = room
        return room

    def release(self, units: Iterable[EncodeGroup]) -> None:
        """Take note that nobody reads any more what these units sent at this step."""
        for unit in units:
            if (room := self._lent.pop(unit.key, None)) is not None:
                self._returned[unit.key] = room

    def end_step(self) -> None:
        """Keep what came back; the rest is of buckets that were regrouped, or in other hands."""
        self._free, self._lent, self._returned = self._returned, {}, {}


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
