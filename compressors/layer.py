"""What a compressor is told: which layer it encodes, and at which step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

T = TypeVar("T")

Tensors = dict[int, torch.Tensor]
"""One tensor of any shape per layer id."""


class Memory:
    """Named tensors per layer (thresholds, ages, warm starts), what derives from them, and the scales agreed on.

    Attributes:
        scales: by layer id, what all ranks agreed on in this step; not kept.
    """

    def __init__(self) -> None:
        self.scales: dict[int, float] = {}
        self._accepted: dict[str, Tensors] = {}
        self._proposed: dict[str, Tensors] = {}
        self._derived: dict[str, Any] = {}

    def get(self, name: str, layer_id: int) -> torch.Tensor | None:
        """Return the layer's tensor as of the last `commit`, not to be changed; None before the first."""
        return self.by_layer(name).get(layer_id)

    def propose(self, name: str, layer_id: int, tensor: torch.Tensor) -> None:
        """Make `tensor` the layer's one at the next `commit`; it must not be changed after that."""
        self._proposed.setdefault(name, {})[layer_id] = tensor

    def by_layer(self, name: str) -> Tensors:
        """Return the accepted tensors by layer id."""
        return self._accepted.get(name, {})

    def derived(self, name: str, make: Callable[[], T]) -> T:
        """Return what `make` gives, made once between two commits: it must follow from accepted tensors alone."""
        if name not in self._derived:
            self._derived[name] = make()
        return cast(T, self._derived[name])

    def commit(self) -> None:
        """Accept what was proposed."""
        for name, tensors in self._proposed.items():
            self._accepted.setdefault(name, {}).update(tensors)
        self._proposed, self._derived = {}, {}

    def drop(self) -> None:
        """Forget what was proposed; accepted tensors stay bit for bit what they were."""
        self._proposed = {}

    def state_dict(self) -> dict[str, Tensors]:
        """Return copies of the accepted tensors, by name and layer id."""
        return {name: copies(tensors) for name, tensors in self._accepted.items()}

    def load_state_dict(self, state: dict[str, Tensors]) -> None:
        """Replace everything by copies of what `state_dict` gave."""
        self._accepted = {name: copies(tensors) for name, tensors in state.items()}
        self._proposed, self._derived = {}, {}


def copies(tensors: Tensors) -> Tensors:
    """Return the same tensors in memory of their own."""
    return {layer_id: tensor.clone() for layer_id, tensor in tensors.items()}


Kind = Literal["conv", "linear", "norm", "bias", "other"]

_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONV_TRANSPOSE = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORM = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One parameter of the model.

    Attributes:
        id: position in `model.named_parameters()`, the same on every rank and in every run.
        name: the parameter's name.
        shape: of the parameter.
        kind: what it is in the network.
        numel: number of elements.
        filter_axis: axis of a convolution weight that counts filters (0, or 1 when transposed); None for other kinds.
        position: 0 for the module nearest the input, 1 for the one nearest the output; a module's parameters share it.
        weight: the parameter itself, read only; None where only shapes are known.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    kind: Kind = "other"
    numel: int
    filter_axis: int | None = None
    position: float = 0.0
    weight: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Where training is.

    Attributes:
        index: optimizer step, from 0.
        epoch: finished epochs.
        rank, world_size: this rank among those that sum.
        seed: the run's seed, from which private generators derive.
        warmup: compression warm-up follows `epoch`; False starts at full compression.
        memory: what this rank keeps for the method; empty for methods that keep nothing.
    """

    index: int
    epoch: int
    rank: int
    world_size: int
    seed: int
    warmup: bool = True
    memory: Memory = dataclasses.field(default_factory=Memory, compare=False, repr=False)


def end_to_end(layers: Sequence[Layer]) -> Layer:
    """Return the layer itself, or a flat layer that stands for several."""
    if len(layers) == 1:
        return layers[0]
    numel = sum(layer.numel for layer in layers)
    return Layer(id=layers[0].id, name=f"{layers[0].name}..{layers[-1].name}", shape=(numel,), numel=numel)


def layers_of(model: nn.Module) -> list[Layer]:
    """Return every trainable parameter as a `Layer`, in `model.named_parameters()` order (shared parameters once)."""
    owner: dict[int, tuple[nn.Module, str]] = {}
    for module in model.modules():
        for field, parameter in module.named_parameters(recurse=False):
            owner.setdefault(id(parameter), (module, field))
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    order = {id(module): None for module, _ in (owner[id(p)] for _, p in trainable)}
    rank_of = {module_id: rank for rank, module_id in enumerate(order)}
    last = max(1, len(rank_of) - 1)
    layers = []
    for index, (name, parameter) in enumerate(trainable):
        module, field = owner[id(parameter)]
        kind, axis = _classify(module, field)
        layers.append(
            Layer(
                id=index,
                name=name,
                shape=tuple(parameter.shape),
                kind=kind,
                numel=parameter.numel(),
                filter_axis=axis,
                position=rank_of[id(module)] / last,
                weight=parameter,
            )
        )
    return layers


def _classify(module: nn.Module, field: str) -> tuple[Kind, int | None]:
    if isinstance(module, _NORM):
        return "norm", None
    if "bias" in field:
        return "bias", None
    if isinstance(module, _CONV):
        return "conv", 0
    if isinstance(module, _CONV_TRANSPOSE):
        return "conv", 1
    if isinstance(module, nn.Linear):
        return "linear", None
    return "other", None
