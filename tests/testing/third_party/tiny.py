"""A network with one hidden layer of eight units."""

from __future__ import annotations

import dataclasses

from torch import nn

from bench.models.base import Model


@dataclasses.dataclass(kw_only=True)
class Tiny(Model):
    """Two linear layers."""

    def build(self, num_classes: int) -> nn.Module:
        """Return the network."""
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, num_classes))
