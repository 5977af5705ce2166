"""Private random numbers: a function of seed, step, layer and, where ranks must differ, rank.

The global generator is never touched: augmentation and dropout stay what they are without compression.
"""

from __future__ import annotations

import hashlib
import struct

import torch

from compressors.layer import Layer, Step


def seed_for(layer: Layer, step: Step, *, per_rank: bool) -> int:
    """A 63-bit seed, unrelated for any two layers, steps or (where asked for) ranks, and the same on every machine."""
    fields = struct.pack("<QQQQ", step.seed % 2**64, step.index, layer.id, step.rank + 1 if per_rank else 0)
    return int.from_bytes(hashlib.blake2b(fields, digest_size=8).digest(), "little") >> 1


def generator_for(layer: Layer, step: Step, device: torch.device, *, per_rank: bool) -> torch.Generator:
    """A generator on `device`, seeded by `seed_for`."""
    return torch.Generator(device).manual_seed(seed_for(layer, step, per_rank=per_rank))


def uniform_like(x: torch.Tensor, layer: Layer, step: Step) -> torch.Tensor:
    """Numbers in [0, 1) of the shape of `x`, different on every rank, fp32."""
    generator = generator_for(layer, step, x.device, per_rank=True)
    return torch.rand(x.shape, generator=generator, device=x.device)
