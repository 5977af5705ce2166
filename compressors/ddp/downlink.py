"""Downlink: how a parameter server encodes its answers, with the run's compressor and a memory apart from the workers'.

A server encodes sums, the workers gradients: thresholds and densities of the two must not mix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from collectives.base import Key
from collectives.payloads.base import Payload
from collectives.payloads.bundle import Bundle
from collectives.payloads.dense import Dense
from compressors.base import Compressor
from compressors.ddp.unit import group_layers
from compressors.layer import Layer, Memory, Step


class Downlink:
    """What a server knows of the layers; implements the collectives' protocol of that name.

    Args:
        compressor: with its options.
        layers: every trainable parameter.

    Attributes:
        step: where training is; whoever runs the steps sets it.
    """

    def __init__(self, compressor: Compressor, layers: Sequence[Layer]) -> None:
        self.step = Step(index=0, epoch=0, rank=0, world_size=1, seed=0)
        self._compressor = compressor
        self._layer_of = {layer.id: layer for layer in layers}
        self._memory = Memory()
        self.commit, self.drop = self._memory.commit, self._memory.drop
        self.state_dict, self.load_state_dict = self._memory.state_dict, self._memory.load_state_dict

    def numel(self, layer_id: int) -> int:
        """Return the elements of a layer."""
        return self._layer_of[layer_id].numel

    def encode(self, total: torch.Tensor, layers: Key) -> Payload:
        """Return the answer; layers that the policy sends dense stay so.

        Args:
            total: fp32 [numel], the layers' sums end to end.
            layers: their ids, in the order in which a worker's message holds them.
        """
        at, memory = self.step, self._memory
        # Nobody adds to an answer, and what is drawn for it is drawn for no rank's own message.
        step = dataclasses.replace(at, memory=memory, rank=at.world_size + at.rank, world_size=1)
        units = group_layers(self._compressor, [self._layer_of[layer_id] for layer_id in layers], step)
        payloads = [
            Dense(part.clone()) if unit.dense else self._compressor.encode(part, unit.layer, step)
            for unit, part in zip(units, torch.split(total, [unit.layer.numel for unit in units]), strict=True)
        ]
        return payloads[0] if len(payloads) == 1 else Bundle(payloads)
