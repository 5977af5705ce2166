"""Ranks in threads that train with local steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from bench.core import spec
from collectives.base import Collective
from compressors.base import Compressor
from gradwire.local.by_speed import LocalStepsBySpeed
from gradwire.local.exchange import FixedMembers, LocalSteps
from gradwire.local.options import LocalOptions
from tests.testing.compressor_cases import step_at
from tests.testing.memory_transport import MemoryTransport, run_threads

Change = Callable[[nn.Module, int, int], object]
"""(model, rank, step): what the inner optimizer does."""


class Scalars(nn.Module):
    """Blocks of one parameter each."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ParameterList([nn.Parameter(torch.tensor([value]))]) for value in values)


class Rank:
    """One rank's model with local steps; `report` is that of the last step."""

    def __init__(
        self, transport: MemoryTransport, model: nn.Module, compressor: str, collective: str, options: dict[str, Any]
    ) -> None:
        self.transport, self.model = transport, model
        kind = LocalStepsBySpeed if options.get("steps") == "auto" else LocalSteps
        self.local = kind(
            model,
            LocalOptions(**options),
            cast(Compressor, spec.build("compressors", compressor)),
            FixedMembers(cast(Collective, spec.build("collectives", collective)), transport),
        )

    def step(self, change: Change, index: int) -> None:
        """Make one step with what the inner optimizer does."""
        self.local.start_step(step_at(index, self.transport.rank, self.transport.world_size))
        with torch.no_grad():
            change(self.model, self.transport.rank, index)
        self.local.after_update()
        self.report = self.local.finish_step()

    def outer(self) -> torch.Tensor:
        """Return the outer copy of all parameters, as an evaluation sees it."""
        self.local.show_outer()
        return flat(self.model)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def run_local(
    make: Callable[[], nn.Module],
    work: Callable[[Rank], Any],
    *,
    ranks: int = 2,
    compressor: str = "none",
    collective: str = "ring",
    **options: Any,
) -> list[Any]:
    """Return the results of `work` on every rank, in rank order."""
    models = [make() for _ in range(ranks)]  # here, because threads share torch's generator

    def train(transport: MemoryTransport) -> Any:
        rank = Rank(transport, models[transport.rank], compressor, collective, options)
        result = work(rank)
        rank.local.close()
        return result

    return run_threads(train, ranks)
