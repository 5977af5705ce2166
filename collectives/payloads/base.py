"""The interface of payloads: encoded tensors that a rank sends and that every rank can decode without other data.

A payload stands for a flat fp32 tensor of `numel` elements. This module has the base class of all kinds of payloads,
the kind `Dense`, and `unpack`, which decodes a message of any kind.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import struct
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from typing_extensions import override

from collectives.payloads.codec.values import add_divided_, add_values, write_divided
from collectives.payloads.fields import (
    FLOAT_DTYPES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_NUMEL,
    VALUE_DTYPES,
    Field,
    PayloadError,
    Reader,
    field_nbytes,
    lay_out,
    with_room,
)

__all__ = [
    "HEADER_BYTES",
    "Dense",
    "KeepLost",
    "Payload",
    "PayloadError",
    "Received",
    "Share",
    "balanced_borders",
    "unpack",
]


class KeepLost(Protocol):
    """A callback for the rounding errors of a sum; error feedback adds these errors to this rank's next gradient."""

    def __call__(self, start: int, values: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        """Keep the rounding errors of some elements of a sum: the exact sum minus the rounded sum.

        Args:
            start: element of the tensor at which `values` begin, or from which `positions` are counted.
            values: the errors, fp32 [n].
            positions: the element of each error, counted from `start`, int64 [n]; None for consecutive elements.
        """


def shifted(keep_lost: KeepLost | None, offset: int) -> KeepLost | None:
    """Return a callback for rounding errors in the part of a tensor that begins at element `offset`.

    The callback calls `keep_lost`, which is for the whole tensor. If `keep_lost` is None, the result is None.
    """
    if keep_lost is None or not offset:
        return keep_lost
    return lambda start, values, positions=None: keep_lost(offset + start, values, positions)


class Share(NamedTuple):
    """The class name, entries and bytes that a payload sends for a part of its elements, such as a layer."""

    kind: str
    num_entries: int
    nbytes: float


class Received(NamedTuple):
    """A packed payload whose header, and the numbers after the header, have been read and checked.

    Attributes:
        numel: number of elements of the dense tensor.
        num_entries: number of elements that are sent, at most `numel`.
        dtype: dtype of the values, one of the kind's `dtypes`.
        form: number of the format in which the fields are written, 0..num_forms - 1 of the kind.
        numbers: the kind's `fixed` numbers, which follow the header.
        body: reads the fields that follow these numbers.
    """

    numel: int
    num_entries: int
    dtype: torch.dtype
    form: int
    numbers: tuple[Any, ...]
    body: Reader


class Payload(abc.ABC):
    """A tensor in encoded form, which can be sent. Each subclass is a kind of payload.

    A kind must define `from_wire`, `add_to_` and `_cut`; also `fields` if it sends more than `values`, and `_add` if it
    is addable. All other methods have a default.

    Class attributes:
        code: the kind's number in the header; 0 for kinds that are never sent.
        fixed: format of the numbers that follow the header in a message.
        num_forms: number of formats in which the fields can be written; the header's flags say which one is used.
        dtypes: dtypes of values that the kind supports.
        elementwise: True if the sum of the sent tensors (`wire`), element by element, is the `wire` of the payloads'
            sum, so that any dense all-reduce can sum the payloads. For a bundle this depends on its members, so read
            the attribute from the payload, not from its class.
        addable: True if payloads can be added (`a.add(b)`), exactly up to rounding to the values' dtype. The sum may be
            of a more general kind (GroupSparse -> Sparse -> Dense), never of a more special kind.
        splits_blocks: True if `slice` may also cut inside a block of `alignment` elements; the result may then be of a
            more general kind.

    Attributes:
        numel: number of elements of the dense tensor that the payload stands for.
        values: the values that are sent, in their dtype; for element-wise kinds, the tensor `wire`.
        tensor_id: a number that the sender may choose, 0..65535; sent in the header.
        keep_lost: the sender's callback, which is not sent. A collective that rounds partial sums to 16 bits calls it
            with the rounding error on this rank. None if the sender keeps no residual.
        numbers: the numbers that follow the header (format `fixed`), for kinds whose only tensor is `values`.
    """

    code: ClassVar[int]
    fixed: ClassVar[struct.Struct] = struct.Struct("")
    num_forms: ClassVar[int] = 1
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOAT_DTYPES
    kinds: ClassVar[dict[int, type[Payload]]] = {}

    elementwise: bool = False
    addable: bool = False
    splits_blocks: bool = False
    numel: int
    values: torch.Tensor
    tensor_id: int = 0
    keep_lost: KeepLost | None = None
    numbers: tuple[float, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__dict__.get("code"):
            Payload.kinds[cls.code] = cls

    @functools.cached_property
    def device(self) -> torch.device:
        """Return the device of the payload's tensors."""
        return self.values.device

    @functools.cached_property
    def num_entries(self) -> int:
        """Return the number of elements that are sent, including zeros among them.

        Kinds of payloads that send every element return `numel`, or 0 if all elements are zero.
        """
        return self.values.numel()

    def keep_lost_with(self, keep_lost: KeepLost) -> None:
        """Set `keep_lost` of this payload and, if it is a bundle, of its members."""
        self.keep_lost = keep_lost

    def fields(self) -> list[Field]:
        """Return the fields that `pack` concatenates: the header, then tensors, wider dtypes first.

        By default, `values` is the only tensor.
        """
        return [self._header(self.values.dtype, *self.numbers), self.values]

    @classmethod
    @abc.abstractmethod
    def from_wire(cls, wire: Received) -> Payload:
        """Return the payload of this kind that a message holds; the payload's tensors may be views of the message.

        Raises:
            PayloadError: the message cannot be the result of `pack`.
        """

    @functools.cached_property
    def nbytes(self) -> int:
        """Return the length of `pack()` in bytes, with the header; computed without packing if possible."""
        return sum(map(field_nbytes, self.fields()))

    @classmethod
    def room(cls, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor, `dtype` [count], for the only tensor that a payload of this kind sends.

        The tensor has free memory in front of it, where `pack` writes the header instead of copying the tensor.
        """
        return with_room(HEADER_BYTES + cls.fixed.size, count, dtype, device)

    def pack(self) -> torch.Tensor:
        """Return the packed payload, uint8 [nbytes] on `device`: the header, then the fields without padding."""
        return lay_out(self.fields(), self.device)

    @abc.abstractmethod
    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        """Add this payload's tensor, divided by `divisor`, to `dense`, floating [numel] (mutated), in its dtype."""

    def subtract_from_(self, dense: torch.Tensor) -> None:
        """Subtract this payload's tensor from `dense`, floating [numel] (mutated); for example, to get a residual."""
        self.add_to_(dense, divisor=-1.0)

    def add_all_to_(self, others: Sequence[Payload], dense: torch.Tensor, *, divisor: float) -> bool:
        """Add (self + others) / divisor to `dense` in one pass.

        Args:
            others: payloads of the same length; they are added after this payload, in this order, in fp32.
            dense: floating [numel], mutated.
            divisor: the sum is divided by this number.

        Returns:
            True; False, with `dense` unchanged, if this kind cannot add several payloads in one pass.
        """
        return False

    def write_to(self, parts: Sequence[torch.Tensor], *, divisor: float, others: Sequence[Payload] = ()) -> bool:
        """Write (self + others) / divisor into `parts` in one pass; the result equals a sum that starts with zeros.

        Args:
            parts: tensors with `numel` elements in total, floating and 1-D; overwritten.
            divisor: the sum is divided by this number.
            others: payloads of the same length; they are added after this payload, in this order, in fp32.

        Returns:
            True; False, with `parts` unchanged, if this kind cannot write the sum in one pass.
        """
        return False

    def clear_in_(self, dense: torch.Tensor) -> None:
        """Set to zero all elements of `dense` [numel] (mutated) that this payload sends."""
        if self.num_entries:
            dense.zero_()

    def clear_selected_in_(self, dense: torch.Tensor) -> None:  # noqa: B027 - by default nothing
        """Set to zero the elements of `dense` [numel] (mutated) that the sender selected and sends as non-zero values.

        Kinds of payloads that send every element do not select elements, so they change nothing.
        """

    def shares(self, numels: Sequence[int]) -> list[Share]:
        """Return entries, and bytes in proportion, of consecutive parts with these numbers of elements."""
        counts = self._entries_in(numels) if len(numels) > 1 else [self.num_entries]
        total, kind = sum(counts), type(self).__name__
        return [
            Share(kind, count, self.nbytes * (count / total if total else numel / self.numel))
            for count, numel in zip(counts, numels, strict=True)
        ]

    def _entries_in(self, numels: Sequence[int]) -> list[int]:
        # the number of entries in each of several consecutive parts
        return [numel if self.num_entries else 0 for numel in numels]

    def to_dense(self) -> torch.Tensor:
        """Return the decoded tensor as a new tensor, fp32 [numel]."""
        dense = torch.zeros(self.numel, dtype=torch.float32, device=self.device)
        self.add_to_(dense)
        return dense

    def slice(self, start: int, stop: int) -> Payload:
        """Return a payload of the elements start..stop-1 only; these are numbered from 0 in the result.

        Both borders must be multiples of `alignment`, or `numel`, unless `splits_blocks` is True.

        Raises:
            PayloadError: the kind cannot be cut at `start` or `stop`.
        """
        if not 0 <= start <= stop <= self.numel:
            raise PayloadError(f"elements {start}..{stop} do not lie within the {self.numel} elements of this payload")
        for border in (start, stop):
            if border % self.alignment and border != self.numel and not self.splits_blocks:
                raise PayloadError(
                    f"{type(self).__name__} can be cut at multiples of {self.alignment} elements only, not at {border}"
                )
        return self._cut(start, stop)

    @abc.abstractmethod
    def _cut(self, start: int, stop: int) -> Payload:
        """Return the result of `slice`, given borders at which this kind can be cut."""

    @functools.cached_property
    def alignment(self) -> int:
        """Return the number of elements in a block, such as a group, a matrix row or the codes of one byte.

        `slice` should cut between blocks; it can cut inside a block only if `splits_blocks` is True.
        """
        return 1

    def add(self, other: Payload, keep_lost: KeepLost | None = None) -> Payload:
        """Return the sum of this payload and another; values are added in fp32 and rounded once to the sum's dtype.

        Args:
            other: a payload with the same number of elements.
            keep_lost: called with the rounding errors of 16-bit sums; None if the errors are not needed.

        Raises:
            PayloadError: the kind is not addable, or the two payloads differ in length, kind or parameters.
        """
        if other.numel != self.numel:
            raise PayloadError(f"payloads of {self.numel} and {other.numel} elements cannot be added")
        return self._add(other, keep_lost)

    def _add(self, other: Payload, keep_lost: KeepLost | None) -> Payload:
        """Return the result of `add`, given a payload with the same number of elements."""
        raise PayloadError(f"{type(self).__name__} payloads cannot be added without decoding them")

    @property
    def wire(self) -> torch.Tensor:
        """Return the tensor that an element-wise payload sends: 1-D, any dtype.

        The tensor shares memory with the payload, except for a bundle, which copies its members.

        Raises:
            PayloadError: the kind is not elementwise.
        """
        if not self.elementwise:
            raise PayloadError(f"{type(self).__name__} has no element-wise wire tensor")
        return self.values

    def with_wire(self, wire: torch.Tensor) -> Payload:
        """Return a payload like this one that sends another tensor, such as the sum of the tensor over ranks.

        Args:
            wire: of the same shape and dtype as this payload's `wire`.

        Raises:
            PayloadError: the kind is not elementwise.
        """
        raise PayloadError(f"{type(self).__name__} has no element-wise wire tensor")

    def _header(self, dtype: torch.dtype, *numbers: float, form: int = 0) -> bytes:
        """Return the header of a message (16 bytes), followed by the kind's `fixed` numbers.

        Raises:
            PayloadError: there are more elements than the header can count, or the kind does not support the dtype.
        """
        if dtype not in self.dtypes:
            raise PayloadError(f"{type(self).__name__} cannot carry {dtype}, only {', '.join(map(str, self.dtypes))}")
        if self.numel > MAX_NUMEL:
            raise PayloadError(
                f"a payload holds at most {MAX_NUMEL} elements, this one has {self.numel}; send smaller buckets"
            )
        number = VALUE_DTYPES.index(dtype)
        header = HEADER.pack(MAGIC, self.code, number, form, self.tensor_id, self.numel, self.num_entries)
        return header + self.fixed.pack(*numbers)


@dataclasses.dataclass(eq=False)
class Dense(Payload):
    """A payload that sends every element of a tensor.

    Sums of integer values are exact (for example, sums of levels on a shared scale). Integers wrap on overflow, so
    choose a type that can hold the sum.

    Attributes:
        values: 1-D, floating or integer; shared with the caller.

    Raises:
        PayloadError: `values` is not 1-D.
    """

    code = 1
    dtypes = VALUE_DTYPES
    elementwise = True
    addable = True

    values: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dim() != 1:
            raise PayloadError(
                f"a payload holds 1-D values, got {self.values.dim()} dimensions; flatten the tensor first"
            )
        self.numel = self.values.numel()

    @override
    @classmethod
    def from_wire(cls, wire: Received) -> Self:
        if wire.num_entries != wire.numel:
            raise PayloadError("a dense payload must have as many entries as elements")
        return cls(wire.body.tensor(wire.numel, wire.dtype))

    @override
    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        add_divided_(dense, self.values, divisor)

    @override
    def write_to(self, parts: Sequence[torch.Tensor], *, divisor: float, others: Sequence[Payload] = ()) -> bool:
        if others or not self.values.is_floating_point() or any(part.dtype != torch.float32 for part in parts):
            return False
        for part, values in zip(parts, self.values.split([part.numel() for part in parts]), strict=True):
            write_divided(values, divisor, part)
        return True

    @override
    def _cut(self, start: int, stop: int) -> Payload:
        return Dense(self.values[start:stop])

    @override
    def _add(self, other: Payload, keep_lost: KeepLost | None) -> Payload:
        if isinstance(other, Dense):
            return Dense(add_values(self.values, other.values, keep_lost))
        return other._add(self, keep_lost)  # every other kind defines how to add it to a dense payload

    @override
    def with_wire(self, wire: torch.Tensor) -> Payload:
        return Dense(wire)


def balanced_borders(numel: int, num_parts: int, alignment: int = 1) -> list[int]:
    """Return num_parts + 1 borders that divide `numel` elements into parts of nearly equal length.

    Parts consist of whole blocks of `alignment` elements; longer parts are first: 10 elements in 3 -> [0, 4, 7, 10].
    """
    quotient, remainder = divmod(-(-numel // alignment), num_parts)
    blocks_before = [part * quotient + min(part, remainder) for part in range(num_parts + 1)]
    return [min(numel, blocks * alignment) for blocks in blocks_before]


def unpack(buffer: torch.Tensor) -> Payload:
    """Return the payload that a buffer holds in packed form.

    Args:
        buffer: uint8, 1-D, contiguous; may be longer than the payload, like a receive buffer of the longest possible
            size. The payload's tensors may be views of the buffer, so do not write to it while the payload is in use.

    Raises:
        PayloadError: the buffer is damaged, truncated or malicious; nothing is ever read out of bounds.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise PayloadError(
            f"a packed payload is a contiguous 1-D uint8 tensor, got {buffer.dtype} of {buffer.dim()} dimensions"
        )
    if buffer.numel() < HEADER_BYTES:
        raise PayloadError(f"a payload needs {HEADER_BYTES} header bytes, got {buffer.numel()}")
    body = Reader(buffer)
    magic, code, number, form, tensor_id, numel, num_entries = body.numbers(HEADER)
    if magic != MAGIC:
        raise PayloadError(f"the buffer does not start with a payload header (magic {magic:#06x})")
    kind = Payload.kinds.get(code)
    if kind is None:
        raise PayloadError(f"no payload kind has the number {code}")
    if number >= len(VALUE_DTYPES) or VALUE_DTYPES[number] not in kind.dtypes or form >= kind.num_forms:
        raise PayloadError(f"{kind.__name__} has no value type of number {number}, or no form of number {form}")
    if num_entries > numel:
        raise PayloadError(f"{num_entries} entries are more than the {numel} elements of the tensor")
    payload = kind.from_wire(Received(numel, num_entries, VALUE_DTYPES[number], form, body.numbers(kind.fixed), body))
    payload.tensor_id = tensor_id
    return payload
