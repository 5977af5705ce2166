"""Slow one rank down on purpose, to measure how an exchange copes with unequal ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from bench.train.clock import device_time


def slow_down(model: nn.Module, slowdown: float) -> None:
    """Make forward and backward of every training step take `slowdown` times as long, from now on.

    At the end of backward, before the last gradient is passed on, the rank sleeps for (slowdown - 1) times its
    computing time. Waiting for other ranks comes later and is not multiplied.

    Args:
        model: the bare network, which gets hooks.
        slowdown: at least 1.
    """
    device = next(model.parameters()).device
    started = 0.0

    def begin(_module: nn.Module, _inputs: Any) -> None:
        nonlocal started
        started = device_time(device)

    def delay(_gradients: Any) -> None:
        time.sleep((slowdown - 1) * (device_time(device) - started))

    model.register_forward_pre_hook(begin)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.autograd.graph.register_multi_grad_hook(trainable, delay)
