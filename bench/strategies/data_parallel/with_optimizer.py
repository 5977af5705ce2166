"""The exchange of the gradients and the optimizer's own, as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from bench.strategies.data_parallel.replicas import GradientExchange
from collectives.base import Key
from collectives.payloads.base import Payload
from collectives.transport.base import Purpose, Traffic
from compressors.ddp.channel import Channel
from compressors.ddp.report import StepReport
from compressors.layer import Step


class WithOptimizer:
    """Counts both together; `finish_step` ends the gradients' alone, for the optimizer sends in its own `step`.

    Args:
        gradients: what becomes of the gradients.
        channel: for what the optimizer exchanges.
    """

    def __init__(self, gradients: GradientExchange, channel: Channel) -> None:
        self._gradients = gradients
        self._channel = channel

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Of both, together."""
        both = (self._gradients.traffic, self._channel.traffic)
        return {p: sum((traffic.get(p, Traffic()) for traffic in both), Traffic()) for p in get_args(Purpose)}

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """What this rank encoded in its last step, gradients before others of the same layers."""
        return {**self._channel.last_encoded, **self._gradients.last_encoded}

    def residual_norms(self) -> dict[int, float]:
        """L2 norm of what each layer has not sent yet, by layer id; likewise."""
        return self._channel.residual_norms() | self._gradients.residual_norms()

    def start_step(self, step: Step) -> None:
        """Tell where training is; call before `backward`."""
        self._gradients.start_step(step)
        self._channel.start_step(step)

    def finish_step(self) -> StepReport:
        """What became of the gradients."""
        return self._gradients.finish_step()

    def state_dict(self) -> dict[str, Any]:
        """What both keep from step to step."""
        return {"gradients": self._gradients.state_dict(), "optimizer": self._channel.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._gradients.load_state_dict(state["gradients"])
        self._channel.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Release what both hold; every rank must call."""
        self._gradients.close()
        self._channel.close()
