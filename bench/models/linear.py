"""Softmax regression on raw pixels: one matrix and a bias."""

from __future__ import annotations

import dataclasses

from torch import nn

from bench.models.base import Model


@dataclasses.dataclass(kw_only=True)
class Linear(Model):
    """Build the simplest model, a baseline for all others; 30 730 parameters for ten classes."""

    def build(self, num_classes: int) -> nn.Module:
        """Build one fully connected layer on the flattened image, with torch's default initialisation."""
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))
