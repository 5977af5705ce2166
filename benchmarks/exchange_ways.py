"""Methods of exchanging a gradient under DistributedDataParallel: this project's, and others for comparison."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from collectives.options import build
from compressors.base import Compressor

try:
    from gradwire import attach
except ImportError:  # a checkout of before that package
    from compressors.ddp.attach import attach  # type: ignore[import-not-found, no-redef]

USUAL_RATIO = 0.01


class Given(nn.Module):
    """The parameters of a network whose backward pass only hands over given gradients, last layer first."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.gradients: list[torch.Tensor | None] = []

    def forward(self) -> torch.Tensor:
        x = torch.zeros((), requires_grad=True)
        for index, parameter in enumerate(self.parameters()):
            x = _Handed.apply(x, parameter, self.gradients, index)
        return x


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor, gradients: list, index: int) -> torch.Tensor:
        ctx.given = gradients, index
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        gradients, index = ctx.given
        gradient, gradients[index] = gradients[index], None  # no reference is kept, so that autograd need not copy it
        return grad, gradient, None, None


class Ours:
    """A compressor and a collective of this checkout of the project or another."""

    def __init__(self, ddp: DistributedDataParallel, compressor: str, collective: str) -> None:
        chosen = build("compressors", Compressor, compressor)
        self.hook = attach(ddp, chosen, collective, momentum=0.9 if chosen.traits.owns_momentum else None)

    def finish(self) -> None:
        assert self.hook.step_ok()

    def close(self) -> None:
        self.hook.close()


class Bf16:
    """Dense bf16 through the backend's all-reduce, by PyTorch's communication hook."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(dist.group.WORLD, default_hooks.bf16_compress_hook)

    def finish(self) -> None:
        """Do nothing: the exchange ends with the backward pass."""

    def close(self) -> None:
        """Do nothing: there are no resources to free."""


class Usual(Bf16):
    """Top-k as it is usually implemented.

    It calls torch.topk for each layer, all-gathers fp32 values and int32 indices, and computes the residual through a
    dense copy.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.residuals: dict[int, torch.Tensor] = {}
        ddp.register_comm_hook(None, lambda _, bucket: self._exchange(bucket))

    def _exchange(self, bucket: Any) -> Any:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._exchange_layer(id(parameter), gradient.view(-1))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _exchange_layer(self, layer: int, gradient: torch.Tensor) -> None:
        x = gradient + self.residuals[layer] if layer in self.residuals else gradient.clone()
        indices = x.abs().topk(max(1, int(x.numel() * USUAL_RATIO)), sorted=False).indices
        values = x[indices]
        self.residuals[layer] = x - torch.zeros_like(x).scatter_(0, indices, values)
        num_ranks = dist.get_world_size()
        all_values = [torch.empty_like(values) for _ in range(num_ranks)]
        narrow = indices.to(torch.int32)
        all_indices = [torch.empty_like(narrow) for _ in range(num_ranks)]
        dist.all_gather(all_values, values)
        dist.all_gather(all_indices, narrow)
        gradient.zero_()
        for some_values, some_indices in zip(all_values, all_indices, strict=True):
            gradient.scatter_add_(0, some_indices.long(), some_values)
        gradient.div_(num_ranks)


class AuthorsPowerSgd(Bf16):
    """PowerSGD by the formula of its authors' package: each step updates either P or Q, for all layers together.

    Source: Vogels, Karimireddy, Jaggi 2019 (arXiv:1905.13727).
    Differs: the package powersgd processes all gradients after the backward pass; here they are in one bucket.
    """

    def __init__(self, ddp: DistributedDataParallel, rank: int = 2) -> None:
        self.rank, self.step = rank, 0
        self.residuals: dict[tuple[int, int], torch.Tensor] = {}
        self.factors: dict[tuple[int, int], list[torch.Tensor]] = {}
        ddp.register_comm_hook(None, lambda _, bucket: self._exchange(bucket))

    def _exchange(self, bucket: Any) -> Any:
        by_shape: dict[tuple[int, int], list[torch.Tensor]] = {}
        rest = []
        for gradient in bucket.gradients():
            n, m = gradient.shape[0], gradient.numel() // gradient.shape[0]
            if gradient.numel() > 2 * 0.5 * min(self.rank, n, m) * (n + m):
                by_shape.setdefault((n, m), []).append(gradient.view(n, m))
            else:
                rest.append(gradient.view(-1))
        side = self.step % 2
        batches = {}
        for shape, gradients in by_shape.items():
            x = torch.stack(gradients)
            if shape in self.residuals:
                x += self.residuals[shape]
            factors = self.factors.setdefault(shape, self._start(len(gradients), shape))
            factors[side] = torch.linalg.qr(factors[side]).Q
            x = x.mT if side else x
            batches[shape] = x
            factors[1 - side] = torch.einsum("bnm,bnr->bmr", x, factors[side])
        _average([self.factors[shape][1 - side] for shape in batches])
        for shape, x in batches.items():
            approximation = torch.einsum("bnr,bmr->bnm", self.factors[shape][side], self.factors[shape][1 - side])
            x -= approximation
            self.residuals[shape] = x.mT if side else x
            for gradient, part in zip(by_shape[shape], approximation.mT if side else approximation, strict=True):
                gradient.copy_(part)
        _average(rest)
        self.step += 1
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _start(self, count: int, shape: tuple[int, int]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        rank = min(self.rank, *shape)
        return [torch.randn(count, length, rank, generator=generator) for length in shape]


def _average(tensors: list[torch.Tensor]) -> None:
    if not tensors:
        return
    buffer = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(buffer)
    buffer /= dist.get_world_size()
    for tensor, part in zip(tensors, buffer.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


class Nothing(Bf16):
    """No exchange: every rank uses its own gradients."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(None, lambda _, bucket: _done(bucket))


def _done(bucket: Any) -> Any:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A method, as the command line and the table name it.

    Attributes:
        name: "group_topk+allgather", "bf16 by gloo", "usual", "nothing" or "powersgd of its authors".
        checkout: "now" or "before".
    """

    name: str
    checkout: str = "now"

    @property
    def label(self) -> str:
        return self.name if self.checkout == "now" else f"{self.name} ({self.checkout})"

    def open(self, ddp: DistributedDataParallel) -> Any:
        plain = {"bf16 by gloo": Bf16, "usual": Usual, "nothing": Nothing, "powersgd of its authors": AuthorsPowerSgd}
        if self.name in plain:
            return plain[self.name](ddp)
        compressor, _, collective = self.name.rpartition("+")
        return Ours(ddp, compressor, collective)
