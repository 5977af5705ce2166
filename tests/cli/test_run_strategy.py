"""A strategy of a third party: one class makes a run of its own, and nothing else is told of it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.testing.invoke import execute, only_run, rows
from tests.testing.plugins import install_entry_points

SOURCE = '''
"""Every rank trains by itself and takes the mean of all parameters now and then.

Source: McMahan et al. 2017.
"""
import dataclasses
from typing import Annotated

import torch
import torch.distributed as dist
from annotated_types import Ge
from typing_extensions import Doc

from bench.strategies.base import BoundStrategy, Strategy
from collectives.payloads.dense import Dense
from collectives.transport.process_group import ProcessGroupTransport
from compressors.ddp.report import StepReport


@dataclasses.dataclass(kw_only=True)
class Averaging(Strategy):
    """Sends whole parameters every few steps."""

    every: Annotated[int, Ge(1), Doc("steps between two means")] = 2

    def refusal(self, config, compressor, collective):
        if compressor.component_name != "none":
            return "averaging sends parameters as they are; use --compressor none"

    def bind(self, setup):
        return Averaged(setup, self.every)


class Wires:
    last_encoded = {}

    def __init__(self, collective):
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
'''
STEPS, EVERY = 12, 4


def test_a_strategy_of_a_third_party_trains(tmp_path: Path) -> None:
    (tmp_path / "stranger.py").write_text(SOURCE, encoding="utf-8")
    install_entry_points(tmp_path, "stranger", {"bench.strategies": {"averaging": "stranger:Averaging"}})
    found = json.loads(execute("list", "strategies", "--json", PYTHONPATH=str(tmp_path)).out)["strategies"]
    assert "averaging" in [entry["name"] for entry in found]
    run = (
        "run", "--model", "linear", "--strategy", f"averaging:every={EVERY}", "--collective", "ring",
        "--steps", str(STEPS), "--threads", "1", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    refused = execute(*run, "--compressor", "fp16", PYTHONPATH=str(tmp_path))
    assert refused.code == 2
    assert "averaging sends parameters as they are" in refused.error
    answer = execute(*run, PYTHONPATH=str(tmp_path))
    assert answer.code == 0, answer.error
    (row,) = rows(only_run(tmp_path / "out"))
    assert (row["strategy"], row["replicas_in_sync"]) == (f"averaging:every={EVERY}", "true")
    # of two ranks in a ring, each sends half a tensor twice
    assert float(row["payload_bytes_per_step"]) == float(row["dense_bytes_per_step"]) / EVERY
