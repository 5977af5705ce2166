"""Which device ranks compute on."""

from __future__ import annotations

from typing import Literal

import torch

from bench.core.errors import UsageError


def choose_device(asked: Literal["auto", "cpu", "cuda"], num_needed: int = 1) -> Literal["cpu", "cuda"]:
    """CUDA where it is not refused and torch sees enough devices.

    Args:
        asked: what the user wants.
        num_needed: devices without which the job cannot use CUDA.

    Raises:
        UsageError: CUDA is asked for and there are too few devices.
    """
    num_seen = torch.cuda.device_count()
    if asked == "cuda" and num_seen < num_needed:
        raise UsageError(
            f"--device cuda needs {num_needed} of this machine's CUDA devices and torch sees {num_seen}; use --device "
            "cpu, or auto"
        )
    return "cuda" if asked != "cpu" and num_seen >= num_needed else "cpu"
