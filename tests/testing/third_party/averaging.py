"""Local training with periodic averaging of all parameters.

Source: McMahan et al. 2017.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

from annotated_types import Ge
from typing_extensions import Doc

from bench.strategies.base import BoundStrategy, Strategy
from collectives.refusals import Refusal


@dataclasses.dataclass(kw_only=True)
class Averaging(Strategy):
    """Send all parameters every few steps, and replace them by their mean."""

    every: Annotated[int, Ge(1), Doc("steps between two means")] = 2

    def refusals(self, config, compressor, collective, optimizer):
        method = compressor.component_name
        reason = f"averaging sends parameters as they are, without {method}"
        return [Refusal(method != "none", reason, [{"compressor": "none"}])]

    def bind(self, setup):
        return Averaged(setup, self.every)


class Averaged(BoundStrategy):
    def __init__(self, setup, every):
        self.channel = setup.open_channel()
        super().__init__(setup.model, [self.channel], setup.optimizer.bind(setup.model, setup.config.lr))
        self.every, self.steps_since = every, 0

    def train_step(self, batch):
        self.channel.start_step(batch.step)
        batch.backward(self.model)
        self.optimizer.param_groups[0]["lr"] = batch.lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_since += 1
        if self.steps_since == self.every:
            self.synchronize()
        return self.channel.finish_step()

    def synchronize(self):
        if self.steps_since:
            self.channel.combine_([layer.weight.data for layer in self.layers])
        self.steps_since = 0

    def columns(self):
        return {"test_distance": float(sum(layer.weight.norm() for layer in self.layers))}

    def state_dict(self):
        return super().state_dict() | {"steps_since": self.steps_since}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.steps_since = state["steps_since"]
