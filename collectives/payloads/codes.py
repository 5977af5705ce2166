"""Codes and TwoMeans: payloads with a few bits per element.

Body of Codes: block_numel u32 (0: one scale for all) | bits u8 | codebook u8 | 2 zero bytes | scales | packed codes.
If all scales are zero, only header and fixed fields are sent. Body of TwoMeans: low f32 | high f32 | one bit per
element; without the bits if both values are zero.

Bytes: 24 + scales * (4 or 2) + ceil(m bits / 8).
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence
from typing import Self, TypeGuard

import torch
from typing_extensions import override

from collectives.payloads.base import HEADER_BYTES, Header, Payload
from collectives.payloads.codec.bits import pack_bits, packed_nbytes, unpack_bits
from collectives.payloads.codec.codebooks import (
    SIGN,
    Codebook,
    Term,
    add_codes_,
    codebook_named,
    codebook_numbered,
    write_codes_,
)
from collectives.payloads.fields import FLOAT_DTYPES, Field, PayloadError, Reader, with_room

FIXED = struct.Struct("<IBBH")


@dataclasses.dataclass(eq=False)
class Codes(Payload):
    """Sends a code of 1 to 8 bits for every element, whose value is scale * codebook[code].

    Attributes:
        numel: elements of the dense tensor.
        codebook: name of the codebook: sign, ternary, levels, natural, or one that was registered.
        bits: width of a code, one of the codebook's.
        packed: uint8 [ceil(numel * bits / 8)], the packed codes; empty if all scales are zero.
        scales: fp32, fp16 or bf16 [1], or [ceil(numel / block_numel)]; replaced by an empty tensor if all are zero.
        block_numel: elements per scale; 0 for one scale for all.

    Raises:
        PayloadError: the lengths do not fit together, or the codebook does not exist at this width.
    """

    code = 6
    dtypes = FLOAT_DTYPES[:3]

    numel: int
    codebook: str
    bits: int
    packed: torch.Tensor
    scales: torch.Tensor
    block_numel: int = 0

    def __post_init__(self) -> None:
        if self.bits not in self._book.widths:
            raise PayloadError(f"codebook {self.codebook} has codes of {self._book.widths} bits, not {self.bits}")
        if self.scales.numel():
            expected = (packed_nbytes(self.numel, self.bits), num_scales(self.numel, self.block_numel))
            if (self.packed.numel(), self.scales.numel()) != expected:
                raise PayloadError(
                    f"{self.numel} codes of {self.bits} bits need {expected[0]} bytes and {expected[1]} scales, "
                    f"got {self.packed.numel()} and {self.scales.numel()}"
                )
        if not self.scales.any():
            self.packed, self.scales = self.packed[:0], self.scales[:0]

    @classmethod
    def from_codes(
        cls, codes: torch.Tensor, *, codebook: str, bits: int, scales: torch.Tensor, block_numel: int = 0
    ) -> Self:
        """Pack codes; the other arguments are the attributes.

        Args:
            codes: integer or bool [numel]; only the low `bits` bits are used, so levels may be negative.
            codebook: name of the codebook.
            bits: width of a code.
            scales: one scale, or one per block.
            block_numel: elements per scale; 0 for one scale for all.
        """
        packed = pack_bits(codes, bits, first=codebook_named(codebook).first)
        return cls(codes.numel(), codebook, bits, packed, scales, block_numel)

    @staticmethod
    def room(
        numel: int, bits: int, device: torch.device, scale_dtype: torch.dtype = torch.float32, block_numel: int = 0
    ) -> torch.Tensor:
        """Return uninitialised packed codes, uint8 [ceil(numel * bits / 8)], that `pack` need not copy."""
        before = HEADER_BYTES + FIXED.size + num_scales(numel, block_numel) * scale_dtype.itemsize
        return with_room(before, packed_nbytes(numel, bits), torch.uint8, device)

    @staticmethod
    def packed_nbytes(numel: int, bits: int, scale_dtype: torch.dtype = torch.float32, block_numel: int = 0) -> int:
        """Return the length of a packed payload whose scales are not all zero."""
        scales = num_scales(numel, block_numel) * scale_dtype.itemsize
        return HEADER_BYTES + FIXED.size + scales + packed_nbytes(numel, bits)

    @property
    def codes(self) -> torch.Tensor:
        """Return the codes, int64 [numel]; empty if all scales are zero."""
        return unpack_bits(self.packed, self.num_entries, self.bits, first=self._book.first)

    @property
    @override
    def device(self) -> torch.device:
        return self.packed.device

    @property
    @override
    def num_entries(self) -> int:
        return self.numel if self.scales.numel() else 0

    @property
    @override
    def alignment(self) -> int:
        return math.lcm(8 // self.bits, self.block_numel or 1)

    @override
    def fields(self) -> list[Field]:
        header = self._header(self.scales.dtype, num_entries=self.num_entries)
        return [header + FIXED.pack(self.block_numel, self.bits, self._book.number, 0), self.scales, self.packed]

    @override
    @classmethod
    def from_wire(cls, header: Header, body: torch.Tensor) -> Self:
        dtype = cls._dtype_in(header)
        reader = Reader(body)
        block_numel, bits, number, reserved = map(int, reader.fields(FIXED))
        book = codebook_numbered(number)
        if reserved or header.flags or header.num_entries not in (0, header.numel):
            raise PayloadError("the fixed fields of a coded payload do not fit together")
        scales = reader.tensor(num_scales(header.num_entries, block_numel), dtype)
        packed = reader.tensor(packed_nbytes(header.num_entries, bits), torch.uint8)
        return cls(header.numel, book.name, bits, packed, scales, block_numel)

    @override
    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        self._add([self], dense, divisor=divisor)

    @override
    def subtract_from_(self, dense: torch.Tensor) -> None:
        self._add([self], dense, sign=-1.0)

    @override
    def add_all_to_(self, others: Sequence[Payload], dense: torch.Tensor, *, divisor: float) -> bool:
        if not self._agrees_with(others):
            return False
        self._add([self, *others], dense, divisor=divisor)
        return True

    @override
    def write_all_to(self, others: Sequence[Payload], parts: Sequence[torch.Tensor], *, divisor: float) -> bool:
        return self._agrees_with(others) and write_codes_(
            parts, _terms([self, *others]), self._table, block_numel=self._elements_per_scale, divisor=divisor
        )

    @override
    def slice(self, start: int, stop: int) -> Codes:
        self._check_borders(start, stop)
        packed = self.packed[start * self.bits // 8 : packed_nbytes(stop, self.bits)]
        scales = self.scales
        if self.block_numel:
            scales = scales[-(-start // self.block_numel) : -(-stop // self.block_numel)]
        elif start == stop:
            scales = scales[:0]
        return Codes(stop - start, self.codebook, self.bits, packed, scales, self.block_numel)

    @property
    def _book(self) -> Codebook:
        return codebook_named(self.codebook)

    @property
    def _format(self) -> tuple[str, int, int]:
        return self.codebook, self.bits, self.block_numel

    def _agrees_with(self, others: Sequence[Payload]) -> TypeGuard[Sequence[Codes]]:
        """Return True if the others have the same codebook, width and blocks, so that one loop can add all."""
        return all(isinstance(other, Codes) and other._format == self._format for other in others)

    @property
    def _table(self) -> torch.Tensor:
        return self._book.byte_table(self.bits, self.device)

    @property
    def _elements_per_scale(self) -> int:
        return max(1, self.block_numel or self.numel)

    def _add(self, payloads: Sequence[Codes], dense: torch.Tensor, *, divisor: float = 1.0, sign: float = 1.0) -> None:
        """Add payloads with the same codebook, width and blocks as this one to `dense` (mutated)."""
        if terms := _terms(payloads):
            block_numel = self._elements_per_scale
            add_codes_(dense, terms, self._table, block_numel=block_numel, divisor=divisor, sign=sign)


def _terms(payloads: Sequence[Codes]) -> list[Term]:
    """Return the packed codes and scales of the payloads that are not zero."""
    return [(payload.packed, payload.scales) for payload in payloads if payload.num_entries]


def num_scales(numel: int, block_numel: int) -> int:
    """Return how many scales `numel` elements need: one if `block_numel` is 0, none for no elements."""
    return -(-numel // block_numel) if block_numel else min(numel, 1)


TWO_MEANS_FIXED = struct.Struct("<ff")


@dataclasses.dataclass(eq=False)
class TwoMeans(Payload):
    """Sends two values and one bit per element, which selects `high` (1) or `low` (0).

    Attributes:
        numel: elements of the dense tensor.
        low, high: the two values, in fp32 precision.
        packed: uint8 [ceil(numel / 8)], the bits; replaced by an empty tensor if both values are zero.

    Raises:
        PayloadError: `packed` has another length.
    """

    code = 10

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

    @classmethod
    def from_mask(cls, is_high: torch.Tensor, low: float, high: float) -> Self:
        """Pack a mask, bool [numel], that is True where the value is `high`."""
        return cls(is_high.numel(), low, high, pack_bits(is_high, 1))

    @staticmethod
    def room(numel: int, device: torch.device) -> torch.Tensor:
        """Return uninitialised bits, uint8 [ceil(numel / 8)], that `pack` need not copy."""
        return with_room(HEADER_BYTES + TWO_MEANS_FIXED.size, packed_nbytes(numel, 1), torch.uint8, device)

    @staticmethod
    def packed_nbytes(numel: int) -> int:
        """Return the length of a packed payload that is not zero."""
        return HEADER_BYTES + TWO_MEANS_FIXED.size + packed_nbytes(numel, 1)

    @property
    @override
    def device(self) -> torch.device:
        return self.packed.device

    @property
    @override
    def num_entries(self) -> int:
        return self.numel if self.packed.numel() else 0

    @property
    @override
    def alignment(self) -> int:
        return 8

    @override
    def fields(self) -> list[Field]:
        header = self._header(torch.float32, num_entries=self.num_entries)
        return [header + TWO_MEANS_FIXED.pack(self.low, self.high), self.packed]

    @override
    @classmethod
    def from_wire(cls, header: Header, body: torch.Tensor) -> Self:
        reader = Reader(body)
        low, high = map(float, reader.fields(TWO_MEANS_FIXED))
        if header.dtype or header.flags or header.num_entries not in (0, header.numel):
            raise PayloadError("the fixed fields of a two-means payload do not fit together")
        if (header.num_entries == 0) != (low == 0 and high == 0) and header.numel:
            raise PayloadError("a two-means payload has bits if and only if one of its values is not zero")
        return cls(header.numel, low, high, reader.tensor(packed_nbytes(header.num_entries, 1), torch.uint8))

    @override
    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        self._add(dense, divisor=divisor)

    @override
    def subtract_from_(self, dense: torch.Tensor) -> None:
        self._add(dense, sign=-1.0)

    @override
    def slice(self, start: int, stop: int) -> TwoMeans:
        self._check_borders(start, stop)
        if start == stop:
            return TwoMeans(0, 0.0, 0.0, self.packed[:0])
        return TwoMeans(stop - start, self.low, self.high, self.packed[start // 8 : packed_nbytes(stop, 1)])

    def _add(self, dense: torch.Tensor, *, divisor: float = 1.0, sign: float = 1.0) -> None:
        if self.num_entries:
            is_high = SIGN.byte_table(1, self.device) > 0
            high, low = (torch.tensor(mean, dtype=torch.float32, device=self.device) for mean in (self.high, self.low))
            table = torch.where(is_high, high, low)
            unit = torch.ones(1, dtype=torch.float32, device=self.device)
            add_codes_(dense, [(self.packed, unit)], table, block_numel=self.numel, divisor=divisor, sign=sign)
