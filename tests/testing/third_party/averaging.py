"""Every rank trains by itself and takes the mean of all parameters now and then.

Source: McMahan et al. 2017.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
import torch.distributed as dist
from annotated_types import Ge
from typing_extensions import Doc

from bench.strategies.base import BoundStrategy, Strategy
from collectives.options import Incompatible
from collectives.payloads.dense import Dense
from collectives.transport.process_group import ProcessGroupTransport
from compressors.ddp.report import StepReport


@dataclasses.dataclass(kw_only=True)
class Averaging(Strategy):
    """Sends whole parameters every few steps."""

    every: Annotated[int, Ge(1), Doc("steps between two means")] = 2

    def check_compatible(self, config, compressor, collective, optimizer):
        if compressor.component_name != "none":
            raise Incompatible("averaging sends parameters as they are; use --compressor none")

    def bind(self, setup):
        return Averaged(setup, self.every)


class Wires:
    def __init__(self, collective):
        self.last_encoded = {}
        self.bound = collective.bind(ProcessGroupTransport(dist.new_group()))

    @property
    def traffic(self):
        return self.bound.transport.traffic

    def residual_norms(self):
        return {}

    def finish_step(self):
        return StepReport()

    def close(self):
        self.bound.close()


class Averaged(BoundStrategy):
    def __init__(self, setup, every):
        super().__init__(setup.model, setup.model, Wires(setup.collective))
        self.optimizer = setup.optimizer.build(setup.model.parameters(), setup.config.lr)
        self.every, self.num_steps, self.equal = every, 0, True

    def start_step(self, step, lr):
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def update(self, outcome):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps, self.equal = self.num_steps + 1, False
        if self.num_steps % self.every == 0:
            self.synchronize()
        return self.num_steps

    @torch.no_grad()
    def synchronize(self):
        if not self.equal:
            for layer in self.layers:
                total = self.exchange.bound.sum(Dense(layer.weight.flatten()), (layer.id,))
                layer.weight.copy_(total.to_dense().view(layer.shape) / dist.get_world_size())
        self.equal = True
