"""Parameters for tests of the parameter server, which record the pushes, their order and their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from bench.extensions.async_server.server import Push
from collectives.payloads.base import Dense


@dataclasses.dataclass(eq=False)
class Recorded:
    """Layers that start at zero and to which pushes are added.

    Attributes:
        numels: elements of every layer.
        applied: per update, (rank, index) of every push in it, and the number of terms.
    """

    numels: Sequence[int]
    applied: list[tuple[list[tuple[int, int]], int]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = [torch.zeros(numel) for numel in self.numels]

    def apply(self, pushes: Sequence[Push], num_terms: int) -> None:
        self.applied.append(([(push.rank, push.clock_end.index) for push in pushes], num_terms))
        for push in pushes:
            for layer_id, payload in push.payloads.items():
                payload.add_to_(self.values[layer_id], divisor=num_terms)

    def packed(self) -> list[torch.Tensor]:
        return [Dense(values).pack() for values in self.values]
