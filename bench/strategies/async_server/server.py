"""The server's side: its parameters and optimizer, its links to the workers, and one thread per remote worker."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from bench.optimizers.base import Optimizer
from collectives.parameter_server.link import serve
from collectives.parameter_server.server import ParameterServer, Push, Session
from collectives.payloads.dense import Dense
from collectives.server import added
from collectives.transport.base import Transport
from collectives.transport.process_group import ProcessGroupTransport
from compressors.base import Compressor, PerLayer
from compressors.ddp.reducer import PerLayerReducer
from compressors.ddp.report import Bucket
from compressors.layer import Layer, Step


class ServerParameters:
    """Hold fp32 copies of a model's trainable parameters; implements the server's `Parameters`.

    Args:
        layers: the model's layers, whose weights are copied; ids count from 0.
        compressor: turns a sum of payloads back into a gradient.
        optimizer: the update rule.
        lr: the learning rate before any schedule.
        world_size: number of workers.
        seed: the run's seed.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        compressor: Compressor,
        optimizer: Optimizer,
        *,
        lr: float,
        world_size: int,
        seed: int,
    ) -> None:
        weights = [
            nn.Parameter(layer.weight.detach().float().contiguous().clone())
            for layer in layers
            if layer.weight is not None
        ]
        self._layers = [
            dataclasses.replace(layer, weight=weight) for layer, weight in zip(layers, weights, strict=True)
        ]
        self._weights = weights
        self._gradients = [torch.zeros_like(weight) for weight in weights]
        self._reducer = PerLayerReducer(cast(PerLayer, compressor))
        self._optimizer = optimizer.build(weights, lr)
        self._world_size = world_size
        self._seed = seed

    def apply(self, pushes: Sequence[Push], num_terms: int) -> None:
        """Make one optimizer step with the learning rate of the first push. See `Parameters.apply`."""
        first = pushes[0]
        step = Step(
            index=first.clock_end.index,
            epoch=first.clock_end.epoch,
            rank=first.rank,
            world_size=num_terms,
            seed=self._seed,
        )
        for layer, weight, gradient in zip(self._layers, self._weights, self._gradients, strict=True):
            terms = [push.payloads[layer.id] for push in pushes if layer.id in push.payloads]
            weight.grad = gradient if terms else None  # a layer without a push keeps its weights
            if terms:
                total = terms[0] if len(terms) == 1 else added(terms)
                self._reducer.finish_bucket(total, Bucket(layers=[layer], gradients=[gradient.view(-1)], step=step))
        for group in self._optimizer.param_groups:
            group["lr"] = first.clock_end.lr * (num_terms / self._world_size)
        self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return a deep copy of the parameters and the optimizer's state."""
        return copy.deepcopy({"weights": self._weights, "optimizer": self._optimizer.state_dict()})

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for weight, saved in zip(self._weights, state["weights"], strict=True):
            weight.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])

    def packed(self) -> list[torch.Tensor]:
        """Return each layer's weights as a packed dense payload. See `Parameters.packed`."""
        return [Dense(weight.detach().view(-1)).pack() for weight in self._weights]


def star(root: int, timeout_s: float) -> dict[int, Transport]:
    """Return links between `root` and every other rank, by that other rank; every rank must call.

    The root gets all links, another rank only its own. Each link is its own process group, in which the root is rank 0,
    because threads must not share a process group.
    """
    links: dict[int, Transport] = {}
    for worker in range(dist.get_world_size()):
        if worker != root:
            group = dist.new_group([root, worker], timeout=datetime.timedelta(seconds=timeout_s), sort_ranks=False)
            if dist.get_rank() in (root, worker):
                links[worker] = ProcessGroupTransport(cast(dist.ProcessGroup, group), timeout_s=timeout_s)
    return links


class Service:
    """Run the server with one thread for every worker in another process.

    Args:
        server: the server whose sessions the threads drive.
        links: one transport per other worker, by its rank.
        numels: number of elements of every layer, by layer id.
        own_rank: rank of this process's worker, which uses `own_session` without a thread.

    Attributes:
        server: the server.
        own_session: the session of this process's worker.
    """

    def __init__(
        self, server: ParameterServer, links: Mapping[int, Transport], numels: Sequence[int], *, own_rank: int
    ) -> None:
        self._numels = numels
        self.server = server
        sessions = {rank: server.join(rank) for rank in range(server.world_size)}
        self.own_session = sessions[own_rank]
        self._threads = [
            threading.Thread(
                target=self._serve, args=(link, sessions[rank]), name=f"server for rank {rank}", daemon=True
            )
            for rank, link in links.items()
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wait until every worker has disconnected."""
        for thread in self._threads:
            thread.join()

    def _serve(self, link: Transport, session: Session) -> None:
        try:
            serve(link, session, self._numels)
        except Exception as error:  # noqa: BLE001 - re-raised in every worker, including this process's own
            self.server.fail(error)
