"""What a compressor would do to a model's layers, without running anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from compressors.base import FP32_BYTES, Compressor
from compressors.layer import Kind, Layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """One layer in the plan.

    Attributes:
        name: the parameter's name.
        shape: of the parameter.
        kind: what it is in the network.
        payload: the kind of payload it is sent as; "Dense" in fp32 where the per-layer policy leaves it alone.
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


def plan(compressor: Compressor, layers: Sequence[Layer]) -> list[PlannedLayer]:
    """One row per layer, in the given order."""
    return [
        PlannedLayer(
            name=layer.name,
            shape=layer.shape,
            kind=layer.kind,
            payload="Dense" if compressor.leaves_dense(layer) else compressor.kind_for(layer).__name__,
            dense_nbytes=FP32_BYTES * layer.numel,
            sent_nbytes=compressor.expected_bucket_nbytes([layer]),
        )
        for layer in layers
    ]
