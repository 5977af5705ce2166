"""Residuals of servers: the errors of the sums that they send back, fp32, kept per stretch of a layer.

The rank that serves a stretch keeps its residual.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from collectives.transport.base import Receive, Send, Transport, wait_all

# Keeper of a stretch whose residual is the same on all ranks, as after resuming with another number of ranks.
EVERY_RANK = -1


class LayerStretch(NamedTuple):
    """A range of a layer's elements.

    Attributes:
        layer: id of the layer.
        start, stop: first element and one past the last, counted within the layer.
    """

    layer: int
    start: int
    stop: int


def stretches_between(layers: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[LayerStretch]:
    """Yield the stretch of each layer that lies within a range of elements of a message.

    Args:
        layers: (id, number of elements) of each layer in the message, in order.
        start: first element of the range in the message.
        stop: one past the last element of the range.
    """
    borders = itertools.accumulate((numel for _, numel in layers), initial=0)
    for (layer, numel), first in zip(layers, borders, strict=False):
        begin, end = max(start - first, 0), min(stop - first, numel)
        if begin < end:
            yield LayerStretch(layer, begin, end)


class AnswerResiduals:
    """The residuals (errors of the sums that a server sends back) of the stretches of layers that this rank serves.

    Residuals are proposed in a step, and used in later steps once they are accepted.
    All ranks know which rank keeps the residual of which stretch. When DDP rebuilds its buckets, a layer may get
    another server or be cut at other elements; its residuals then move to the ranks that serve it now.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._kept: dict[LayerStretch, torch.Tensor] = {}
        self._proposed: dict[LayerStretch, torch.Tensor] = {}
        self._keepers: dict[LayerStretch, int] = {}

    def settle(self, keepers: Mapping[LayerStretch, int]) -> None:
        """Move residuals to the ranks that serve the stretches from now on. Every rank must call this method.

        Nothing is sent if the same ranks serve the same stretches as before; otherwise one fp32 message, counted as
        `state`, for each piece of a stretch that moves to another rank.

        Args:
            keepers: the rank that serves each stretch, for all stretches of a layer; the same on all ranks.
        """
        changed = {stretch: keeper for stretch, keeper in keepers.items() if self._keepers.get(stretch) != keeper}
        if not changed:
            return
        rank = self._transport.rank
        layers = {stretch.layer for stretch in changed}
        before = {old: keeper for old, keeper in self._keepers.items() if old.layer in layers}
        arrived: dict[LayerStretch, torch.Tensor] = {}
        sends: list[Send] = []
        receives: list[Receive] = []
        for new, keeper in changed.items():
            for old, source in before.items():
                start, stop = max(new.start, old.start), min(new.stop, old.stop)
                if old.layer != new.layer or start >= stop:
                    continue
                if keeper != rank:
                    if source == rank:
                        sends.append((self._part(old, start, stop), keeper))
                    continue
                into = arrived.setdefault(new, self._zeros(new.stop - new.start))[start - new.start : stop - new.start]
                if source in (rank, EVERY_RANK):
                    into.copy_(self._part(old, start, stop))
                else:
                    receives.append((into, source))
        with self._transport.counted_as("state"):
            wait_all(self._transport.post(sends, receives))
        for old in before.keys() - (keepers.keys() - changed.keys()):
            self._kept.pop(old, None)
            del self._keepers[old]
        self._kept |= arrived
        self._keepers |= changed

    def add_to_(self, total: torch.Tensor, stretches: Sequence[LayerStretch]) -> None:
        """Add the accepted residuals of these stretches to `total` (mutated).

        Args:
            total: fp32 [elements of all stretches].
            stretches: the stretches, in the order in which they lie in `total`.
        """
        for stretch, part in zip(stretches, _cut(total, stretches), strict=True):
            if stretch in self._kept:
                part.add_(self._kept[stretch])

    def propose(self, total: torch.Tensor, stretches: Sequence[LayerStretch]) -> None:
        """Propose the elements of `total` as the new residuals of these stretches.

        Args:
            total: the residuals, concatenated, fp32; not copied, so it must not change afterwards.
            stretches: the stretches, in the order in which they lie in `total`.
        """
        self._proposed.update(zip(stretches, _cut(total, stretches), strict=True))

    def commit(self) -> None:
        """Accept the residuals that were proposed since the last `commit` or `drop`."""
        self._kept |= self._proposed
        self._proposed = {}

    def drop(self) -> None:
        """Discard the residuals that were proposed since the last `commit` or `drop`."""
        self._proposed = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the accepted residuals on this rank, and the rank that keeps the residual of every stretch."""
        return {
            "residuals": {tuple(stretch): residual.clone() for stretch, residual in self._kept.items()},
            "keepers": {tuple(stretch): keeper for stretch, keeper in self._keepers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace all residuals with a state that `state_dict` returned; discard proposed ones."""
        self._kept = {LayerStretch(*each): residual.clone() for each, residual in state["residuals"].items()}
        self._keepers = {LayerStretch(*each): keeper for each, keeper in state["keepers"].items()}
        self._proposed = {}

    def _part(self, stretch: LayerStretch, start: int, stop: int) -> torch.Tensor:
        if stretch not in self._kept:  # before the first accepted step
            return self._zeros(stop - start)
        return self._kept[stretch][start - stretch.start : stop - stretch.start]

    def _zeros(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=torch.float32, device=self._transport.device)


def _cut(total: torch.Tensor, stretches: Sequence[LayerStretch]) -> tuple[torch.Tensor, ...]:
    return torch.split(total, [stretch.stop - stretch.start for stretch in stretches])
