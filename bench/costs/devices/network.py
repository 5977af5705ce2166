"""A model by name as a traced network and its operations, from shapes alone."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from bench.core import spec
from bench.costs.devices.operations import Operation, operations_of
from bench.models.base import Model
from bench.strategies.placement.tracing import trace


def network_of(model: str, *, num_classes: int, batch_size: int) -> tuple[fx.GraphModule, list[Operation]]:
    """Return the network of a model and what its operations do with one mini-batch of 3x32x32 images.

    Raises:
        UsageError: there is no such model, or it has no one graph.
    """
    with torch.device("meta"):
        network = cast(Model, spec.build("models", model)).build(num_classes)
        traced = trace(network)
        return traced, operations_of(traced, torch.empty(batch_size, 3, 32, 32))
