"""Random numbers for compressors: a function of seed, step, layer, position and, if ranks must differ, rank.

A counter-based generator makes them, so they are the same on every device and in any order. PyTorch's global generator
is not used: data augmentation and dropout are the same with and without compression.
"""

import hashlib
import struct

import torch

from collectives.payloads.codec.philox import random_words
from compressors.layer import Layer, Step


def seed_for(layer: Layer, step: Step, *, per_rank: bool) -> int:
    """Return a 63-bit key that differs between layers, steps and (with per_rank) ranks, but not between machines."""
    fields = struct.pack("<QQQQ", step.seed % 2**64, step.index, layer.id, step.rank + 1 if per_rank else 0)
    return int.from_bytes(hashlib.blake2b(fields, digest_size=8).digest(), "little") >> 1


def uniform_numbers(key: int, count: int, device: torch.device) -> torch.Tensor:
    """Return random numbers in [0, 1), multiples of 2^-24: fp32 [count]."""
    return uniform(random_words(key, count, device))


def uniform(words: torch.Tensor) -> torch.Tensor:
    """Return the upper 24 bits of 32-bit words as numbers in [0, 1): fp32 of the same shape."""
    return (words >> 8).float() * 2.0**-24
