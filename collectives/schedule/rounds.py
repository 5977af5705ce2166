"""Rounds: descriptions of the messages that one rank sends and receives at the same time.

Each rank executes a list of rounds in a sum. The list follows from the layout, which is the sizes and dtypes of the
payloads, the same on all ranks. The lists of all ranks match: every message that one rank sends is received by its
target, in the same order.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

import torch

from collectives.payloads.base import Payload, balanced_borders
from collectives.payloads.bundle import Bundle

Key = tuple[int, ...]  # ids of the layers in a message, in the order of their elements
Stretch = tuple[int, int]  # (first element, one past the last)


class LayerStretch(NamedTuple):
    """A range of a layer's elements.

    Attributes:
        layer: id of the layer.
        start, stop: first element and one past the last, counted within the layer.
    """

    layer: int
    start: int
    stop: int


UNEVEN = 1.1  # if the longest part is this many times as long as the mean part, blocks are split where that is allowed

_OF_ITEMSIZE = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}


class Leaf(NamedTuple):
    """The size and dtype of one payload in a message; the payloads in a bundle are separate leaves.

    Attributes:
        numel: number of elements that the payload represents.
        alignment: number of elements per block; the payload is cut between blocks.
        addable: True if payloads of this kind can be added without decoding them.
        wire: (number of elements, dtype) of the tensor that is sent; None if the payload is not element-wise.
        splits_blocks: True if the payload can also be cut inside a block.
    """

    numel: int
    alignment: int = 1
    addable: bool = True
    wire: tuple[int, torch.dtype] | None = None
    splits_blocks: bool = False

    @property
    def is_full(self) -> bool:
        """Return True if the sent tensor has all elements; then any part of the payload has the payload's class."""
        return self.wire is not None and self.wire[0] == self.numel


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes and dtypes of the payloads in a message, which are the same on all ranks of a sum.

    Attributes:
        leaves: size, dtype and other properties of each payload in the message, in order.
        key: ids of the layers in the message.
        layer_numels: number of elements of each of these layers; empty if unknown.
    """

    leaves: tuple[Leaf, ...]
    key: Key = ()
    layer_numels: tuple[int, ...] = ()

    @classmethod
    def of(cls, payload: Payload, key: Key = ()) -> Self:
        """Return the sizes and dtypes in this payload as a `Layout`, which is the same on all ranks of a sum."""
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
        """Return the number of elements that all payloads together represent."""
        return sum(leaf.numel for leaf in self.leaves)

    @functools.cached_property
    def itemsize(self) -> int | None:
        """Return the bytes of one element if all payloads are element-wise with the same dtype; otherwise None."""
        types = {None if leaf.wire is None else leaf.wire[1] for leaf in self.leaves}
        dtype = types.pop() if len(types) == 1 else None
        return None if dtype is None else dtype.itemsize

    def by_type(self) -> list[tuple[int, ...]]:
        """Return the indices of the payloads (`leaves`) by dtype; a single group if any payload is not element-wise."""
        by_type: dict[torch.dtype, tuple[int, ...]] = {}
        for index, leaf in enumerate(self.leaves):
            if leaf.wire is None:
                return [tuple(range(len(self.leaves)))]
            by_type[leaf.wire[1]] = (*by_type.get(leaf.wire[1], ()), index)
        return list(by_type.values())

    def by_layer(self) -> list[Layout]:
        """Return one layout per layer.

        If a payload of several layers cannot be cut between these layers, they share one layout. If payloads and layers
        do not match, as for the factors of a low-rank compressor, the list holds only this layout itself.
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
        """Return (first element, one past the last) of each chunk of a balanced partition of the message.

        If `itemsize` is None, chunks divide the elements that the payloads represent; otherwise the wire tensor.
        """
        if self.itemsize is None:
            return self.cuts(num_chunks)
        numel = sum(leaf.wire[0] for leaf in self.leaves if leaf.wire)
        return list(itertools.pairwise(balanced_borders(numel, num_chunks)))

    def cuts(self, num_parts: int) -> list[Stretch]:
        """Return (first element, one past the last) of each part of a balanced partition of the payloads' elements.

        The borders of the parts are elements at which the payloads can be cut: between blocks, unless a part would be
        more than 10 % longer than the mean part. Then payloads that can be cut inside their blocks are cut there.
        """
        borders = _borders_between_blocks([(leaf.numel, leaf.alignment) for leaf in self.leaves], num_parts)
        longest = max(stop - start for start, stop in itertools.pairwise(borders))
        if longest * num_parts > UNEVEN * borders[-1] and any(leaf.splits_blocks for leaf in self.leaves):
            finest = [(leaf.numel, 1 if leaf.splits_blocks else leaf.alignment) for leaf in self.leaves]
            borders = _borders_between_blocks(finest, num_parts)
        return list(itertools.pairwise(borders))

    def nearest_cuts(self, positions: Sequence[int]) -> list[int]:
        """Return, for each position, the nearest element at which the message can be cut between blocks.

        Positions are indices as in `chunks`: if they are indices of a wire tensor, it can be cut at any element.
        """
        if self.itemsize is not None:
            return [*positions]
        return _nearest_cuts([(leaf.numel, leaf.alignment) for leaf in self.leaves], positions)


def stretches_between(key: Key, borders: Sequence[int], start: int, stop: int) -> list[LayerStretch]:
    """Return the parts of layers that lie in a range of a message's elements, without empty parts.

    Args:
        key: ids of the layers in the message.
        borders: first element of each of these layers, and the number of elements of the message.
        start: first element of the range.
        stop: one past the last element of the range.
    """
    touched = range(bisect.bisect_right(borders, start) - 1, bisect.bisect_left(borders, stop))
    cut = (LayerStretch(key[i], max(start - borders[i], 0), min(stop, borders[i + 1]) - borders[i]) for i in touched)
    return [stretch for stretch in cut if stretch.start < stretch.stop]


def leaves(payload: Payload) -> tuple[Payload, ...]:
    """Return the payloads in a bundle; for another payload, return only that payload."""
    return tuple(payload.payloads) if isinstance(payload, Bundle) else (payload,)


def _borders_between_blocks(stretches: Sequence[tuple[int, int]], num_parts: int) -> list[int]:
    """Return num_parts + 1 borders that divide consecutive ranges of blocks into parts of nearly equal length.

    A single range is divided into whole blocks; its last block may be shorter. If there are several ranges, each border
    is the cut between blocks that is nearest to an even partition.

    Args:
        stretches: (number of elements, elements per block) of each range.
        num_parts: number of parts.
    """
    if len(stretches) == 1:
        ((numel, alignment),) = stretches
        return balanced_borders(numel, num_parts, alignment)
    return _nearest_cuts(stretches, balanced_borders(sum(numel for numel, _ in stretches), num_parts))


def _nearest_cuts(stretches: Sequence[tuple[int, int]], positions: Sequence[int]) -> list[int]:
    """Return, for each position, the nearest cut between blocks; `stretches` is as in `_borders_between_blocks`."""
    offsets = [0, *itertools.accumulate(numel for numel, _ in stretches)]

    def nearest_cut(position: int) -> int:
        index = min(bisect.bisect_right(offsets, position), len(stretches)) - 1
        (numel, alignment), inside = stretches[index], position - offsets[index]
        below = inside // alignment * alignment
        above = min(below + alignment, numel)
        return offsets[index] + (below if inside - below <= above - inside else above)

    return [nearest_cut(position) for position in positions]


# How a receiver applies a message: replaces its own elements, adds in this order, or keeps the message as a term.
ReceiveEffect = Literal["replace", "own + received", "received + own", "collect"]
Place = tuple[int, int, int]  # (start, stop, number) of a piece


class Piece(NamedTuple):
    """A range of elements in a message. In a message of packed payloads, each piece is a separate payload.

    Attributes:
        start, stop: first element and one past the last.
        terms: the ranks whose contributions the elements contain.
        number: distinguishes empty pieces with the same `start`.
    """

    start: int
    stop: int
    terms: frozenset[int]
    number: int = 0

    @property
    def numel(self) -> int:
        """Return the number of elements of the piece."""
        return self.stop - self.start

    @property
    def place(self) -> Place:
        """Return (start, stop, number), which identify the piece even after contributions of other ranks are added."""
        return self.start, self.stop, self.number


class PieceMessage(NamedTuple):
    """A message from or to another rank.

    Attributes:
        peer: the other rank.
        pieces: the ranges of elements in the message, in order.
        effect: how the receiver applies the message.
    """

    peer: int
    pieces: tuple[Piece, ...]
    effect: ReceiveEffect = "replace"

    @property
    def stretch(self) -> slice:
        """Return the message's elements as a slice of a wire tensor; the message's pieces must be contiguous there."""
        return slice(self.pieces[0].start, self.pieces[-1].stop)

    @property
    def numel(self) -> int:
        """Return the number of elements of all pieces together."""
        return sum(piece.numel for piece in self.pieces)


@dataclasses.dataclass
class Round:
    """The messages that one rank sends and receives at the same time.

    Attributes:
        itemsize: bytes per element if messages are parts of a wire tensor (an element-wise payload's tensor); None if
            messages are packed payloads.
        sends: messages to send, with the values that the previous rounds produced.
        receives: messages to receive, applied in this order.
    """

    itemsize: int | None = None
    sends: list[PieceMessage] = dataclasses.field(default_factory=list)
    receives: list[PieceMessage] = dataclasses.field(default_factory=list)

    def send(self, peer: int, *pieces: Piece) -> None:
        """Add a message to send; an empty part of a wire tensor is not sent."""
        if (message := PieceMessage(peer, pieces)).numel or self.itemsize is None:
            self.sends.append(message)

    def receive(self, peer: int, *pieces: Piece, effect: ReceiveEffect = "replace") -> None:
        """Add a message to receive, unless it is an empty part of a wire tensor, which is not sent.

        A message that replaces elements of a wire tensor may be received in place, and its buffer may be posted early.
        This is safe, because the message is computed from what this rank sent from these elements, so it cannot arrive
        before that send is complete.
        """
        if (message := PieceMessage(peer, pieces, effect)).numel or self.itemsize is None:
            self.receives.append(message)
