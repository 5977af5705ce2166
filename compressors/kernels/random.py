"""Private random numbers: a function of seed, step, layer, place and, where ranks must differ, rank.

They are counted, not drawn: each is the same on every device, whatever else is drawn in whichever order. The global
generator is never touched: augmentation and dropout stay what they are without compression.
"""

from __future__ import annotations

import hashlib
import struct

import torch

from collectives.kernels.loop import also_on_gpus
from collectives.payloads.codec.philox import random_words
from compressors.layer import Layer, Step


def seed_for(layer: Layer, step: Step, *, per_rank: bool) -> int:
    """A 63-bit key, unrelated for any two layers, steps or (where asked for) ranks, and the same on every machine."""
    fields = struct.pack("<QQQQ", step.seed % 2**64, step.index, layer.id, step.rank + 1 if per_rank else 0)
    return int.from_bytes(hashlib.blake2b(fields, digest_size=8).digest(), "little") >> 1


@also_on_gpus
def uniform_numbers(key: int, count: int, device: torch.device) -> torch.Tensor:
    """Numbers in [0, 1), multiples of 2^-24: fp32 [count]."""
    return uniform(random_words(key, count, device))


def uniform(words: torch.Tensor) -> torch.Tensor:
    """Of words 0..2^32 - 1 the upper 24 bits as a number in [0, 1): fp32 of the same shape."""
    return (words >> 8).float() * 2.0**-24
