"""What a compressor would do to a model's layers: the dry run's second part."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import torch

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.datasets.base import Dataset
from bench.models.base import Model
from compressors.base import FP32_BYTES, Compressor
from compressors.layer import Kind, Layer, layers_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """One layer in the plan.

    Attributes:
        name: the parameter's name.
        shape: of the parameter.
        kind: what it is in the network.
        payload: the kind of payload it is sent as; "Dense" in fp32 where the per-layer policy leaves it alone, "to be
            chosen" where training finds that out.
        dense_nbytes: bytes of the gradient in fp32.
        sent_nbytes: bytes of its payload at full compression, where it is sent by itself; None where it depends on the
            data.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    payload: str
    dense_nbytes: int
    sent_nbytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What the compressor would do to the model's layers.

    Attributes:
        layers: one row per parameter.
        dense_nbytes: the whole gradient in fp32.
        sent_nbytes: one rank's packed payload of the whole model at full compression, as one bucket; None where it
            depends on the data.
        warnings: what the user should know about this choice, one sentence each.
    """

    layers: list[PlannedLayer]
    dense_nbytes: int
    sent_nbytes: int | None
    warnings: list[str]


def plan_layers(config: RunConfig) -> LayerPlan:
    """What would be compressed and how, from shapes alone."""
    dataset = cast(Dataset, spec.build("datasets", config.filled["dataset"]))
    compressor = cast(Compressor, spec.build("compressors", config.filled["compressor"]))
    with torch.device("meta"):
        model = cast(Model, spec.build("models", config.filled["model"])).build(dataset.num_classes)
    layers = layers_of(model)
    rows = planned_layers(compressor, layers)
    return LayerPlan(
        layers=rows,
        dense_nbytes=sum(row.dense_nbytes for row in rows),
        sent_nbytes=compressor.expected_bucket_nbytes(layers),
        warnings=compressor.warnings(),
    )


def planned_layers(compressor: Compressor, layers: Sequence[Layer]) -> list[PlannedLayer]:
    """One row per layer, in the given order."""
    return [
        PlannedLayer(
            name=layer.name,
            shape=layer.shape,
            kind=layer.kind,
            payload=_payload(compressor, layer),
            dense_nbytes=FP32_BYTES * layer.numel,
            sent_nbytes=compressor.expected_bucket_nbytes([layer]),
        )
        for layer in layers
    ]


def _payload(compressor: Compressor, layer: Layer) -> str:
    if compressor.chooses:
        return "to be chosen"
    return "Dense" if compressor.leaves_dense(layer) else compressor.kind_for(layer).__name__
