"""Engine hooks: PyTorch's own communication hooks behind the same option, as a reference.

Nothing here encodes: the training engine registers `hook` with DistributedDataParallel and counts bytes by the closed
form, for the backend hides its wire.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from typing_extensions import override

from collectives.base import Collective
from compressors.base import Compressor
from compressors.layer import Layer

DDPHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


@dataclasses.dataclass(kw_only=True)
class TorchCommHook(Compressor):
    """A method that runs inside PyTorch's DDP."""

    engine_hook: ClassVar[bool] = True

    @override
    def refusal(self, collective: type[Collective] | Collective) -> str | None:
        if collective.component_name == "native":
            return None
        return (
            f"{self.component_name} is PyTorch's own communication hook and talks to the backend itself; "
            "use collective native"
        )

    @override
    def expected_bucket_nbytes(self, layers: Sequence[Layer]) -> int | None:
        """Tensors that the backend all-reduces carry no headers."""
        return sum(self.expected_nbytes(layer) or 0 for layer in layers)

    @abc.abstractmethod
    def hook(self, process_group: dist.ProcessGroup) -> tuple[object, DDPHook]:
        """State and hook for `DistributedDataParallel.register_comm_hook`; every rank must call."""

    def num_entries(self, layer: Layer) -> int:
        """Return how many numbers are sent of a layer at full compression."""
        return layer.numel

    def forget(self, state: Any) -> None:
        """Drop what a gradient that was not finite would spoil for ever; most hold nothing."""

    def state_of(self, state: Any) -> dict[str, Any]:
        """What the hook's state holds from step to step; most hold nothing."""
        return {}

    def restore(self, state: Any, saved: dict[str, Any]) -> None:
        """Put what `state_of` gave into a new state."""
