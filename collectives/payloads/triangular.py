"""What the kinds share that stand for a symmetric matrix by one triangle, and how a triangle is packed: row by row."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Self

import torch
from typing_extensions import override

from collectives.payloads.base import Header
from collectives.payloads.codec.cache_blocks import cache_blocks
from collectives.payloads.codec.values import divided
from collectives.payloads.errors import PayloadError
from collectives.payloads.typed_values import TypedValues


@dataclasses.dataclass(eq=False)
class Triangular(TypedValues):
    """A symmetric d x d matrix that follows from d (d + 1) / 2 values.

    Attributes:
        size: d.
        values: floating [d (d + 1) / 2], a lower triangle row by row, in the type that travels.

    Raises:
        PayloadError: a length that does not fit.
    """

    addable = True

    size: int
    values: torch.Tensor

    def __post_init__(self) -> None:
        self.numel = self.size**2
        if self.values.shape != (triangle_numel(self.size),):
            raise PayloadError(
                f"the triangle of a {self.size} x {self.size} matrix has {triangle_numel(self.size)} values, "
                f"got {list(self.values.shape)}"
            )

    @property
    @abc.abstractmethod
    def matrix(self) -> torch.Tensor:
        """The symmetric matrix [d, d], freshly made."""

    @property
    @override
    def alignment(self) -> int:
        return max(1, self.numel)

    @override
    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        dense.add_(divided(self.matrix.view(-1), divisor, dense.dtype))

    @override
    def subtract_from_(self, dense: torch.Tensor) -> None:
        dense.sub_(self.matrix.view(-1))

    @override
    def entries_between(self, borders: list[int]) -> list[int]:
        below = [triangle_entries_before(border, self.size) for border in borders]
        return [stop - start for start, stop in itertools.pairwise(below)]

    @override
    def slice(self, start: int, stop: int) -> Self:
        self._check_borders(start, stop)
        return self if stop - start == self.numel else type(self)(0, self.values[:0])


def triangle_numel(size: int) -> int:
    """Elements of the lower triangle of a size x size matrix, the diagonal included."""
    return size * (size + 1) // 2


def triangle_entries_before(position: int, size: int) -> int:
    """Elements of the lower triangle whose row-major flat position in the matrix is below `position`."""
    row, column = divmod(position, size) if size else (0, 0)
    return triangle_numel(row) + min(column, row + 1)


def pack_triangle(matrix: torch.Tensor) -> torch.Tensor:
    """The lower triangle of a matrix [d, d], row by row: [d (d + 1) / 2].

    Raises:
        PayloadError: not a square matrix.
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise PayloadError(f"only square matrices have a triangle to send, got {list(matrix.shape)}")
    values = matrix.new_empty(triangle_numel(matrix.shape[0]))
    for rows in row_cache_blocks(matrix.shape[0], matrix.device):
        block = matrix[rows, : rows.stop]
        values[_triangle_part(rows)] = block.masked_select(_kept(block, rows))
    return values


def unpack_triangle(values: torch.Tensor, size: int) -> torch.Tensor:
    """The inverse of `pack_triangle`: [size, size], zero above the diagonal."""
    matrix = values.new_zeros(size, size)
    for rows in row_cache_blocks(size, values.device):
        block = matrix[rows, : rows.stop]
        block.masked_scatter_(_kept(block, rows), values[_triangle_part(rows)])
    return matrix


def matrix_size(header: Header) -> int:
    """Size of the square matrix that a header describes.

    Raises:
        PayloadError: its counts are not those of a triangle.
    """
    size = math.isqrt(header.numel)
    if size**2 != header.numel or header.num_entries != triangle_numel(size):
        raise PayloadError(f"{header.num_entries} entries are not the triangle of a matrix of {header.numel} elements")
    return size


def row_cache_blocks(size: int, device: torch.device) -> Iterator[slice]:
    """Rows of a matrix [size, size], as many at a time as make a stretch."""
    for part in cache_blocks(size**2, device, multiple_of=max(1, size)):
        yield slice(part.start // size, part.stop // size)


def _triangle_part(rows: slice) -> slice:
    """Where some rows lie in the packed triangle."""
    return slice(triangle_numel(rows.start), triangle_numel(rows.stop))


def _kept(block: torch.Tensor, rows: slice) -> torch.Tensor:
    """Which elements of [rows, 0..rows.stop] belong to the lower triangle."""
    return torch.ones_like(block, dtype=torch.bool).tril_(rows.start)
