"""Plan how a compressor treats each layer of a model, for `bench run --dry-run`.

The functions import torch, but the module itself does not: a process with torch makes the plan, and the launcher, which
does not import torch, shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.core import spec
from bench.core.config.run import RunConfig

if TYPE_CHECKING:
    from bench.datasets.base import Dataset
    from bench.models.base import Model
    from compressors.base import Compressor
    from compressors.layer import Layer, LayerKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """A compressor's treatment of one layer, which is one parameter of the model.

    Attributes:
        name: the parameter's name.
        shape: the parameter's shape.
        kind: kind of layer, such as "conv".
        payload: class name of the payload; "Dense" (fp32) if the compressor leaves the layer uncompressed, "to be
            chosen" if the payload is chosen during training.
        dense_nbytes: bytes of the gradient in fp32.
        sent_nbytes: bytes of the payload after the compressor's warm-up epochs, if the layer is sent on its own; None
            if the number depends on the data.
    """

    name: str
    shape: tuple[int, ...]
    kind: LayerKind
    payload: str
    dense_nbytes: int
    sent_nbytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """A compressor's treatment of all layers of a model.

    Attributes:
        layers: one entry per parameter.
        dense_nbytes: bytes of the whole gradient in fp32.
        sent_nbytes: bytes of one rank's packed payload after the compressor's warm-up epochs, with the whole model in
            one bucket; None if the number depends on the data.
        warnings: notes for the user about the compressor, one sentence each.
    """

    layers: list[PlannedLayer]
    dense_nbytes: int
    sent_nbytes: int | None
    warnings: list[str]


def plan_layers(config: RunConfig) -> LayerPlan:
    """Return how a run's compressor will treat each layer, computed from the shapes of the model's parameters.

    Args:
        config: the run's complete configuration.
    """
    import torch

    from bench.models.base import build_network
    from compressors.layer import layers_of

    dataset: Dataset = spec.build("datasets", config.filled["dataset"])
    compressor: Compressor = spec.build("compressors", config.filled["compressor"])
    model: Model = spec.build("models", config.filled["model"])
    with torch.device("meta"), spec.usage_errors():
        layers = layers_of(build_network(model, dataset))
    rows = planned_layers(compressor, layers)
    return LayerPlan(
        layers=rows,
        dense_nbytes=sum(row.dense_nbytes for row in rows),
        sent_nbytes=expected_bucket_nbytes(compressor, layers),
        warnings=compressor.warnings(),
    )


def planned_layers(compressor: Compressor, layers: Sequence[Layer]) -> list[PlannedLayer]:
    """Return the compressor's treatment of each layer, in the order of `layers`."""
    from compressors.base import FP32_BYTES

    return [
        PlannedLayer(
            name=layer.name,
            shape=layer.shape,
            kind=layer.kind,
            payload=_payload(compressor, layer),
            dense_nbytes=FP32_BYTES * layer.numel,
            sent_nbytes=expected_bucket_nbytes(compressor, [layer]),
        )
        for layer in layers
    ]


def _payload(compressor: Compressor, layer: Layer) -> str:
    from compressors.base import PerLayer
    from compressors.quantizers import SharedScale
    from gradwire.ddp.hook import OwnHook

    if isinstance(compressor, OwnHook):
        return "to be chosen"
    if compressor.leaves_dense(layer) or not isinstance(compressor, PerLayer):
        return "Dense"
    return (compressor.kind_for(layer) if isinstance(compressor, SharedScale) else compressor.sends).__name__


def expected_bucket_nbytes(compressor: Compressor, layers: Sequence[Layer]) -> int | None:
    """Return the bytes that one rank sends for a bucket of these layers, or None if they depend on the data.

    The number applies to steps after the compressor's warm-up epochs.
    """
    from collectives.payloads import Bundle
    from collectives.payloads.base import HEADER_BYTES
    from compressors.base import FP32_BYTES, MultiRound, TorchHook
    from compressors.layer import end_to_end

    if isinstance(compressor, MultiRound):
        return compressor.expected_bucket_nbytes(layers)
    if isinstance(compressor, TorchHook):  # tensors that the backend all-reduces have no headers
        return sum(compressor.expected_nbytes(layer) or 0 for layer in layers)
    dense = sum(layer.numel for layer in layers if compressor.leaves_dense(layer))
    units = [layer for layer in layers if layer.numel and not compressor.leaves_dense(layer)]
    if compressor.granularity == "bucket" and units:
        units = [end_to_end(units)]
    lengths = [nbytes for nbytes in map(compressor.expected_nbytes, units) if nbytes is not None]
    if len(lengths) < len(units):
        return None
    lengths += [HEADER_BYTES + FP32_BYTES * dense] * bool(dense)
    return lengths[0] if len(lengths) == 1 else Bundle.packed_nbytes(lengths) if lengths else 0
