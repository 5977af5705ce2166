"""What hosts that are lost make of a predicted training."""

from __future__ import annotations

from typing import Any

from bench.core.errors import UsageError
from bench.core.units import format_seconds
from bench.extensions.predict.host_losses import stretch
from bench.extensions.predict.losses import Losses
from bench.extensions.predict.prediction import Prediction
from bench.extensions.predict.request import Asked

_HOPELESS = 1e4
SECONDS_PER_HOUR = 3600.0


def with_losses(losses: Losses, asked: Asked, prediction: Prediction, time_to_target_s: float | None) -> dict[str, Any]:
    """Expected times where any host is lost now and then.

    Args:
        losses: of each host.
        asked: what was predicted.
        prediction: of it, without losses.
        time_to_target_s: likewise; None: not known.

    Returns:
        By name; the time to target is None where that without losses is.

    Raises:
        UsageError: ranks do not wait for each other, or the training would hardly ever come to an end.
    """
    if not asked.waits:
        raise UsageError("--losses knows steps of ranks that wait for each other; leave out --strategy")
    losses_per_s = len(asked.hosts) / losses.every_s
    checkpoint_s = losses.checkpoint_steps * prediction.step_time_s

    def times_as_long(seconds: float) -> float:
        return stretch(losses_per_s=losses_per_s, checkpoint_s=seconds, restart_s=losses.restart_s)

    times = times_as_long(checkpoint_s)
    if times > _HOPELESS:
        raise UsageError(
            f"with a loss every {format_seconds(1 / losses_per_s)} among {len(asked.hosts)} hosts, checkpoints that "
            f"are {format_seconds(checkpoint_s)} apart are hardly ever reached; give fewer steps or a shorter restart"
        )
    to_target_s = time_to_target_s
    if time_to_target_s:
        rest_s = time_to_target_s % checkpoint_s  # since the last checkpoint
        to_target_s = (time_to_target_s - rest_s) * times + (rest_s * times_as_long(rest_s) if rest_s else 0.0)
    return {
        "losses": str(losses),
        "times_as_long_with_losses": times,
        "restarts_per_hour": losses_per_s * SECONDS_PER_HOUR,
        "time_to_target_with_losses_s": to_target_s,
    }
