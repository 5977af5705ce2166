"""Training with a server: every rank is a worker, and one of them also serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from bench.strategies.base import BoundStrategy, Setup
from bench.strategies.parameter_server.parameters import ServerParameters
from bench.strategies.parameter_server.service import Service, star
from bench.strategies.parameter_server.worker import AsyncWorker
from collectives.parameter_server.link import RemoteServer
from collectives.parameter_server.server import Answer, ParameterServer, Worker
from collectives.payloads.base import unpack
from collectives.payloads.dense import Dense
from compressors.ddp.report import StepReport
from compressors.layer import Step, layers_of

# A worker must not give up before the server, which knows for whom it waits.
WORKER_TIMEOUT_FACTOR = 1.2

MakeServer = Callable[[ServerParameters, int, float], ParameterServer]
"""(parameters, number of workers, longest wait in seconds) -> the server"""


class AsyncTraining(BoundStrategy):
    """The worker of this rank, and on the rank that serves the server with its threads.

    Args:
        setup: of the run; the optimizer works at the server.
        root: the rank that serves.
        make_server: called on that rank alone.
    """

    exchange: AsyncWorker

    def __init__(self, setup: Setup, *, root: int, make_server: MakeServer) -> None:
        config, layers = setup.config, layers_of(setup.model)
        reducer, optimizer = setup.make_reducer()
        links = star(root, config.timeout_s * WORKER_TIMEOUT_FACTOR)
        numels = [layer.numel for layer in layers]
        self._service: Service | None = None
        if dist.get_rank() == root:
            parameters = ServerParameters(
                layers,
                setup.compressor,
                optimizer,
                lr=config.lr,
                world_size=config.world_size,
                seed=config.seed,
            )
            self._parameters = parameters
            server = make_server(parameters, config.world_size, config.timeout_s)
            self._service = Service(server, links, numels, own_rank=root)
            server_side: Worker = self._service.own_session
        else:
            server_side = RemoteServer(links[dist.get_rank()], numels)
        worker = AsyncWorker(reducer, server_side, layers, links.values(), nonfinite=config.nonfinite)
        super().__init__(setup.model, setup.model, worker)

    @override
    def start_step(self, step: Step, lr: float) -> None:
        self.exchange.start_step(step, lr)  # the learning rate travels with the push

    @override
    def update(self, outcome: StepReport) -> int:
        """Take the parameters that the server sent, also after a step of which nothing was pushed."""
        self._take(self.exchange.answer)
        for parameter in self.model.parameters():
            parameter.grad = None
        return self.exchange.answer.num_steps

    @override
    def synchronize(self) -> None:
        self._take(self.exchange.synchronize())

    @override
    def settle(self) -> None:
        self.synchronize()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Everything pushed so far is applied before, and nobody pushes on until all have theirs."""
        self.synchronize()
        state = super().state_dict()
        if self._service is not None:
            state["server"] = self._service.server.state_dict() | {"parameters": self._parameters.state_dict()}
        dist.barrier()
        return state

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._service is not None:
            self._service.server.load_state_dict(state["server"])
            self._parameters.load_state_dict(state["server"]["parameters"])
        dist.barrier()  # nobody pushes before

    @override
    def close(self) -> None:
        """Leave, and where this rank serves, wait until all others left."""
        super().close()
        if self._service is not None:
            self._service.close()

    @torch.no_grad()
    def _take(self, answer: Answer) -> None:
        for layer, packed in zip(self.layers, answer.parameters, strict=True):
            weights = unpack(packed)
            assert layer.weight is not None
            assert isinstance(weights, Dense)
            layer.weight.copy_(weights.values.view(layer.shape))
