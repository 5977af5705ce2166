"""Layouts: sizes and dtypes of the payloads in a message, which determine the rounds of a sum."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from collectives.payloads.base import Payload, balanced_borders, borders_of_blocks
from collectives.payloads.bundle import Bundle

Key = tuple[int, ...]  # ids of the layers in a message, in the order in which they lie in it
Stretch = tuple[int, int]  # (first element, one past the last)

_OF_ITEMSIZE = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}


class Leaf(NamedTuple):
    """The size and dtype of one payload in a message; the payloads in a bundle are separate leaves.

    Attributes:
        numel: number of elements that the payload represents.
        alignment: as `Payload.alignment`.
        addable: as `Payload.addable`.
        wire: (number of elements, dtype) of its wire tensor; None if it is not element-wise.
        splits_blocks: as `Payload.splits_blocks`.
    """

    numel: int
    alignment: int = 1
    addable: bool = True
    wire: tuple[int, torch.dtype] | None = None
    splits_blocks: bool = False

    @property
    def elementwise(self) -> bool:
        """Return `Payload.elementwise`."""
        return self.wire is not None

    @property
    def is_full(self) -> bool:
        """Tell whether its wire tensor has all elements, so that any part of it is a payload of the same kind."""
        return self.wire is not None and self.wire[0] == self.numel


@dataclass(frozen=True)
class Layout:
    """The properties of a message that all ranks' payloads share.

    Attributes:
        leaves: the payloads in the message, in order.
        key: ids of the layers inside.
        layer_numels: number of elements of each of these layers; empty if not known.
    """

    leaves: tuple[Leaf, ...]
    key: Key = ()
    layer_numels: tuple[int, ...] = ()

    @classmethod
    def of(cls, payload: Payload, key: Key = ()) -> Self:
        """Return the layout of this payload, which is also that of the other ranks' payloads."""
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
        """Return the layout of one dense tensor of `numel` elements of `itemsize` bytes."""
        return cls((Leaf(numel, wire=(numel, _OF_ITEMSIZE[itemsize])),), key)

    @functools.cached_property
    def numel(self) -> int:
        """Return the number of elements that the payloads represent."""
        return sum(leaf.numel for leaf in self.leaves)

    @functools.cached_property
    def itemsize(self) -> int | None:
        """Return the bytes of an element if all payloads are element-wise and of one dtype, otherwise None."""
        types = {None if leaf.wire is None else leaf.wire[1] for leaf in self.leaves}
        dtype = types.pop() if len(types) == 1 else None
        return None if dtype is None else dtype.itemsize

    def by_type(self) -> list[tuple[int, ...]]:
        """Group the indices of the leaves by dtype; return a single group if some leaf is not element-wise."""
        by_type: dict[torch.dtype, tuple[int, ...]] = {}
        for index, leaf in enumerate(self.leaves):
            if leaf.wire is None:
                return [tuple(range(len(self.leaves)))]
            by_type[leaf.wire[1]] = (*by_type.get(leaf.wire[1], ()), index)
        return list(by_type.values())

    def by_layer(self) -> list[Layout]:
        """Return one layout per layer, or per payload of several layers that cannot be cut between them.

        Return a single layout if payloads and layers do not match, as for the factors of a low-rank compressor.
        """
        numels = list(self.layer_numels or (leaf.numel for leaf in self.leaves))
        ids, parts = list(self.key), []
        for leaf in self.leaves:
            count = next((i for i in range(1, len(numels) + 1) if sum(numels[:i]) == leaf.numel), 0)
            inside, ids, cuts, numels = ids[:count], ids[count:], numels[:count], numels[count:]
            if count and leaf.wire is not None and leaf.alignment == 1:
                for numel, layer_id in zip(cuts, inside, strict=True):
                    wire = (numel, leaf.wire[1]) if leaf.is_full else None
                    layer = leaf if count == 1 else Leaf(numel, addable=leaf.addable, wire=wire)
                    parts.append(Layout((layer,), (layer_id,)))
            else:
                parts.append(Layout((leaf,), tuple(inside)))
        return parts if all(part.key for part in parts) and not ids else [self]

    def chunks(self, num_chunks: int) -> list[Stretch]:
        """Return a balanced partition of the wire tensor if there is one, otherwise of the payloads' elements."""
        if self.itemsize is None:
            return self.cuts(num_chunks)
        numel = sum(leaf.wire[0] for leaf in self.leaves if leaf.wire)
        return list(itertools.pairwise(balanced_borders(numel, num_chunks)))

    def cuts(self, num_parts: int) -> list[Stretch]:
        """Return a balanced partition of the payloads' elements, with borders at which payloads can be cut."""
        blocks = [(leaf.numel, leaf.alignment, leaf.splits_blocks) for leaf in self.leaves]
        return list(itertools.pairwise(borders_of_blocks(blocks, num_parts)))


def leaves(payload: Payload) -> tuple[Payload, ...]:
    """Return the payloads in a bundle, or the payload itself."""
    return tuple(payload.payloads) if isinstance(payload, Bundle) else (payload,)
