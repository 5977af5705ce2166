"""The types of values on the wire, by their names in options."""

from __future__ import annotations

from typing import Literal

import torch

ValueDtype = Literal["fp16", "bf16", "fp32"]

TORCH_DTYPES: dict[ValueDtype, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}


def roundoff(dtype: ValueDtype) -> float:
    """Return the largest relative rounding error of fp32 values within the type's normal range."""
    return 0.0 if dtype == "fp32" else torch.finfo(TORCH_DTYPES[dtype]).eps / 2
