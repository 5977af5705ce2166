"""The learning rate over time.

Source: gradual warm-up as in Goyal et al. 2017 (arXiv:1706.02677).
Differs: it rises from zero instead of the rate of one worker, and also with a single rank.
"""

from __future__ import annotations

import math

from bench.core.config.lr_scaling import LrScaling
from bench.core.config.run import RunConfig


def learning_rate(config: RunConfig, step: int, total_steps: int, steps_per_epoch: int) -> float:
    """Return the learning rate of optimizer step `step`, which counts from 0."""
    peak = config.lr * LrScaling.parse(config.lr_scaling).factor(config.replicas)
    warmup_steps = config.warmup_epochs * steps_per_epoch
    if step < warmup_steps:
        return peak * (step + 1) / math.ceil(warmup_steps)
    done = (step - warmup_steps) / max(1.0, total_steps - warmup_steps)
    match config.schedule:
        case "constant":
            return peak
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * done))
        case "step":
            return peak * (0.1 ** ((done >= 0.5) + (done >= 0.75)))
