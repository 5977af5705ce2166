"""Kept gradients: every rank keeps its own, because the optimizer exchanges something in their place."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import nn

from collectives.base import Key
from collectives.payloads.base import Payload
from collectives.transport.base import Purpose, Traffic
from compressors.ddp.channel import Channel, Nonfinite, Trigger, await_command, zero_nonfinite_
from compressors.ddp.report import StepReport
from compressors.layer import Step


class KeptGradients:
    """Ranks only agree whether all gradients are finite, and with the sync trigger on when to go on.

    Args:
        model: the bare network.
        channel: of the optimizer; what is sent here is counted there.
        trigger: "sync" goes on when rank 0 saw all ranks finish backward.
        nonfinite: what to do about a non-finite gradient.
    """

    def __init__(self, model: nn.Module, channel: Channel, *, trigger: Trigger, nonfinite: Nonfinite) -> None:
        self._model = model
        self._channel = channel
        self._trigger = trigger
        self._nonfinite = nonfinite

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Nothing that the channel has not counted."""
        return {}

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """Nothing is encoded here."""
        return {}

    def residual_norms(self) -> dict[int, float]:
        """No gradient waits to be sent."""
        return {}

    def start_step(self, step: Step) -> None:
        """Whoever owns the channel tells it."""

    def finish_step(self) -> StepReport:
        """Screen this rank's gradients, and agree with the other ranks."""
        started = time.perf_counter()
        if self._trigger == "sync":
            await_command(self._channel.transport)
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        saw_nonfinite = any(zero_nonfinite_(gradient, self._nonfinite) for gradient in gradients)
        skipped = self._nonfinite != "zero" and self._channel.on_any_rank(saw_nonfinite)
        seconds = time.perf_counter() - started
        return StepReport(skipped=skipped, encode_s=0.0, exchange_s=seconds, exposed_s=seconds)

    def state_dict(self) -> dict[str, Any]:
        """Nothing outlives a step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Likewise."""

    def close(self) -> None:
        """Nothing outlives a step."""
