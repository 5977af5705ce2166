"""Value types on the wire, by the names that options use."""

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
    """The largest |x - rounded x| / |x| of fp32 values in the type's normal range: half a unit in the last place."""
    return 0.0 if dtype == "fp32" else torch.finfo(TORCH_DTYPES[dtype]).eps / 2
