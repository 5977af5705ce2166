"""Hosts that are lost now and then, and a job that begins anew from its last checkpoint each time.

Losses come at a constant rate, those of every host for themselves, at any moment alike. The expected time then follows
without drawing any, (e^(T / M) - 1) e^(R / M) M of every T between checkpoints with restarts of R and M between losses:
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22 (2006), with dumps that take no time, as training waits for a copy in memory alone.
"""

from __future__ import annotations

import math


def stretch(*, losses_per_s: float, checkpoint_s: float, restart_s: float) -> float:
    """Expected time / time without a loss.

    Args:
        losses_per_s: of all hosts together.
        checkpoint_s: of training from one checkpoint to the next, what is done since is lost.
        restart_s: from a loss until training goes on; begins anew where there is another one meanwhile.

    Returns:
        At least 1; infinite where hardly any checkpoint is ever reached.
    """
    per_checkpoint = losses_per_s * checkpoint_s
    try:
        return math.expm1(per_checkpoint) / per_checkpoint * math.exp(losses_per_s * restart_s)
    except OverflowError:
        return math.inf
