"""How a symmetric matrix is sent: as its Cholesky factor, as its triangle, or whole, whichever it turns out to allow.

A matrix that is not symmetric has no triangle, and one that is not positive definite has no factor. That is seen only
when it is encoded, so what is asked for may not be what comes out, and the caller is told.

Both forms have (d + 1) / 2d of the elements of the whole matrix. The triangle costs no arithmetic, is exact and adds
up; the factor is what a receiver needs who solves with the matrix, and of a factor in 16 bits L L^T is still positive
semi-definite.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import itertools
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

import torch
from typing_extensions import override

from collectives.payloads.base import Header, KeepLost, Payload, TypedValues
from collectives.payloads.codec.values import add_values, cache_blocks, divided, to_value_dtype
from collectives.payloads.dense import Dense
from collectives.payloads.fields import Field, PayloadError, Reader


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


Form = Literal["cholesky", "triangle", "dense"]

# Differences of this share of the largest element are rounding; beyond it a matrix is not symmetric.
MAX_ASYMMETRY = 1e-6
# Damping is tried as asked, then ten times as strong, three times over.
DAMPING_TRIES = (1, 10, 100, 1000)
# Of the mean of the diagonal: enough to factor a matrix of lower rank in fp32, little beside what the matrix holds.
SHARE_OF_DIAGONAL = 1e-3


class Fallback(enum.IntEnum):
    """What an encoding had to give up, from nothing to most."""

    NONE = 0
    DAMPING = 1  # a factor, with more damping than asked for
    TRIANGLE = 2  # no factor: not positive definite
    DENSE = 3  # no triangle: not symmetric


@dataclass(frozen=True, eq=False)
class EncodedMatrix:
    """A symmetric matrix that can be sent.

    Attributes:
        payload: of as many elements as the matrix.
        fallback: whether it is what was asked for.
    """

    payload: CholeskyFactor | Triangle | Dense
    fallback: Fallback = Fallback.NONE


def encode_symmetric(
    matrix: torch.Tensor, form: Form, *, dtype: torch.dtype = torch.float32, damping: float = 0.0
) -> EncodedMatrix:
    """Return the matrix in the form asked for, or in the next one that it allows.

    Args:
        matrix: floating [d, d].
        form: cholesky is of matrix + damping I.
        dtype: value type that travels; what fp16 cannot hold becomes its largest value.
        damping: what a factor's payload carries and its `matrix` has taken off again.

    Raises:
        PayloadError: not square, or not finite.
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise PayloadError(f"only square matrices are symmetric, got {list(matrix.shape)}")
    if not bool(torch.isfinite(matrix).all()):
        raise PayloadError("a matrix must be finite to be sent")
    if form == "dense":
        return EncodedMatrix(_whole(matrix, dtype))
    if not is_symmetric(matrix):
        return EncodedMatrix(_whole(matrix, dtype), Fallback.DENSE)
    if form == "cholesky":
        for index, times in enumerate(DAMPING_TRIES):
            factor = cholesky(matrix, damping * times)
            if factor is not None:
                of_damped = CholeskyFactor.from_factor(to_value_dtype(factor, dtype), damping * times)
                return EncodedMatrix(of_damped, Fallback.DAMPING if index else Fallback.NONE)
    triangle = Triangle.from_matrix(to_value_dtype(matrix, dtype))
    return EncodedMatrix(triangle, Fallback.TRIANGLE if form == "cholesky" else Fallback.NONE)


def is_symmetric(matrix: torch.Tensor) -> bool:
    """Whether a square matrix differs from its transpose by rounding at most."""
    if not matrix.numel():
        return True
    return bool((matrix - matrix.T).abs().max() <= MAX_ASYMMETRY * matrix.abs().max())


def cholesky(matrix: torch.Tensor, damping: float) -> torch.Tensor | None:
    """Return L with L L^T = matrix + damping I, in fp64 where the matrix's own type does not do; None without one."""
    for dtype in (matrix.dtype, torch.float64):
        damped = matrix.to(dtype, copy=True)
        damped.diagonal().add_(damping)
        factor: torch.Tensor
        factor, failed_at = torch.linalg.cholesky_ex(damped)
        if not int(failed_at):
            return factor.to(matrix.dtype)
    return None


def positive_factor(matrix: torch.Tensor, floor: float) -> torch.Tensor:
    """Return L with L L^T = a symmetric matrix whose eigenvalues below `floor` were raised to it: there always is one.

    Args:
        matrix: floating [d, d].
        floor: above 0.
    """
    eigenvalues, vectors = torch.linalg.eigh(matrix.double())
    roots = vectors * eigenvalues.clamp(min=floor).sqrt()
    upper: torch.Tensor = torch.linalg.qr(roots.T, mode="r").R
    signs = torch.where(upper.diagonal() < 0, -1.0, 1.0).to(upper)
    return (signs[:, None] * upper).T.to(matrix.dtype)


def relative_damping(matrix: torch.Tensor) -> float:
    """Return the damping with which any positive semi-definite matrix [d, d] can be factored and restored well."""
    mean = float(matrix.diagonal().mean()) if matrix.numel() else 0.0
    return SHARE_OF_DIAGONAL * mean if mean > 0 else 1.0  # of zeros, L = I restores zeros exactly


def _whole(matrix: torch.Tensor, dtype: torch.dtype) -> Dense:
    return Dense(to_value_dtype(matrix, dtype).flatten())
