"""Scenes on real gloo ranks: a small model in DDP, its training, and the results of each rank."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp.attach import attach
from gradwire.ddp.hook import CompressionHook
from tests.testing.ranks import run_ranks

LR = 0.1
Scene = Callable[[int], Any]
"""rank -> results"""


def network() -> nn.Sequential:
    """Return two layers, with the same weights each time."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's samples and labels at a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 20, generator=generator), torch.randint(0, 5, (16,), generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss of a rank's batch."""
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x), y)


def wrapped(**options: Any) -> DistributedDataParallel:
    """Return the network in DDP, with these options of DDP."""
    return DistributedDataParallel(network(), **options)


def weights(model: nn.Module) -> torch.Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradients(model: nn.Module) -> torch.Tensor:
    """Return all gradients as one vector."""
    return torch.cat([cast(torch.Tensor, p.grad).flatten() for p in model.parameters()])


def train(ddp: DistributedDataParallel, hook: CompressionHook, steps: range) -> torch.Tensor:
    """Train these steps with plain gradient descent, and return the weights."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    for step in steps:
        loss_of(ddp, dist.get_rank(), step).backward()
        assert hook.step_ok()
        optimizer.step()
        optimizer.zero_grad()
    return weights(ddp)


def warnings_of(
    compressor: str, prepare: Callable[[Any], object] = lambda _: None, collective: str = "allgather"
) -> list[str]:
    """Return the warnings of three steps with a prepared hook."""
    ddp = wrapped()
    hook = attach(ddp, compressor, collective)
    prepare(hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(ddp, hook, range(3))
    hook.close()
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def held() -> tuple[int, int]:
    """Return the numbers of descriptors and threads of this process."""
    process = psutil.Process()
    return process.num_fds(), process.num_threads()


def held_after_each(*pairs: tuple[str, str]) -> list[tuple[int, int]]:
    """Return the descriptors and threads after each of 50 cycles of these pairs; all models and hooks are kept."""
    kept: list[Any] = []
    counts = []
    for cycle in range(50):
        ddp = wrapped()
        hook = attach(ddp, *pairs[cycle % len(pairs)])
        train(ddp, hook, range(2))
        hook.close()
        kept += ddp, hook
        counts.append(held())
    return counts


def grows(counts: Sequence[tuple[int, int]]) -> bool:
    """Return whether there are more descriptors or threads later than after the first cycle."""
    return any(now > then for later in counts[1:] for now, then in zip(later, counts[0], strict=True))


def message_of(call: Callable[[], Any]) -> str:
    """Return the message of the error that the call raises."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def played_by_two(scenes: Sequence[Scene], tmp_path: Path) -> list[dict[str, Any]]:
    """Play every scene in one pair of processes, and return its results by name, per rank."""
    return [loaded(result) for result in run_ranks(_play, 2, tmp_path, args=(scenes,))]


def _play(rank: int, scenes: Sequence[Scene]) -> bytes:
    return saved({scene.__name__: scene(rank) for scene in scenes})


def saved(value: Any) -> bytes:
    """Serialise tensors for another process; sent directly, they would be shared with a process that has ended."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(raw: bytes) -> Any:
    """Return what `saved` has serialised."""
    return torch.load(io.BytesIO(raw))
