"""Half precision: every element as IEEE fp16, saturating so that no sum over ranks overflows."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from compressors.families.sixteen_bit import SixteenBit


@dataclasses.dataclass(kw_only=True)
class Fp16(SixteenBit):
    """11 bits of mantissa, range 6e-8 to 65504.

    PyTorch's own hook divides by the number of ranks before it sends, to avoid overflow, and loses small gradients to
    underflow; this one saturates at 65504 / ranks and divides afterwards.

    Bytes: 16 + 2 m for a bucket of m elements.
    """

    dtype: ClassVar[torch.dtype] = torch.float16
