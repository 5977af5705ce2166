"""What a compressor would do to a model's layers: the dry run's second part."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch

from bench.core import spec
from bench.core.config import RunConfig
from bench.datasets.base import Dataset
from bench.models.base import Model
from compressors.base import Compressor
from compressors.layer import layers_of
from compressors.plan import PlannedLayer
from compressors.plan import plan as compressor_plan


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
    rows = compressor_plan(compressor, layers)
    return LayerPlan(
        layers=rows,
        dense_nbytes=sum(row.dense_nbytes for row in rows),
        sent_nbytes=compressor.expected_bucket_nbytes(layers),
        warnings=compressor.warnings(),
    )
