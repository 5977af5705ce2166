"""The ways to attach to a model, behind one interface, so that a test can hold them all to the same behaviour."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradwire import attach, attach_fsdp, attach_local, attach_reduce_scatter
from tests.testing.ddp_scenes import LR, loss_of, weights

SHARDS = 2
"""Ranks that share a replica under `attach_fsdp`; there are two replicas."""


class Network(nn.Module):
    """Two blocks and a parameter of the root; first dimensions that two shards do not divide.

    `poison` multiplies the last element of one parameter's gradient, which one shard has.
    """

    def __init__(self, width: int = 31) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Linear(20, width), nn.ReLU()), nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        )
        self.head = nn.Linear(width, 5)
        self.poison = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of five classes."""
        scale = self.scale.clone()
        if self.poison != 1:
            scale.register_hook(lambda gradient: gradient * torch.tensor([1, 1, 1, 1, self.poison]))
        return cast(torch.Tensor, self.head(self.blocks(x)) * scale)


def network(width: int = 31, seed: int = 3) -> Network:
    torch.manual_seed(seed)
    return Network(width)


@functools.cache
def mesh() -> DeviceMesh:
    """Return the mesh of two replicas of two shards."""
    return init_device_mesh("cpu", (2, SHARDS), mesh_dim_names=("replica", "shard"))


@functools.cache
def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


class Engine:
    """A rank's network with an open hook, and plain gradient descent.

    Args:
        compressor: its spec.
        collective: its spec; None: the compressor's default.
        model: the network to wrap; None: the same one on all ranks.
        wrapping: options of the wrapper.
        resumes: what `state` returned, for the rest of that training.
        options: options of the function that attaches.
    """

    num_ranks: ClassVar[int] = 2
    pauses: ClassVar[tuple[str, ...]] = ()  # ways of a micro-step that sends nothing

    def __init__(
        self,
        compressor: str = "none",
        collective: str | None = None,
        *,
        model: nn.Module | None = None,
        wrapping: dict[str, Any] | None = None,
        resumes: Any = None,
        **options: Any,
    ) -> None:
        self.network: Any = network() if model is None else model
        self.model: Any = self.wrap(self.network, **wrapping or {})
        if resumes:
            self.model.load_state_dict(resumes[0])
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=LR)
        self.hook: Any = self.attach(compressor, collective, **options)
        if resumes:
            self.hook.load_state_dict(resumes[1])

    @staticmethod
    def wrap(model: nn.Module, **options: Any) -> nn.Module:
        return DistributedDataParallel(model, **options)

    def attach(self, compressor: str, collective: str | None, **options: Any) -> Any:
        return attach(self.model, compressor, collective, **options)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.hook.close()

    def backward(self, step: int) -> None:
        loss_of(self.model, dist.get_rank(), step).backward()

    def update(self) -> None:
        """Finish a step that must not be skipped."""
        assert self.hook.step_ok()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: Iterable[int]) -> torch.Tensor:
        """Return the weights after these steps."""
        for step in steps:
            self.backward(step)
            self.update()
        return self.weights()

    def pause(self, way: str, *, ends: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context whose `backward` sends nothing, unless it `ends` the micro-steps."""
        return contextlib.nullcontext() if ends else self.hook.no_sync()

    def state(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.hook.state_dict()))

    def weights(self) -> torch.Tensor:
        """Return the parameters of the whole model as one vector."""
        return weights(self.network)

    def gradients(self) -> torch.Tensor:
        """Return the gradients that this rank holds."""
        return torch.cat([self.local(p.grad).flatten() for p in self.network.parameters()]).clone()

    def residuals(self) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = self.hook.state_dict()["reducer"]["residuals"]
        return found

    def waiting(self) -> torch.Tensor:
        """Return the mean, over the ranks that exchange, of what they have not sent of `gradients`."""
        kept, group = self.residuals(), self.exchanging()
        for layer_id in sorted(kept):
            dist.all_reduce(kept[layer_id], group=group)
        parameters = list(self.network.parameters())
        own = [kept[self.first_id() + number] / dist.get_world_size(group) for number in range(len(parameters))]
        return torch.cat([each.flatten()[: self.local(p).numel()] for each, p in zip(own, parameters, strict=True)])

    def exchanging(self) -> dist.ProcessGroup | None:
        """Return the ranks that exchange compressed gradients; None: all."""
        return None

    def first_id(self) -> int:
        """Return the id of this rank's first layer."""
        return 0

    @staticmethod
    def local(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Ddp(Engine):
    """`attach`, in a loop that asks `step_ok`."""

    pauses = ("no_sync",)


class DdpOptimizer(Engine):
    """`attach` with the optimizer given, in a loop that does not ask."""

    pauses = ("no_sync",)

    def attach(self, compressor: str, collective: str | None, **options: Any) -> Any:
        return attach(self.model, compressor, collective, optimizer=self.optimizer, **options)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Fsdp(Engine):
    """`attach_fsdp` between two replicas of two shards."""

    num_ranks = 4
    pauses = ("set_requires_all_reduce", "set_requires_gradient_sync")

    @staticmethod
    def wrap(model: Any, **options: Any) -> nn.Module:
        return sharded(model, mesh()["shard"], **options)

    def attach(self, compressor: str, collective: str | None, **options: Any) -> Any:
        return attach_fsdp(self.model, compressor, collective, replicas=mesh()["replica"].get_group(), **options)

    def pause(self, way: str, *, ends: bool) -> contextlib.AbstractContextManager[None]:
        getattr(self.hook if way == "set_requires_all_reduce" else self.model, way)(ends)
        return contextlib.nullcontext()

    def weights(self) -> torch.Tensor:
        parts = (cast(DTensor, p).full_tensor().detach() for p in self.model.parameters())
        return torch.cat([each.flatten() for each in parts])

    def exchanging(self) -> dist.ProcessGroup | None:
        return mesh()["replica"].get_group()


class ReduceScatter(Fsdp):
    """`attach_reduce_scatter` of a model that all ranks share."""

    pauses = ("set_requires_gradient_sync",)

    @staticmethod
    def wrap(model: Any, **options: Any) -> nn.Module:
        return sharded(model, mesh_of_all(), **options)

    def attach(self, compressor: str, collective: str | None, **options: Any) -> Any:
        return attach_reduce_scatter(self.model, compressor, **options)

    def exchanging(self) -> dist.ProcessGroup | None:
        return None

    def first_id(self) -> int:
        return dist.get_rank() * len(list(self.network.parameters()))


class Local(Engine):
    """`attach_local` with an exchange in every step."""

    @staticmethod
    def wrap(model: nn.Module, **_: Any) -> nn.Module:
        return model

    def attach(self, compressor: str, collective: str | None, **options: Any) -> Any:
        return attach_local(self.model, self.optimizer, compressor, collective, **{"steps": 1} | options)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def sharded(model: Any, shards: DeviceMesh, **options: Any) -> nn.Module:
    """Return the model, its blocks and the rest sharded."""
    for block in model.blocks:
        fully_shard(block, mesh=shards, **options)
    return cast(nn.Module, fully_shard(model, mesh=shards, **options))


ENGINES: dict[str, type[Engine]] = {
    "ddp": Ddp,
    "ddp with optimizer": DdpOptimizer,
    "fsdp": Fsdp,
    "reduce_scatter": ReduceScatter,
    "local": Local,
}


def engines(*names: str) -> pytest.MarkDecorator:
    """Call the test on the ranks of each of these engines, with the `engine`'s name."""
    marked = [pytest.param(name, marks=pytest.mark.ranks(ENGINES[name].num_ranks)) for name in names or ENGINES]
    return pytest.mark.parametrize("engine", marked)


def alone(
    batches: Iterable[list[tuple[int, int]]], model: nn.Module | None = None, momentum: float = 0.0
) -> torch.Tensor:
    """Return the weights after training in one process, with each step's mean loss over (rank, step) pairs."""
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    for pairs in batches:
        for pair in pairs:
            (loss_of(model, *pair) / len(pairs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def assert_same_on_all_ranks(tensor: torch.Tensor) -> None:
    of_rank = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(of_rank, tensor)
    assert all(torch.equal(each, tensor) for each in of_rank)
