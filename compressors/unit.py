"""Unit: what one `encode` call covers, and how a bucket is cut into units."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch

from collectives.payloads.base import Payload
from compressors.layer import Bucket, Layer, Sent

Granularity = Literal["layer", "bucket"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """One layer, or several layers of a bucket laid end to end in model order.

    Attributes:
        layer: the layer, or a flat stand-in for several.
        layers: the layers inside, in model order.
        gradients: their flat gradient views, in the same order; empty where only sizes are asked for.
        dense: sent as it is, by the per-layer policy.
    """

    layer: Layer
    layers: list[Layer]
    gradients: list[torch.Tensor]
    dense: bool = False

    @property
    def key(self) -> tuple[int, ...]:
        """Ids of the layers inside."""
        return tuple(layer.id for layer in self.layers)

    @property
    def numel(self) -> int:
        """Elements of all layers inside."""
        return self.layer.numel

    @property
    def borders(self) -> list[int]:
        """Where each layer starts, and the end."""
        borders = [0]
        for layer in self.layers:
            borders.append(borders[-1] + layer.numel)
        return borders

    def flat(self) -> torch.Tensor:
        """The gradient as one fp32 tensor [numel]; may share memory with the bucket."""
        if len(self.gradients) == 1:
            return self.gradients[0].float()
        return torch.cat([gradient.float() for gradient in self.gradients])

    def add_gradient(self, base: torch.Tensor | None, *, factor: float = 1.0, out: torch.Tensor) -> None:
        """Write gradient + factor * base into `out`, without laying the gradient end to end first.

        Args:
            base: fp32 [numel], or None for zeros.
            factor: of `base`.
            out: fp32 [numel], overwritten; may be `base`.
        """
        for gradient, start, stop in zip(self.gradients, self.borders, self.borders[1:], strict=False):
            if base is None:
                out[start:stop].copy_(gradient)
            else:
                torch.add(gradient, base[start:stop], alpha=factor, out=out[start:stop])

    def scatter_to_gradients(self, update: torch.Tensor) -> None:
        """Copy an update, floating [numel], into the gradients."""
        parts = torch.split(update, [layer.numel for layer in self.layers])
        for gradient, part in zip(self.gradients, parts, strict=True):
            gradient.copy_(part)

    def account(self, payload: Payload, seconds: float, density_wanted: float | None = None) -> list[Sent]:
        """The payload's bytes and time, shared over the layers inside by what each sends."""
        counts = payload.entries_between(self.borders)
        total = sum(counts)
        nbytes = payload.nbytes
        return [
            Sent(
                layer=layer,
                payload=type(payload).__name__,
                nbytes=nbytes * (count / total if total else layer.numel / self.numel),
                num_entries=count,
                seconds=seconds * layer.numel / self.numel,
                density_wanted=density_wanted,
            )
            for layer, count in zip(self.layers, counts, strict=True)
        ]


def units_of(bucket: Bucket, granularity: Granularity, leaves_dense: Callable[[Layer], bool]) -> list[Unit]:
    """Cut a bucket: compressed units first, in model order, then one unit of all layers that stay dense.

    Layers without elements send nothing and keep no state.
    """
    gradients = {layer.id: gradient for layer, gradient in zip(bucket.layers, bucket.gradients, strict=True)}
    layers = sorted((layer for layer in bucket.layers if layer.numel), key=lambda layer: layer.id)
    return [
        dataclasses.replace(unit, gradients=[gradients[layer.id] for layer in unit.layers])
        for unit in cut(layers, granularity, leaves_dense)
    ]


def cut(layers: list[Layer], granularity: Granularity, leaves_dense: Callable[[Layer], bool]) -> list[Unit]:
    """The units of these layers, without gradients."""
    compressed = [layer for layer in layers if not leaves_dense(layer)]
    dense = [layer for layer in layers if leaves_dense(layer)]
    groups = [[layer] for layer in compressed] if granularity == "layer" else [compressed] if compressed else []
    units = [Unit(layer=stand_in(group), layers=group, gradients=[]) for group in groups]
    if dense:
        units.append(Unit(layer=stand_in(dense), layers=dense, gradients=[], dense=True))
    return units


def stand_in(layers: list[Layer]) -> Layer:
    """The layer itself, or a flat layer that stands for several laid end to end."""
    if len(layers) == 1:
        return layers[0]
    numel = sum(layer.numel for layer in layers)
    return Layer(id=layers[0].id, name=f"{layers[0].name}..{layers[-1].name}", shape=(numel,), numel=numel)
