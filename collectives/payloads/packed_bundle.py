"""`PackedBundle`: a bundle of payloads of one kind that were encoded in one native call.

The bundle holds the arrays that the call filled, and packs them into the same bytes as a bundle of separate members.
The members are made only if something other than the message is needed.
"""

from __future__ import annotations

import abc
import ctypes
import functools
import itertools
import struct
from collections.abc import Callable, Sequence

import numpy as np
import torch
from typing_extensions import override

from collectives.kernels.loop import ByteArray, Int, LongArray, Loop, array
from collectives.payloads.base import HEADER_BYTES, KeepLost, Payload, Share, shifted
from collectives.payloads.bundle import Bundle, padded
from collectives.payloads.codec.bits import packed_nbytes
from collectives.payloads.codec.index_sets import cheapest_coding, elias_fano_bits
from collectives.payloads.codes import CodedElements, Codes, TwoMeans
from collectives.payloads.fields import field_nbytes
from collectives.payloads.sparse import Sparse

_VALUES = array(torch.float32, torch.float16, torch.bfloat16)
_PACK = Loop("pack_members", ctypes.c_char_p, Int, LongArray, _VALUES, Int, ByteArray, returns=Int)


class PackedBundle(Bundle):
    """Base of the bundles whose members are all encoded in one native call; all tensors lie on the CPU.

    Attributes:
        kind: class of the members.
        counts: number of entries of each member.
    """

    kind: type[Payload]

    def __init__(self, numels: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        self._numels, self.counts, self.device = [*numels], counts, device
        self._offsets = [0, *itertools.accumulate(numels)]
        self.numel, self.num_entries = self._offsets[-1], sum(counts)
        self.addable, self.elementwise = self.kind.addable, False

    @abc.abstractmethod
    def _members(self) -> list[Payload]:
        """Return the members as new payloads, which share the memory of this bundle."""

    @functools.cached_property
    def payloads(self) -> list[Payload]:  # type: ignore[override]  # made on first use
        """Return the members in order."""
        members = self._members()
        for member, offset in zip(members, self._offsets, strict=False):
            member.keep_lost = shifted(self.keep_lost, offset)
        return members

    @override
    def keep_lost_with(self, keep_lost: KeepLost) -> None:
        self.keep_lost = keep_lost  # `payloads` passes it to the members when it makes them

    @override
    def shares(self, numels: Sequence[int]) -> list[Share]:
        kind = self.kind.__name__
        return [Share(kind, *each) for each in zip(self.counts, self.lengths, strict=True)]

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Return the packed length of each member in bytes."""
        return [member.nbytes for member in self.payloads]

    @functools.cached_property
    @override
    def nbytes(self) -> int:
        return self.packed_nbytes(self.lengths)


@functools.lru_cache(maxsize=4096)
def _sparse_layout(numel: int, count: int, dtype: torch.dtype) -> tuple[int, bytes]:
    """Return the length of a `Sparse` member in bytes, and its layout as a `struct member` of members.c.

    Both depend only on the number of elements and the number and dtype of the entries, so they are taken from an
    example with other entries.
    """
    example = Sparse(numel, torch.arange(count), torch.ones(count, dtype=dtype))
    header, *fields = example.fields()
    assert isinstance(header, bytes)
    starts = itertools.accumulate(map(field_nbytes, fields), initial=HEADER_BYTES)
    start_of = {id(field): start for field, start in zip(fields, starts, strict=False)}
    values = start_of.pop(id(example.values), HEADER_BYTES)
    of_indices = [*start_of.values()]
    low = marks = low_bits = num_marks = per_position = 0
    if count and not example.is_wide:
        low, marks = of_indices[0], of_indices[-1]
        match cheapest_coding(count, numel):
            case "coo":
                low_bits = 8 * (example.nbytes - HEADER_BYTES - field_nbytes(example.values)) // count
            case "bitmap":
                num_marks = numel
            case "elias_fano":
                low_bits, num_marks = elias_fano_bits(count, numel)
                per_position = 1
    row = (count, values, low, marks, padded(example.nbytes), low_bits, num_marks, per_position, example.is_wide)
    return example.nbytes, header + struct.pack(f"{len(row)}q", *row)


class SparseBundle(PackedBundle):
    """A bundle of `Sparse` payloads.

    Args:
        numels: number of elements of each member.
        counts: number of entries of each member.
        positions: position of each entry in its member, int64 [all entries], ascending within each member.
        values: fp32, fp16 or bf16 [all entries]; none is zero.
    """

    kind = Sparse

    def __init__(
        self, numels: Sequence[int], counts: Sequence[int], positions: torch.Tensor, values: torch.Tensor
    ) -> None:
        super().__init__(numels, counts, values.device)
        self.positions, self.values = positions, values
        layouts = [_sparse_layout(*each, values.dtype) for each in zip(numels, counts, strict=True)]
        self.lengths = [length for length, _ in layouts]
        self._layout = b"".join(layout for _, layout in layouts)

    @override
    def _members(self) -> list[Payload]:
        parts = (tensor.split([*self.counts]) for tensor in (self.positions, self.values))
        return [Sparse(*each) for each in zip(self._numels, *parts, strict=True)]

    @override
    def pack(self) -> torch.Tensor:
        prefix, message = self._prefix(self.lengths), torch.empty(self.nbytes, dtype=torch.uint8)
        message.numpy().data[: len(prefix)] = prefix
        width, rest = self.values.element_size(), message[len(prefix) :]
        if not _PACK(self._layout, len(self.counts), self.positions, self.values, width, rest):
            raise IndexError("a position lies outside the elements of its payload")
        return message

    @override
    def clear_in_(self, dense: torch.Tensor) -> None:
        starts = torch.from_numpy(np.repeat(self._offsets[:-1], self.counts))  # takes a tenth of the time of torch
        dense.index_fill_(0, self.positions + starts, 0)

    clear_selected_in_ = clear_in_  # the same, because no entry is zero


MakeCoded = Callable[[int, torch.Tensor, torch.Tensor], CodedElements]
"""(number of elements, packed codes, scalars that precede them in a message, fp32) -> payload"""


def sign(numel: int, packed: torch.Tensor, scalars: torch.Tensor) -> Codes:
    """Return a payload of sign bits with one scale."""
    return Codes(numel, "sign", 1, packed, scalars)


def ternary(numel: int, packed: torch.Tensor, scalars: torch.Tensor) -> Codes:
    """Return a payload of ternary codes with one scale."""
    return Codes(numel, "ternary", 2, packed, scalars)


def two_means(numel: int, packed: torch.Tensor, scalars: torch.Tensor) -> TwoMeans:
    """Return a payload of bits with the two means that they stand for; the lower mean is the first scalar."""
    low, high = scalars.tolist()
    return TwoMeans(numel, low, high, packed)


@functools.lru_cache(maxsize=4096)
def _coded_header(make: MakeCoded, numel: int, bits: int, num_scalars: int) -> tuple[bytes, int]:
    """Return a member's bytes in front of its scalars, and its length in bytes if not all elements are zero."""
    packed = torch.zeros(packed_nbytes(numel, bits), dtype=torch.uint8)
    example = make(numel, packed, torch.ones(num_scalars, dtype=torch.float32))
    message = example.pack().numpy().tobytes()
    return message[: len(message) - len(packed) - 4 * num_scalars], len(message)


class CodedBundle(PackedBundle):
    """A bundle of payloads with a code of a few bits for every element.

    Args:
        make: makes a member: `sign`, `ternary` or `two_means`.
        bits: bits per code.
        numels: number of elements of each member.
        packed: the members' codes one after another, uint8; the codes of each member begin with a new byte.
        scalars: scalars of each member, fp32 [members, scalars].
    """

    def __init__(
        self, make: MakeCoded, bits: int, numels: Sequence[int], packed: torch.Tensor, scalars: torch.Tensor
    ) -> None:
        self.kind = TwoMeans if make is two_means else Codes
        self.packed, self.scalars = packed, scalars
        self._make, self._bits = make, bits
        sent = scalars.any(1).tolist()
        super().__init__(numels, [numel * each for numel, each in zip(numels, sent, strict=True)], packed.device)
        if all(sent):
            self._headers = [_coded_header(make, numel, bits, scalars.shape[1]) for numel in numels]
            self.lengths = [length for _, length in self._headers]

    @override
    def _members(self) -> list[Payload]:
        packed = self.packed.split([packed_nbytes(numel, self._bits) for numel in self._numels])
        return [self._make(*each) for each in zip(self._numels, packed, self.scalars, strict=True)]

    @override
    def pack(self) -> torch.Tensor:
        if 0 in self.counts:  # a member of only zeros is shorter than the others
            return super().pack()
        codes, scalars = self.packed.numpy().data, self.scalars.numpy().tobytes()
        width, first = len(scalars) // len(self._numels), 0
        pieces: list[bytes | memoryview] = [self._prefix(self.lengths)]
        for index, (numel, (header, length)) in enumerate(zip(self._numels, self._headers, strict=True)):
            last = first + packed_nbytes(numel, self._bits)
            pieces += [header, scalars[index * width : (index + 1) * width], codes[first:last]]
            pieces.append(bytes(padded(length) - length))
            first = last
        return torch.frombuffer(bytearray().join(pieces), dtype=torch.uint8)
