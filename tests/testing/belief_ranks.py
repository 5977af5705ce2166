"""A small network with optimizers of the AdaBelief family, on one rank or on several that exchange moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from bench.core import spec
from bench.optimizers.base import Optimizer
from collectives.base import Collective
from compressors.base import Compressor
from compressors.floats import NoCompression
from compressors.layer import layers_of
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.exchange.reducer import reducer_for
from gradwire.optim.adabelief import Belief
from tests.testing.compressor_cases import step_at
from tests.testing.memory_transport import MemoryTransport, run_threads

LR = 1e-3
SHAPES = ((7, 10), (33,), ())
Tensors = list[torch.Tensor]
GradientOf = Callable[[int, int], Tensors]
"""(rank, step) -> one gradient per parameter"""


class Network(nn.Module):
    """Parameters of several shapes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList(
            torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES
        )


def noisy(rank: int, step: int) -> Tensors:
    """Return gradients in fp64: a mean that all ranks share, plus noise of the rank."""
    shared, own = (torch.Generator().manual_seed(seed) for seed in (7, 1000 * step + rank))
    return [
        torch.randn(shape, generator=shared, dtype=torch.float64) * 0.3
        + torch.randn(shape, generator=own, dtype=torch.float64)
        for shape in SHAPES
    ]


class Rank:
    """One rank's network and optimizer.

    Attributes:
        maxima: results of the exchange of the maxima, per step.
        means: results of the exchange of the means, per step.
    """

    def __init__(
        self,
        transport: MemoryTransport,
        optimizer: Optimizer,
        dtype: torch.dtype = torch.float32,
        compressor: Compressor | None = None,
        collective: str = "ring",
    ) -> None:
        self.transport = transport
        self.model = Network(dtype)
        bound = cast(Collective, spec.build("collectives", collective))
        self.channel = CompressedCommunicator(
            layers_of(self.model), reducer_for(compressor or NoCompression()), bound, transport
        )
        self.optimizer = optimizer.bind(self.model, LR, self.channel)
        self.means: list[Tensors] = []
        self.maxima: list[Tensors] = []
        if isinstance(self.optimizer, Belief) and self.optimizer._exchange is not None:
            self._watch(self.optimizer)

    def _watch(self, optimizer: Belief) -> None:
        exchange = optimizer._exchange
        assert exchange is not None

        def watched(means: Any, maxima: Any) -> None:
            exchange(means, maxima)
            self.means.append([tensor.clone() for tensor in means])
            self.maxima.append([tensor.clone() for tensor in maxima])

        optimizer._exchange = watched

    def in_float64(self) -> None:
        """Exchange the means in fp64 too, because the reducer works in fp32."""

        def exchange(means: Any, maxima: Any) -> None:
            self.channel.combine_(means, "mean")
            self.channel.combine_(maxima, "mean")

        optimizer = cast(Belief, self.optimizer)
        optimizer._exchange = exchange
        self._watch(optimizer)

    def train(self, gradient_of: GradientOf, steps: int) -> Iterator[Tensors]:
        """Train, and yield copies of the parameters after each step."""
        for index in range(steps):
            self.channel.start_step(step_at(index, self.transport.rank, self.transport.world_size))
            set_gradients(self.model, gradient_of(self.transport.rank, index))
            self.optimizer.step()
            self.channel.finish_step()
            yield [parameter.detach().clone() for parameter in self.model.parameters()]

    def state(self, name: str) -> Tensors:
        """Return copies of one tensor of the optimizer's state for each parameter."""
        return [self.optimizer.state[parameter][name].clone() for parameter in self.model.parameters()]


def set_gradients(model: nn.Module, gradients: Sequence[torch.Tensor]) -> None:
    """Set the gradients of all parameters, in the parameters' dtypes."""
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype)


def trained(
    make: Callable[[MemoryTransport], Rank], gradient_of: GradientOf, steps: int, n: int
) -> list[list[Tensors]]:
    """Return, per rank, the parameters after each step."""
    return run_threads(lambda transport: list(make(transport).train(gradient_of, steps)), n)
