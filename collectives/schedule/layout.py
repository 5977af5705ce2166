"""Layout: how the payloads of a sum lie end to end; with it, who sends what is known without any payload."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from collectives.payloads.base import Blocks, Payload, balanced_borders, borders_of_blocks
from collectives.payloads.bundle import Bundle

Key = tuple[int, ...]
"""Ids of the layers in a message, in its order."""
Stretch = tuple[int, int]
"""(first element, one past the last)"""

_OF_ITEMSIZE = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}


class Leaf(NamedTuple):
    """One payload of a message, bundles opened.

    Attributes:
        numel: elements that it stands for.
        alignment: as `Payload.alignment`.
        addable: as `Payload.addable`.
        wire: (elements, dtype) of its wire tensor; None where it is not element-wise.
        splits_blocks: as `Payload.splits_blocks`.
    """

    numel: int
    alignment: int = 1
    addable: bool = True
    wire: tuple[int, torch.dtype] | None = None
    splits_blocks: bool = False

    @property
    def elementwise(self) -> bool:
        """As `Payload.elementwise`."""
        return self.wire is not None

    @property
    def is_full(self) -> bool:
        """Whether its wire has every element, so that a part of the payload is a payload of its kind."""
        return self.wire is not None and self.wire[0] == self.numel

    def part(self, numel: int) -> Leaf:
        """So many of its elements."""
        return Leaf(numel, self.alignment, self.addable, (numel, self.wire[1]) if self.wire and self.is_full else None)


@dataclass(frozen=True)
class Layout:
    """What is the same of all ranks' payloads.

    Attributes:
        leaves: in the message's order.
        key: ids of the layers inside.
        layer_numels: elements of each of these layers; empty where that is not known.
    """

    leaves: tuple[Leaf, ...]
    key: Key = ()
    layer_numels: tuple[int, ...] = ()

    @classmethod
    def of(cls, payload: Payload, key: Key = ()) -> Self:
        """The layout of this payload and of its counterparts on other ranks."""
        return cls(
            tuple(
                Leaf(
                    leaf.numel,
                    leaf.alignment,
                    leaf.addable,
                    (leaf.wire.numel(), leaf.wire.dtype) if leaf.elementwise else None,
                    leaf.splits_blocks,
                )
                for leaf in leaves(payload)
            ),
            key,
        )

    @classmethod
    def dense(cls, numel: int, itemsize: int = 4, key: Key = ()) -> Self:
        """One tensor of `numel` elements of `itemsize` bytes."""
        return cls((Leaf(numel, wire=(numel, _OF_ITEMSIZE[itemsize])),), key)

    @functools.cached_property
    def numel(self) -> int:
        """Elements that the payloads stand for."""
        return sum(leaf.numel for leaf in self.leaves)

    @functools.cached_property
    def itemsize(self) -> int | None:
        """Bytes of an element where all payloads are element-wise and of one type, so wires may be added; else None."""
        types = {None if leaf.wire is None else leaf.wire[1] for leaf in self.leaves}
        dtype = types.pop() if len(types) == 1 else None
        return None if dtype is None else dtype.itemsize

    def by_type(self) -> list[tuple[int, ...]]:
        """Indices of the leaves that can travel as one wire tensor: all of one type; one group where some cannot."""
        by_type: dict[torch.dtype, tuple[int, ...]] = {}
        for index, leaf in enumerate(self.leaves):
            if leaf.wire is None:
                return [tuple(range(len(self.leaves)))]
            by_type[leaf.wire[1]] = (*by_type.get(leaf.wire[1], ()), index)
        return list(by_type.values())

    def by_layer(self) -> list[Layout]:
        """One layout per layer, or per payload of several layers that cannot be cut between them.

        A single one where payloads and layers do not match: a low-rank compressor's factors, say.
        """
        numels = list(self.layer_numels or (leaf.numel for leaf in self.leaves))
        ids, parts = list(self.key), []
        for leaf in self.leaves:
            count = next((i for i in range(1, len(numels) + 1) if sum(numels[:i]) == leaf.numel), 0)
            inside, ids, cuts, numels = ids[:count], ids[count:], numels[:count], numels[count:]
            if count and leaf.wire is not None and leaf.alignment == 1:
                layers = [leaf] if count == 1 else [leaf.part(numel) for numel in cuts]
                parts += [Layout((layer,), (layer_id,)) for layer, layer_id in zip(layers, inside, strict=True)]
            else:
                parts.append(Layout((leaf,), tuple(inside)))
        return parts if all(part.key for part in parts) and not ids else [self]

    def chunks(self, num_chunks: int) -> list[Stretch]:
        """A balanced partition of what travels: of the wire tensor where there is one, else of the payloads."""
        if self.itemsize is None:
            return self.cuts(num_chunks)
        numel = sum(leaf.wire[0] for leaf in self.leaves if leaf.wire)
        return list(itertools.pairwise(balanced_borders(numel, num_chunks)))

    def cuts(self, num_parts: int) -> list[Stretch]:
        """A balanced partition at borders at which payloads can be cut."""
        stretches = [Blocks(leaf.numel, leaf.alignment, leaf.splits_blocks) for leaf in self.leaves]
        return list(itertools.pairwise(borders_of_blocks(stretches, num_parts)))


def leaves(payload: Payload) -> tuple[Payload, ...]:
    """The payload itself, or what a bundle holds."""
    return tuple(payload.payloads) if isinstance(payload, Bundle) else (payload,)
