"""Fragments: the parts of a model that are exchanged in turn, and the outer copy of their parameters.

Source: Douillard et al. 2023 (DiLoCo, arXiv:2311.08105) for the outer step; Douillard et al. 2025 (Streaming DiLoCo,
arXiv:2501.18512) for fragments that are dealt round robin, and for the mix of outer and inner parameters.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn

from collectives.options import Incompatible
from compressors.layer import Layer, layers_of
from gradwire.local.options import LocalOptions


def units_of(model: nn.Module) -> list[list[Layer]]:
    """Return the model's trainable parameters by block, in registration order.

    A block is a direct child of the model, or of a `Sequential`, a `ModuleList` or a `ModuleDict` in it, such as an
    embedding, a block of a transformer or a head. A module that only wraps another one, or that contains such a list
    and is no element of one, is not a block but consists of blocks.
    """
    layer_of = {id(layer.weight): layer for layer in layers_of(model)}
    units = []
    for parameters in _blocks(model):
        unit = [layer_of.pop(id(each)) for each in parameters if id(each) in layer_of]  # shared ones count once
        if unit:
            units.append(unit)
    return units


def _blocks(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    yield list(module.parameters(recurse=False))
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    for child in children:
        has_blocks = _is_list(child) or (not _is_list(module) and any(map(_is_list, child.modules())))
        opens = len(children) == 1 or has_blocks
        if opens and next(child.children(), None) is not None:
            yield from _blocks(child)
        else:
            yield list(child.parameters())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def dealt(model: nn.Module, count: int) -> list[list[Layer]]:
    """Return the layers of each of `count` fragments: block b belongs to fragment b modulo `count`.

    Raises:
        Incompatible: the model has fewer blocks than fragments.
    """
    units = units_of(model)
    if len(units) < count:
        raise Incompatible(
            f"fragments={count} needs a model of as many blocks, and this one has {len(units)}; use "
            f"fragments={max(1, len(units))} or fewer"
        )
    return [
        sorted((layer for unit in units[k::count] for layer in unit), key=lambda layer: layer.id) for k in range(count)
    ]


class Fragment:
    """Layers that are exchanged together, with their outer copy, which is equal on all ranks.

    Args:
        layers: the layers; their weights are the rank's own (inner) parameters.

    Attributes:
        layers: the argument.
        outer: the outer copy, fp32 [elements of all layers].
        momentum: of the outer step, like `outer`; None before the first step, and without momentum.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = list(layers)
        self._sizes = [layer.numel for layer in layers]
        self.outer = self._inner()
        self.momentum: torch.Tensor | None = None

    def split(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return each layer's part of `flat`, [elements of all layers], as a view."""
        return cast("Sequence[torch.Tensor]", flat.split(self._sizes))

    def begin(self) -> None:
        """Set the outer copy to the inner parameters, which are equal on all ranks at this time."""
        self.outer.copy_(self._inner())

    def difference(self) -> torch.Tensor:
        """Return the outer copy minus the inner parameters, which is a direction of descent, fp32 [elements]."""
        inner = self._inner()
        return torch.sub(self.outer, inner, out=inner)

    def step(self, mean: torch.Tensor, options: LocalOptions) -> None:
        """Move the outer copy by the mean of all ranks' differences, as `torch.optim.SGD` would.

        Args:
            mean: fp32 [elements], equal on all ranks; overwritten.
            options: outer learning rate and momentum.
        """
        update = mean
        if options.outer_momentum:
            if self.momentum is None:
                self.momentum = mean.clone()
            else:
                self.momentum.mul_(options.outer_momentum).add_(mean)
            update = mean.add_(self.momentum, alpha=options.outer_momentum) if options.nesterov else self.momentum
        self.outer.sub_(update, alpha=options.outer_lr)

    @torch.no_grad()
    def adopt(self, alpha: float = 0.0) -> None:
        """Set the inner parameters to alpha x inner + (1 - alpha) x outer; to outer where inner is not finite."""
        for layer, flat in zip(self.layers, self.split(self.outer), strict=True):
            weight, outer = cast(torch.Tensor, layer.weight), flat.view(layer.shape)
            if alpha == 0:
                weight.copy_(outer)
            else:
                weight.mul_(alpha).add_(outer, alpha=1 - alpha)
                weight.copy_(torch.where(weight.isfinite(), weight, outer))

    def _inner(self) -> torch.Tensor:
        weights = [cast(torch.Tensor, layer.weight).detach().flatten() for layer in self.layers]
        return torch.cat([weight.float() for weight in weights]) if len(weights) > 1 else weights[0].float().clone()
