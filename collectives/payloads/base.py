"""Payload: what travels. A self-describing value that every rank can turn back into a dense tensor.

A payload stands for a flat fp32 tensor of `numel` elements. The kinds lie beside it, one per file; this
module holds what they share: the interface, the 16-byte header that starts every packed payload, and `unpack`.

Header, little endian: magic u16 | kind u8 | dtype u8 | flags u16 | tensor_id u16 | numel u32 | num_entries u32.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import itertools
import struct
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from typing_extensions import override

from collectives.payloads.fields import FLOAT_DTYPES, VALUE_DTYPES, Field, PayloadError, bytes_of, field_nbytes, lay_out

__all__ = [
    "HEADER",
    "HEADER_BYTES",
    "Blocks",
    "Header",
    "KeepLost",
    "Payload",
    "PayloadError",
    "balanced_borders",
    "borders_of_blocks",
    "unpack",
]

MAGIC = 0x4757  # "WG" on the wire
HEADER = struct.Struct("<HBBHHII")
HEADER_BYTES = HEADER.size
MAX_NUMEL = 2**32 - 1
UNEVEN = 1.1
"""longest part / mean part of a partition, from which on blocks that can be split are split"""


class KeepLost(Protocol):
    """Keeps what rounding took off a sum: for error feedback, which adds it to this rank's next gradient."""

    def __call__(self, start: int, values: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        """Keep exact sum - rounded sum.

        Args:
            start: first element.
            values: fp32, 1-D.
            positions: int64, as many: which element each is of, counted from `start`; None: one after the other.
        """


def shifted(keep_lost: KeepLost | None, offset: int) -> KeepLost | None:
    """Return the same for a part that begins at element `offset`."""
    if keep_lost is None or not offset:
        return keep_lost

    def keep(start: int, values: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        keep_lost(offset + start, values, positions)

    return keep


@dataclasses.dataclass(slots=True)  # frozen ones take three times as long to make
class Header:
    """The common header of a packed payload, field for field."""

    kind: int
    dtype: int
    flags: int
    tensor_id: int
    numel: int
    num_entries: int

    def to_bytes(self) -> bytes:
        """The 16 bytes on the wire."""
        return HEADER.pack(MAGIC, self.kind, self.dtype, self.flags, self.tensor_id, self.numel, self.num_entries)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Read the first 16 bytes of a packed payload.

        Raises:
            PayloadError: too short, or not this project's magic number.
        """
        if len(raw) < HEADER_BYTES:
            raise PayloadError(f"a payload needs {HEADER_BYTES} header bytes, got {len(raw)}")
        magic, *fields = HEADER.unpack_from(raw)
        if magic != MAGIC:
            raise PayloadError(f"the buffer does not start with a payload header (magic {magic:#06x})")
        return cls(*fields)


class Payload(abc.ABC):
    """One tensor in encoded form.

    Class facts:
        code: the kind's number in the header; 0 for kinds that never travel.
        elementwise: adding wire tensors element by element adds the values, so any dense all-reduce may carry it. A
            bundle's follows from its members, so ask the payload, not its class, where one is at hand.
        dtypes: value types that the kind carries.
        addable: `a.add(b)` is exact up to rounding to the value type; it may widen (GroupSparse -> Sparse -> Dense),
            never back.
        splits_blocks: `slice` cuts inside a block of `alignment` elements too; the part may be of a wider kind.

    Attributes:
        numel: elements of the dense tensor it stands for.
        tensor_id: free for the sender, 0..65535; travels in the header.
        keep_lost: set by the sender, does not travel: a collective that rounds sums to 16 bits on their way calls it
            with what that takes off on this rank; None: the sender keeps no such residual.
    """

    code: ClassVar[int]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOAT_DTYPES
    kinds: ClassVar[dict[int, type[Payload]]] = {}
    splits_blocks: ClassVar[bool] = False

    elementwise: bool = False
    addable: bool = False
    numel: int
    tensor_id: int = 0
    keep_lost: KeepLost | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__dict__.get("code"):
            Payload.kinds[cls.code] = cls

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Where its tensors lie."""

    @property
    @abc.abstractmethod
    def num_entries(self) -> int:
        """Elements that are transmitted, kept zeros included; `numel` for dense kinds, or 0 where all are zero."""

    @abc.abstractmethod
    def fields(self) -> list[Field]:
        """What `pack` lays end to end: header and fixed fields as bytes, then tensors, wider fields first."""

    @property
    def nbytes(self) -> int:
        """Length of `pack()`, header included, without packing where it can be known."""
        return sum(map(field_nbytes, self.fields()))

    def pack(self) -> torch.Tensor:
        """uint8 [nbytes] on `device`: header, then fields at their true width, wider fields first."""
        return lay_out(self.fields(), self.device)

    @classmethod
    @abc.abstractmethod
    def from_wire(cls, header: Header, body: torch.Tensor) -> Payload:
        """The inverse of `pack`, everything validated.

        Args:
            header: the first 16 bytes, already read.
            body: uint8 [>= what the header asks for]; what lies behind the payload's end is ignored. Tensors of the
                result may be views of it.

        Raises:
            PayloadError: the buffer cannot have been made by `pack`.
        """

    @abc.abstractmethod
    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        """`dense += self / divisor`, in the dtype of `dense`.

        Args:
            dense: floating [numel], mutated.
            divisor: applied to the values before they are added.
        """

    def add_all_to_(self, others: Sequence[Payload], dense: torch.Tensor, *, divisor: float) -> bool:
        """`dense += (self + others) / divisor` in one pass; False, and nothing done, where the kind has no such way.

        Args:
            others: added behind this one, in their order, in fp32; at least one.
            dense: floating [numel], mutated.
            divisor: of the sum.
        """
        return False

    def write_to(self, parts: Sequence[torch.Tensor], *, divisor: float) -> bool:
        """`parts`, laid end to end, become self / divisor in one pass; False, and nothing done, where that has no way.

        Args:
            parts: floating, 1-D, as many elements together as this payload stands for; overwritten.
            divisor: of the values.
        """
        return self.write_all_to([], parts, divisor=divisor)

    def write_all_to(self, others: Sequence[Payload], parts: Sequence[torch.Tensor], *, divisor: float) -> bool:
        """The same of the sum of this one and others behind it: the bits that adding it to zeros gives."""
        return False

    @abc.abstractmethod
    def subtract_from_(self, dense: torch.Tensor) -> None:
        """`dense -= self`: turns a compensated gradient into the residual. Mutates `dense`, floating [numel]."""

    def clear_in_(self, dense: torch.Tensor) -> None:
        """Zero `dense` [numel] (mutated) wherever this payload transmits an element."""
        if self.num_entries:
            dense.zero_()

    @abc.abstractmethod
    def slice(self, start: int, stop: int) -> Payload:
        """The payload of elements start..stop-1, counted from 0 again.

        Args:
            start: first element, a multiple of `alignment` or `numel` unless the kind `splits_blocks`.
            stop: one past the last element, likewise.

        Raises:
            PayloadError: a border that the kind cannot be cut at.
        """

    @property
    def alignment(self) -> int:
        """Length of the blocks at whose borders `slice` cuts best, or only there (group, row, block of codes)."""
        return 1

    @property
    def blocks(self) -> Blocks:
        """Return what `borders_of_blocks` has to know."""
        return Blocks(self.numel, self.alignment, self.splits_blocks)

    def entries_between(self, borders: list[int]) -> list[int]:
        """Number of transmitted elements in each interval borders[i]..borders[i+1]-1; dense kinds send all or none."""
        return [stop - start if self.num_entries else 0 for start, stop in itertools.pairwise(borders)]

    def to_dense(self) -> torch.Tensor:
        """fp32 [numel], freshly made."""
        dense = torch.zeros(self.numel, dtype=torch.float32, device=self.device)
        self.add_to_(dense)
        return dense

    def borders(self, num_parts: int) -> list[int]:
        """num_parts + 1 borders of a balanced partition at which `slice` may cut; equal on ranks with equal layouts."""
        return borders_of_blocks([self.blocks], num_parts)

    def split(self, num_parts: int) -> list[Payload]:
        """`num_parts` payloads laid end to end, cut at `borders`."""
        return [self.slice(start, stop) for start, stop in itertools.pairwise(self.borders(num_parts))]

    def add(self, other: Payload, keep_lost: KeepLost | None = None) -> Payload:
        """The sum of both as a payload; values are added in fp32 and rounded once to the value type.

        Args:
            other: of the same number of elements.
            keep_lost: called with what rounding to 16 bits takes off; None: nobody keeps that.

        Raises:
            PayloadError: the kind is not addable, or the two do not fit together.
        """
        raise PayloadError(f"{type(self).__name__} payloads cannot be added without decoding them")

    @property
    def wire(self) -> torch.Tensor:
        """The tensor that elementwise kinds put on the wire: 1-D, any dtype; shared, not copied, except for a bundle.

        Raises:
            PayloadError: the kind is not elementwise.
        """
        raise PayloadError(f"{type(self).__name__} has no element-wise wire tensor")

    def with_wire(self, wire: torch.Tensor) -> Payload:
        """This payload with another wire tensor of the same shape and dtype (a partial or complete sum).

        Raises:
            PayloadError: the kind is not elementwise.
        """
        raise PayloadError(f"{type(self).__name__} has no element-wise wire tensor")

    def _header(self, dtype: torch.dtype, *, num_entries: int, flags: int = 0) -> bytes:
        """The common header of this payload.

        Raises:
            PayloadError: more elements than the header can count, or a value type that the kind does not carry.
        """
        if dtype not in self.dtypes:
            raise PayloadError(f"{type(self).__name__} cannot carry {dtype}, only {', '.join(map(str, self.dtypes))}")
        if self.numel > MAX_NUMEL:
            raise PayloadError(
                f"a payload holds at most {MAX_NUMEL} elements, this one has {self.numel}; send smaller buckets"
            )
        return Header(self.code, VALUE_DTYPES.index(dtype), flags, self.tensor_id, self.numel, num_entries).to_bytes()

    @classmethod
    def _dtype_in(cls, header: Header) -> torch.dtype:
        """The value type that a header names.

        Raises:
            PayloadError: there is none of this number, or the kind does not carry it.
        """
        if header.dtype >= len(VALUE_DTYPES) or VALUE_DTYPES[header.dtype] not in cls.dtypes:
            raise PayloadError(f"{cls.__name__} carries no value type of number {header.dtype}")
        return VALUE_DTYPES[header.dtype]

    def _added_onto(self, values: torch.Tensor, keep_lost: KeepLost | None) -> torch.Tensor:
        """A fresh sum of dense values [numel] and this payload, in the wider type of both, rounded once; as `add`.

        Raises:
            PayloadError: the kind is not addable.
        """
        raise PayloadError(f"{type(self).__name__} payloads cannot be added without decoding them")

    def _check_borders(self, start: int, stop: int) -> None:
        """Raise PayloadError where `slice` may not cut."""
        if not 0 <= start <= stop <= self.numel:
            raise PayloadError(f"elements {start}..{stop} do not lie within the {self.numel} of this payload")
        for border in (start, stop):
            if border % self.alignment and border != self.numel and not self.splits_blocks:
                raise PayloadError(
                    f"{type(self).__name__} can be cut at multiples of {self.alignment} elements only, not at {border}"
                )

    def _check_fits(self, other: Payload) -> None:
        """Raise PayloadError where two payloads stand for tensors of different lengths."""
        if other.numel != self.numel:
            raise PayloadError(f"payloads of {self.numel} and {other.numel} elements cannot be added")


def balanced_borders(numel: int, num_parts: int, alignment: int = 1) -> list[int]:
    """num_parts + 1 borders of a partition of 0..numel; whole blocks of `alignment`, the first parts one block longer.

    Example: 10 elements in 3 parts -> [0, 4, 7, 10]; parts may be empty.
    """
    quotient, remainder = divmod(-(-numel // alignment), num_parts)
    blocks_before = [part * quotient + min(part, remainder) for part in range(num_parts + 1)]
    return [min(numel, blocks * alignment) for blocks in blocks_before]


class Blocks(NamedTuple):
    """Elements in blocks of `alignment` each, the last one shorter where that does not divide `numel`.

    Attributes:
        numel: elements.
        alignment: of a block.
        may_split: a border may lie inside a block.
    """

    numel: int
    alignment: int = 1
    may_split: bool = False


def borders_of_blocks(stretches: Sequence[Blocks], num_parts: int) -> list[int]:
    """num_parts + 1 borders of a balanced partition of stretches of blocks laid end to end.

    One stretch: whole blocks are shared out. Several: each border lies at the place nearest to its due one at which the
    stretch there can be cut. Where a part would be more than a tenth longer than the mean, blocks that may be split are
    split.
    """
    borders = _borders_between_blocks(stretches, num_parts)
    longest = max(stop - start for start, stop in itertools.pairwise(borders))
    if longest * num_parts > UNEVEN * borders[-1] and any(each.may_split for each in stretches):
        split = [each._replace(alignment=1) if each.may_split else each for each in stretches]
        return _borders_between_blocks(split, num_parts)
    return borders


def _borders_between_blocks(stretches: Sequence[Blocks], num_parts: int) -> list[int]:
    if len(stretches) == 1:
        return balanced_borders(stretches[0].numel, num_parts, stretches[0].alignment)
    offsets = [0, *itertools.accumulate(each.numel for each in stretches)]

    def nearest_cut(position: int) -> int:
        index = min(bisect.bisect_right(offsets, position), len(stretches)) - 1
        (numel, alignment, _), inside = stretches[index], position - offsets[index]
        below = inside // alignment * alignment
        above = min(below + alignment, numel)
        return offsets[index] + (below if inside - below <= above - inside else above)

    return [nearest_cut(border) for border in balanced_borders(offsets[-1], num_parts)]


def unpack(buffer: torch.Tensor) -> Payload:
    """Decode one packed payload.

    Args:
        buffer: uint8, 1-D, contiguous; may be longer than the payload (a receive buffer posted at its upper bound). The
            payload's tensors may be views of it, so it must not be written again while the payload is in use.

    Raises:
        PayloadError: damaged, truncated or hostile; nothing is ever read out of bounds.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise PayloadError(
            f"a packed payload is a contiguous 1-D uint8 tensor, got {buffer.dtype} of {buffer.dim()} dimensions"
        )
    header = Header.from_bytes(bytes_of(buffer, slice(HEADER_BYTES)))
    kind = Payload.kinds.get(header.kind)
    if kind is None:
        raise PayloadError(f"no payload kind has the number {header.kind}")
    if header.num_entries > header.numel:
        raise PayloadError(f"{header.num_entries} entries are more than the {header.numel} elements of the tensor")
    payload = kind.from_wire(header, buffer[HEADER_BYTES:])
    payload.tensor_id = header.tensor_id
    return payload


class TypedValues(Payload):
    """Values of one type.

    Attributes:
        values: what is transmitted; the wire tensor of element-wise kinds.
    """

    values: torch.Tensor

    @property
    @override
    def device(self) -> torch.device:
        return self.values.device

    @property
    @override
    def num_entries(self) -> int:
        return self.values.numel()

    @property
    @override
    def wire(self) -> torch.Tensor:
        return self.values if self.elementwise else super().wire
