"""Local steps inside a trainer: the hook and optimizers of one rank, saved and loaded together."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from collectives.base import Collective
from compressors.base import Compressor
from gradwire.local.attach import attach_local


class RankTraining:
    """The hook and the optimizers of one rank; the state of both differs between ranks.

    Args:
        model: the network, on its device and in no wrapper.
        optimizers: all optimizers of the model.
        attach_arguments: the compressor, the collective and the keyword arguments of `attach_local`.

    Attributes:
        hook: the hook.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        attach_arguments: tuple[Compressor | str, Collective | str | None, Mapping[str, Any]],
    ) -> None:
        compressor, collective, options = attach_arguments
        self._optimizers = list(optimizers)
        self.hook = attach_local(model, self._optimizers, compressor, collective, **options)
        self._is_open = True

    @contextlib.contextmanager
    def outer(self) -> Iterator[None]:
        """Let the model hold the outer copy in a `with` block; after `close` it holds it anyway."""
        with self.hook.outer() if self._is_open else contextlib.nullcontext():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state that differs between ranks, with the step that `load_rank` compares."""
        state = self.hook.state_dict()
        return {"step": state["steps"], "local": state, "optimizers": [each.state_dict() for each in self._optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state of the hook and the optimizers, and the model's parameters with those of this rank."""
        for optimizer, own in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        self.hook.load_state_dict(state["local"])

    def close(self) -> None:
        """Close the hook; every rank must call this method."""
        self._is_open = False
        self.hook.close()
