"""Brain float: every element as bf16, the range of fp32 with 8 bits of mantissa."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from compressors.families.sixteen_bit import SixteenBit


@dataclasses.dataclass(kw_only=True)
class Bf16(SixteenBit):
    """8 bits of mantissa: relative rounding error up to 2^-9, never out of range.

    Bytes: 16 + 2 m for a bucket of m elements.
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16
