"""Codes and TwoMeans: payloads with a few bits per element.

Body of Codes: block_numel u32 (0: one scale for all) | bits u8 | codebook u8 | 2 zero bytes | scales | packed codes.
If all scales are zero, only the header and the fixed fields are sent. Body of TwoMeans: low f32 | high f32 | one bit
per element. If both values are zero, the bits are not sent.

Bytes: 24 + scales * (4 or 2) + ceil(m bits / 8).
"""

import abc
import dataclasses
import math
import struct
from collections.abc import Hashable, Sequence
from typing import Self

import torch
from typing_extensions import override

from collectives.payloads.base import HEADER_BYTES, Payload, PayloadError, Received
from collectives.payloads.codec.bits import (
    SIGN,
    Term,
    add_codes_,
    byte_table,
    find_codebook,
    packed_nbytes,
    write_codes_,
)
from collectives.payloads.fields import FLOAT_DTYPES, Field, with_room


class CodedElements(Payload):
    """A payload with a code of `bits` bits for every element; a table gives the value of each code.

    Attributes:
        numel: number of elements of the dense tensor.
        bits: bits per code.
        packed: the packed codes, uint8 [ceil(numel * bits / 8)]; empty if all elements are zero.
        scales: numbers by which the table's values are multiplied, floating [1], or one per `block_numel` elements.
        block_numel: elements per scale; 0 if one scale is for all elements.
        table_id: identifies the table and `block_numel`; payloads with equal `table_id` can be added in one pass.
    """

    bits: int
    packed: torch.Tensor
    scales: torch.Tensor
    block_numel: int = 0
    table_id: Hashable

    def __post_init__(self) -> None:
        self.device = self.packed.device
        self.num_entries = self.numel if self.packed.numel() else 0
        self.alignment = math.lcm(8 // self.bits, self.block_numel or 1)

    @property
    @abc.abstractmethod
    def table(self) -> torch.Tensor:
        """Return the values, before scaling, of the codes in each of the 256 possible bytes: fp32 [256, 8 / bits]."""

    @override
    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        self.add_all_to_([], dense, divisor=divisor)

    @override
    def add_all_to_(self, others: Sequence[Payload], dense: torch.Tensor, *, divisor: float) -> bool:
        if terms := self._terms(others):
            block_numel = max(1, self.block_numel or self.numel)
            add_codes_(dense, terms, self.table, block_numel=block_numel, divisor=divisor)
        return terms is not None

    @override
    def write_to(self, parts: Sequence[torch.Tensor], *, divisor: float, others: Sequence[Payload] = ()) -> bool:
        terms, block_numel = self._terms(others), max(1, self.block_numel or self.numel)
        return terms is not None and write_codes_(parts, terms, self.table, block_numel=block_numel, divisor=divisor)

    def _terms(self, others: Sequence[Payload]) -> list[Term] | None:
        """Return (packed codes, scales) of this payload and the others; payloads of only zeros are left out.

        Return None if the payloads cannot all be added in one pass.
        """
        payloads = [self, *(other for other in others if isinstance(other, CodedElements))]
        if len(payloads) < 1 + len(others) or len({payload.table_id for payload in payloads}) > 1:
            return None
        return [(payload.packed, payload.scales) for payload in payloads if payload.num_entries]


@dataclasses.dataclass(eq=False)
class Codes(CodedElements):
    """A payload that sends a code of 1 to 8 bits for every element; the element's value is scale * codebook[code].

    Attributes:
        numel: number of elements of the dense tensor.
        codebook: name of the codebook: sign, ternary, levels or natural.
        bits: bits per code, one of the codebook's `widths`.
        packed: the packed codes, uint8 [ceil(numel * bits / 8)]; empty if all scales are zero.
        scales: fp32, fp16 or bf16 [1], or [ceil(numel / block_numel)]; empty if all scales are zero.
        block_numel: elements per scale; 0 if one scale is for all elements.

    Raises:
        PayloadError: the tensors do not have the lengths above, or the codebook has no codes of `bits` bits.
    """

    code = 6
    fixed = struct.Struct("<IBB2x")
    dtypes = FLOAT_DTYPES[:3]

    numel: int
    codebook: str
    bits: int
    packed: torch.Tensor
    scales: torch.Tensor
    block_numel: int = 0

    def __post_init__(self) -> None:
        self._book = find_codebook(self.codebook)
        if self.bits not in self._book.widths:
            raise PayloadError(f"codebook {self.codebook} has codes of {self._book.widths} bits, not {self.bits}")
        if self.scales.numel():
            expected = (packed_nbytes(self.numel, self.bits), num_scales(self.numel, self.block_numel))
            if (self.packed.numel(), self.scales.numel()) != expected:
                raise PayloadError(
                    f"{self.numel} codes of {self.bits} bits need {expected[0]} bytes and {expected[1]} scales, "
                    f"got {self.packed.numel()} bytes and {self.scales.numel()} scales"
                )
        if not self.scales.any():
            self.packed, self.scales = self.packed[:0], self.scales[:0]
        self.table_id = self.codebook, self.bits, self.block_numel
        super().__post_init__()

    @classmethod
    def room_for_codes(
        cls, numel: int, bits: int, device: torch.device, scale_dtype: torch.dtype = torch.float32, block_numel: int = 0
    ) -> torch.Tensor:
        """Return an uninitialised tensor for `packed`, uint8 [ceil(numel * bits / 8)], which `pack` does not copy."""
        nbytes = packed_nbytes(numel, bits)
        return with_room(cls.packed_nbytes(numel, bits, scale_dtype, block_numel) - nbytes, nbytes, torch.uint8, device)

    @classmethod
    def packed_nbytes(
        cls, numel: int, bits: int, scale_dtype: torch.dtype = torch.float32, block_numel: int = 0
    ) -> int:
        """Return the bytes of a packed `Codes` payload of `numel` elements, at least one of which is not zero."""
        scales = num_scales(numel, block_numel) * scale_dtype.itemsize
        return HEADER_BYTES + cls.fixed.size + scales + packed_nbytes(numel, bits)

    @property
    @override
    def table(self) -> torch.Tensor:
        return byte_table(self._book, self.bits, self.device)

    @override
    def fields(self) -> list[Field]:
        header = self._header(self.scales.dtype, self.block_numel, self.bits, self._book.number)
        return [header, self.scales, self.packed]

    @override
    @classmethod
    def from_wire(cls, wire: Received) -> Self:
        block_numel, bits, number = wire.numbers
        if wire.num_entries not in (0, wire.numel):
            raise PayloadError("a coded payload has a code for every element, or for none")
        scales = wire.body.tensor(num_scales(wire.num_entries, block_numel), wire.dtype)
        packed = wire.body.tensor(packed_nbytes(wire.num_entries, bits), torch.uint8)
        return cls(wire.numel, find_codebook(number).name, bits, packed, scales, block_numel)

    @override
    def _cut(self, start: int, stop: int) -> Payload:
        packed = self.packed[start * self.bits // 8 : packed_nbytes(stop, self.bits)]
        scales = self.scales
        if self.block_numel:
            scales = scales[-(-start // self.block_numel) : -(-stop // self.block_numel)]
        elif start == stop:
            scales = scales[:0]
        return Codes(stop - start, self.codebook, self.bits, packed, scales, self.block_numel)


def num_scales(numel: int, block_numel: int) -> int:
    """Return the number of scale factors for `numel` elements: one per `block_numel`, or one if `block_numel` is 0.

    If there are no elements, there are no scales.
    """
    return -(-numel // block_numel) if block_numel else min(numel, 1)


@dataclasses.dataclass(eq=False)
class TwoMeans(CodedElements):
    """A payload that sends two values and one bit per element, which selects `high` (1) or `low` (0).

    Attributes:
        numel: number of elements of the dense tensor.
        low, high: the two values, in fp32 precision.
        packed: the bits, uint8 [ceil(numel / 8)]; empty if both values are zero.

    Raises:
        PayloadError: `packed` does not have ceil(numel / 8) bytes.
    """

    code = 10
    fixed = struct.Struct("<ff")
    dtypes = FLOAT_DTYPES[:1]
    bits = 1

    numel: int
    low: float
    high: float
    packed: torch.Tensor

    def __post_init__(self) -> None:
        if self.low == 0 and self.high == 0:
            self.packed = self.packed[:0]
        elif self.packed.numel() != packed_nbytes(self.numel, 1):
            raise PayloadError(
                f"{self.numel} bits need {packed_nbytes(self.numel, 1)} bytes, got {self.packed.numel()}"
            )
        self.table_id = self.low, self.high
        self.scales = torch.ones(1, dtype=torch.float32, device=self.packed.device)  # the table needs no scale
        super().__post_init__()

    @classmethod
    def packed_nbytes(cls, numel: int) -> int:
        """Return the bytes of a packed `TwoMeans` payload of `numel` elements; `low` or `high` is not zero."""
        return HEADER_BYTES + cls.fixed.size + packed_nbytes(numel, 1)

    @property
    @override
    def table(self) -> torch.Tensor:
        high, low = (torch.tensor(mean, dtype=torch.float32, device=self.device) for mean in (self.high, self.low))
        return torch.where(byte_table(SIGN, 1, self.device) > 0, high, low)

    @override
    def fields(self) -> list[Field]:
        return [self._header(torch.float32, self.low, self.high), self.packed]

    @override
    @classmethod
    def from_wire(cls, wire: Received) -> Self:
        low, high = wire.numbers
        if wire.num_entries != (0 if low == high == 0 else wire.numel):
            raise PayloadError("a two-means payload has bits if and only if one of its values is not zero")
        return cls(wire.numel, low, high, wire.body.tensor(packed_nbytes(wire.num_entries, 1), torch.uint8))

    @override
    def _cut(self, start: int, stop: int) -> Payload:
        if start == stop:
            return TwoMeans(0, 0.0, 0.0, self.packed[:0])
        return TwoMeans(stop - start, self.low, self.high, self.packed[start // 8 : packed_nbytes(stop, 1)])
