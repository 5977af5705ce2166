"""Choose the device that ranks compute on."""

from __future__ import annotations

from typing import Literal

import torch

from bench.core.errors import UsageError


def choose_device(device: Literal["auto", "cpu", "cuda"], num_needed: int = 1) -> Literal["cpu", "cuda"]:
    """Return "cuda" if the option allows it and torch sees enough devices, else "cpu".

    Args:
        device: the value of --device.
        num_needed: CUDA devices that the job needs.

    Raises:
        UsageError: the option is "cuda" and there are too few devices.
    """
    num_seen = torch.cuda.device_count()
    if device == "cuda" and num_seen < num_needed:
        raise UsageError(
            f"--device cuda needs {num_needed} CUDA devices on this machine and torch sees {num_seen}; use --device "
            "cpu, or auto"
        )
    return "cuda" if device != "cpu" and num_seen >= num_needed else "cpu"
