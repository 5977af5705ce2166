"""TwoMeans: one bit per element that chooses between two values of the whole tensor.

Body: low f32 | high f32 | one bit per element, set where the value is high, low bits first. Two zeros: header and fixed
fields, the payload is zero.

Source: Seide et al. 2014 (Interspeech), "1-bit stochastic gradient descent", section 2.
Bytes: 24 + ceil(m / 8).
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Self

import torch
from typing_extensions import override

from collectives.payloads.base import HEADER_BYTES, Header, Payload
from collectives.payloads.codec.bits import pack_bits, packed_nbytes
from collectives.payloads.codec.code_sums import add_codes_
from collectives.payloads.codec.codebooks import SIGN
from collectives.payloads.errors import PayloadError
from collectives.payloads.fields import Field, Reader, with_room

FIXED = struct.Struct("<ff")


@dataclasses.dataclass(eq=False)
class TwoMeans(Payload):
    """`high` where the bit is set, else `low`.

    Attributes:
        numel: elements of the dense tensor.
        low, high: the two values, of fp32 precision.
        packed: uint8 [ceil(numel / 8)], the bits; emptied where both values are zero.

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
        """Pack bits: bool [numel], true where the value is `high`."""
        return cls(is_high.numel(), low, high, pack_bits(is_high, 1))

    @staticmethod
    def room(numel: int, device: torch.device) -> torch.Tensor:
        """Memory for the bits, uint8 [ceil(numel / 8)], that a message is made around without a copy."""
        return with_room(HEADER_BYTES + FIXED.size, packed_nbytes(numel, 1), torch.uint8, device)

    @staticmethod
    def packed_nbytes(numel: int) -> int:
        """Length of a packed payload that is not zero."""
        return HEADER_BYTES + FIXED.size + packed_nbytes(numel, 1)

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
        return [header + FIXED.pack(self.low, self.high), self.packed]

    @override
    @classmethod
    def from_wire(cls, header: Header, body: torch.Tensor) -> Self:
        reader = Reader(body)
        low, high = map(float, reader.fields(FIXED))
        if header.dtype or header.flags or header.num_entries not in (0, header.numel):
            raise PayloadError("the fixed fields of a two-means payload do not fit together")
        if (header.num_entries == 0) != (low == 0 and high == 0) and header.numel:
            raise PayloadError("a two-means payload sends bits if, and only if, one of its values is not zero")
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
