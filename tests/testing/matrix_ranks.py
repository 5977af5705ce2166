"""A network with parameters of every kind, and optimizers of hidden matrices on one rank or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import nn

from bench.core import spec
from bench.optimizers.base import Optimizer
from collectives.base import Collective
from compressors.base import Compressor
from compressors.layer import layers_of
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.exchange.reducer import reducer_for
from tests.testing.compressor_cases import step_at
from tests.testing.memory_transport import MemoryTransport

LR = 0.02
Tensors = dict[str, torch.Tensor]
# (rank, step) -> gradients by name
GradientsOf = Callable[[int, int], Tensors]

# Hidden matrices as (rows, columns), of which the convolution that is transposed has its filters in the second axis.
MATRICES = {"conv.weight": (8, 27), "back.weight": (4, 32), "wide.weight": (6, 20), "tall.weight": (20, 6)}


class Network(nn.Module):
    """Convolutions, linear layers, a norm, an embedding and an output layer; it is never called."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.token = nn.Embedding(10, 6)
        self.conv = nn.Conv2d(3, 8, 3)
        self.back = nn.ConvTranspose2d(8, 4, 2)
        self.wide = nn.Linear(20, 6)
        self.tall = nn.Linear(6, 20, bias=False)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 5)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)


SHAPES = {name: parameter.shape for name, parameter in Network().named_parameters()}


def matrix_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor of a hidden layer's shape as a matrix (out, rest)."""
    return (tensor.transpose(0, 1) if name == "back.weight" else tensor).flatten(1).clone()


def noisy(rank: int, step: int) -> Tensors:
    """Return gradients in fp64: a mean that all ranks share, plus noise of the rank."""
    shared, own = (torch.Generator().manual_seed(seed) for seed in (7, 1000 * step + rank))
    return {
        name: torch.randn(shape, generator=shared, dtype=torch.float64) * 0.3
        + torch.randn(shape, generator=own, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def averaged(num_ranks: int) -> GradientsOf:
    """Return a function that gives every rank the mean of all ranks' gradients."""

    def mean(rank: int, step: int) -> Tensors:
        parts = [noisy(other, step) for other in range(num_ranks)]
        return {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}

    return mean


def rate(step: int) -> float:
    """Return the learning rate of a step, as a schedule would set it."""
    return LR * (1 - step / 200)


class Rank:
    """One rank's network and optimizer; without a transport, the only rank."""

    def __init__(
        self,
        text: str,
        transport: MemoryTransport | None = None,
        dtype: torch.dtype = torch.float64,
        *,
        compressor: str = "none",
        collective: str = "ring",
    ) -> None:
        self.model = Network(dtype)
        self.channel: CompressedCommunicator | None = None
        if transport is not None:
            bound = cast(Collective, spec.build("collectives", collective))
            reducer = reducer_for(cast(Compressor, spec.build("compressors", compressor)))
            self.channel = CompressedCommunicator(layers_of(self.model), reducer, bound, transport)
        self.optimizer = cast(Optimizer, spec.build("optimizers", text)).bind(self.model, LR, self.channel)

    def train(self, gradients_of: GradientsOf, steps: int, first: int = 0) -> Iterator[Tensors]:
        """Train, and yield copies of the parameters after each step."""
        rank, world_size = 0, 1
        for index in range(first, first + steps):
            if self.channel is not None:
                rank, world_size = self.channel.transport.rank, self.channel.transport.world_size
                self.channel.start_step(step_at(index, rank, world_size))
            gradients = gradients_of(rank, index)
            for name, parameter in self.model.named_parameters():
                parameter.grad = gradients[name].to(parameter.dtype)
            for group in self.optimizer.param_groups:
                group["lr"] = rate(index)
            self.optimizer.step()
            if self.channel is not None:
                self.channel.finish_step()
            yield {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def after(self, gradients_of: GradientsOf, steps: int, first: int = 0) -> Tensors:
        """Train, and return copies of the parameters after the last step."""
        *_, last = self.train(gradients_of, steps, first)
        return last


class PlainAdamW:
    """AdamW for one parameter, as published, with the defaults of the optimizers of hidden matrices."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.mean, self.square, self.age = weight.clone(), 0.0 * weight, 0.0 * weight, 0

    def step(self, gradient: torch.Tensor, lr: float) -> None:
        self.age += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.95 * self.square + 0.05 * gradient**2
        divisor = (self.square / (1 - 0.95**self.age)).sqrt() + 1e-10
        self.weight -= lr * self.mean / (1 - 0.9**self.age) / divisor
