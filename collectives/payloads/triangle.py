"""Triangle: a symmetric matrix as its lower triangle, row after row; packing is linear, so triangles add by element.

Source: kfac-pytorch's symmetric all-reduce does the same with the upper triangle.

Bytes: 16 + v d (d + 1) / 2.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import torch
from typing_extensions import override

from collectives.payloads.base import Header, KeepLost, Payload
from collectives.payloads.codec.values import add_values
from collectives.payloads.errors import PayloadError
from collectives.payloads.fields import Field, Reader
from collectives.payloads.triangular import (
    Triangular,
    matrix_size,
    pack_triangle,
    row_cache_blocks,
    unpack_triangle,
)


@dataclasses.dataclass(eq=False)
class Triangle(Triangular):
    """A symmetric d x d matrix: its own lower triangle."""

    code = 7
    elementwise = True

    @classmethod
    def from_matrix(cls, matrix: torch.Tensor) -> Self:
        """Take the lower triangle of a symmetric matrix [d, d]; what lies above the diagonal is not looked at."""
        return cls(matrix.shape[0], pack_triangle(matrix))

    @property
    @override
    def matrix(self) -> torch.Tensor:
        full = unpack_triangle(self.values, self.size)
        for rows in row_cache_blocks(self.size, self.device):
            block = full[rows, : rows.stop]
            full[: rows.stop, rows] += block.tril(rows.start - 1).T
        return full

    @override
    def fields(self) -> list[Field]:
        return [self._header(self.values.dtype, num_entries=self.num_entries), self.values]

    @override
    @classmethod
    def from_wire(cls, header: Header, body: torch.Tensor) -> Self:
        if header.flags:
            raise PayloadError("a triangle has no flags")
        size = matrix_size(header)
        return cls(size, Reader(body).tensor(header.num_entries, cls._dtype_in(header)))

    @override
    def add(self, other: Payload, keep_lost: KeepLost | None = None) -> Triangle:
        """Nobody keeps what rounding takes off second moments.

        Raises:
            PayloadError: not a triangle of the same size.
        """
        self._check_fits(other)
        if not isinstance(other, Triangle):
            raise PayloadError(f"Triangle and {type(other).__name__} payloads cannot be added without decoding them")
        return Triangle(self.size, add_values(self.values, other.values))

    @override
    def with_wire(self, wire: torch.Tensor) -> Triangle:
        return Triangle(self.size, wire)
