"""Groups of layers that one `encode` call covers, and the buffers and state that are kept per group."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from collectives.base import Key
from collectives.payloads.base import Payload
from compressors.base import Compressor
from compressors.ddp.report import EncodedLayer
from compressors.kernels.residuals import accelerate, add
from compressors.layer import Layer, Step, end_to_end


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EncodeGroup:
    """One layer, or several layers concatenated, that one `encode` call covers.

    Attributes:
        layer: the layer, or a flat layer that stands for all of them.
        layers: the layers inside.
        key: the ids of the layers inside.
        dense: whether the gradients are sent uncompressed.
        gradients: the layers' flat gradients, in the same order; empty if only sizes are needed.
        updates: the flat tensors that the layers' updates are written to, in the same order.
    """

    layer: Layer
    layers: Sequence[Layer]
    key: Key
    dense: bool
    gradients: list[torch.Tensor] = dataclasses.field(default_factory=list)
    updates: list[torch.Tensor] = dataclasses.field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Return the device of the updates."""
        return self.updates[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Return fp64 for dense fp64 gradients, which may exceed the range of fp32, and fp32 for all others."""
        return torch.promote_types(self.updates[0].dtype, torch.float32) if self.dense else torch.float32

    @property
    def borders(self) -> list[int]:
        """Return the first element of each layer, followed by the total number of elements."""
        return list(itertools.accumulate((layer.numel for layer in self.layers), initial=0))

    @functools.cached_property
    def is_plain(self) -> bool:
        """Tell whether all gradients are contiguous fp32, so that the native loops can read them in place."""
        return all(gradient.dtype == torch.float32 and gradient.is_contiguous() for gradient in self.gradients)

    def add_gradient(self, base: torch.Tensor | None, *, factor: float = 1.0, out: torch.Tensor) -> None:
        """Write gradient + factor * base into `out`, without concatenating the layers' gradients first.

        Args:
            base: fp32 [numel], or None for zeros.
            factor: multiplies `base`.
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
        """Apply `kernels.residuals.accelerate` to each layer's part; its tensors are fp32 [numel]."""
        for gradient, part in self._parts():
            old = None if velocity is None else velocity[part]
            unsent = None if residual is None else residual[part]
            accelerate(gradient, old, unsent, momentum, nesterov=nesterov, now=now[part], out=out[part])

    def _parts(self) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield each layer's gradient, and its slice of the concatenated elements."""
        for gradient, borders in zip(self.gradients, itertools.pairwise(self.borders), strict=True):
            yield gradient, slice(*borders)

    def scatter_to_updates(self, update: torch.Tensor) -> None:
        """Copy an update, floating [numel], into `updates`."""
        parts = torch.split(update, [layer.numel for layer in self.layers])
        for out, part in zip(self.updates, parts, strict=True):
            out.copy_(part)

    def account(self, payload: Payload, seconds: float, density_wanted: float | None) -> list[EncodedLayer]:
        """Divide the payload's bytes among the layers by the entries each sends, and the seconds by their sizes."""
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
    """Return the compressed groups in model order, then one group of all layers that are sent uncompressed.

    Layers without elements are left out: they send nothing and keep no state.

    Args:
        compressor: decides how layers are grouped and which stay dense.
        layers: the layers, in any order.
        step: the training step; None for full compression.
        gradients: flat gradients in the order of `layers`; empty if only sizes are needed.
        updates: flat tensors for the updates in the same order; if empty, the gradients are overwritten.
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
