"""A model by name as a traced network and its operations, from shapes alone."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from bench.core import spec
from bench.core.errors import UsageError
from bench.datasets.base import IMAGE_SIZE
from bench.extensions.place.operations import Operation, operations_of
from bench.models.base import Model, check_images
from bench.strategies.placed.assignment import trace
from collectives.options import incompatibility


def network_of(
    model: str, *, num_classes: int, batch_size: int, image_size: int = IMAGE_SIZE
) -> tuple[fx.GraphModule, list[Operation]]:
    """Return the network of a model and what its operations do with one mini-batch of square colour images.

    Raises:
        UsageError: there is no such model, it has no one graph, or it cannot take images of this size.
    """
    with torch.device("meta"):
        network = cast(Model, spec.build("models", model)).build(num_classes)
        traced = trace(network)
        if reason := incompatibility(check_images, network, model, image_size):
            raise UsageError(f"{reason}; use another --model or --image-size")
        return traced, operations_of(traced, torch.empty(batch_size, 3, image_size, image_size))
