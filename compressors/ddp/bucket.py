"""Bucket: some layers' gradients at one step, as DDP hands them over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from compressors.ddp.report import EncodedLayer
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True, eq=False)
class Bucket:
    """What a reducer works on, in the order in which the engine laid it.

    Attributes:
        layers: the layers inside.
        gradients: one flat floating view per layer, this rank's gradient; overwritten with the update.
        step: where training is.
        screen: keeps what is not finite in `gradients` away from all that remembers; a reducer calls it before it
            encodes, or where it finds such a value while it does.
        encoded: filled by the reducer, one entry per layer.
        encode_s: filled by the reducer, seconds of encoding and decoding.
    """

    layers: list[Layer]
    gradients: list[torch.Tensor]
    step: Step
    screen: Callable[[], object] = lambda: None
    encoded: list[EncodedLayer] = dataclasses.field(default_factory=list)
    encode_s: float = 0.0
