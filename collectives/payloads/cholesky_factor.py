"""CholeskyFactor: a positive semi-definite matrix D as the lower triangle of L with D = L L^T - damping I.

A factor of lower precision still gives a positive semi-definite L L^T, which a rounded triangle of D does not. Factors
do not add up: the factor of a sum is the triangle that a QR decomposition leaves of both, [La^T; Lb^T] = Q L^T, exact
for semi-definite matrices too and without squaring the condition number.

Source: Golub and Van Loan, "Matrix Computations" (4th ed.), section 6.5 (updating factorisations).

Body: damping f32 | 4 zero bytes | L's lower triangle, row by row.

Bytes: 24 + v d (d + 1) / 2.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Self

import torch
from typing_extensions import override

from collectives.payloads.base import Header, KeepLost, Payload
from collectives.payloads.codec.values import to_value_dtype
from collectives.payloads.errors import PayloadError
from collectives.payloads.fields import Field, Reader
from collectives.payloads.triangular import Triangular, matrix_size, pack_triangle, unpack_triangle

FIXED = struct.Struct("<fI")


@dataclasses.dataclass(eq=False)
class CholeskyFactor(Triangular):
    """L L^T - damping I, a symmetric d x d matrix.

    Attributes:
        size: d.
        values: floating [d (d + 1) / 2], the lower triangle of L row by row, in the type that travels.
        damping: what was added to the diagonal before factoring, in fp32 precision; dampings of a sum add up.

    Raises:
        PayloadError: a length that does not fit, values or a damping that are not finite, or a negative damping.
    """

    code = 8

    damping: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not bool(torch.isfinite(self.values).all()):
            raise PayloadError("a Cholesky factor must be finite; the matrix that it comes from was not")
        self.damping = float(torch.tensor(self.damping, dtype=torch.float32))
        if not 0 <= self.damping < math.inf:
            raise PayloadError(f"damping must be finite and not negative, got {self.damping}")

    @classmethod
    def from_factor(cls, factor: torch.Tensor, damping: float = 0.0) -> Self:
        """Take L [d, d], zero above the diagonal.

        Raises:
            PayloadError: not lower triangular, or not finite.
        """
        if bool(factor.triu(1).any()):
            raise PayloadError("a Cholesky factor must be lower triangular; transpose an upper one")
        return cls(factor.shape[0], pack_triangle(factor), damping)

    @property
    def factor(self) -> torch.Tensor:
        """L [d, d] in fp32 (fp64 where the values are), zero above the diagonal: what triangular solves need."""
        wide = torch.promote_types(self.values.dtype, torch.float32)
        return unpack_triangle(self.values.to(wide), self.size)

    @property
    def matrix(self) -> torch.Tensor:
        """L L^T - damping I, [d, d] in the type of `factor`."""
        product = self.factor @ self.factor.T
        product.diagonal().sub_(self.damping)
        return product

    @override
    def fields(self) -> list[Field]:
        header = self._header(self.values.dtype, num_entries=self.num_entries)
        return [header + FIXED.pack(self.damping, 0), self.values]

    @override
    @classmethod
    def from_wire(cls, header: Header, body: torch.Tensor) -> Self:
        reader = Reader(body)
        damping, reserved = reader.fields(FIXED)
        if reserved or header.flags:
            raise PayloadError("the fixed fields of a Cholesky factor do not fit together")
        size = matrix_size(header)
        return cls(size, reader.tensor(header.num_entries, cls._dtype_in(header)), damping)

    def add(self, other: Payload, keep_lost: KeepLost | None = None) -> CholeskyFactor:
        """Factor of the sum by QR, with a non-negative diagonal; computed in fp32 or better, rounded once.

        Nobody keeps what that takes off: it is no gradient.

        Raises:
            PayloadError: not a factor of the same size.
        """
        self._check_fits(other)
        if not isinstance(other, CholeskyFactor):
            raise PayloadError(f"CholeskyFactor and {type(other).__name__} payloads cannot be added")
        dtype = torch.promote_types(self.values.dtype, other.values.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        stacked = torch.cat([self.factor.T.to(wide), other.factor.T.to(wide)])
        upper = torch.linalg.qr(stacked, mode="r").R
        signs = torch.where(upper.diagonal() < 0, -1.0, 1.0).to(wide)
        factor = (signs[:, None] * upper).T
        return CholeskyFactor(self.size, to_value_dtype(pack_triangle(factor), dtype), self.damping + other.damping)
