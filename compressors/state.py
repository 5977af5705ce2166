"""Memory: what a rank keeps per layer for a method, with proposed values beside accepted ones.

A step may be thrown away (a non-finite value on any rank), so nothing is overwritten before `commit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

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
