"""Payloads of symmetric matrices (lower triangle or Cholesky factor), and the function that encodes a matrix as one.

A triangle needs a symmetric matrix, a Cholesky factor needs a positive definite matrix. `encode_symmetric` checks this;
if the matrix does not allow the requested form, it uses another form, and its result says which.

Both forms have (d + 1) / 2d of the elements of the whole matrix. The triangle needs no arithmetic, is exact, and can be
summed element by element. The factor is for receivers that solve linear systems with the matrix: even if L is rounded
to 16 bits, L L^T is positive semi-definite.
"""

import abc
import dataclasses
import enum
import math
import struct
from typing import Literal, Self, cast

import torch
from typing_extensions import override

from collectives.payloads.base import Dense, KeepLost, Payload, PayloadError, Received
from collectives.payloads.codec.values import add_values, divided, to_value_dtype


@dataclasses.dataclass(eq=False)
class Triangular(Payload):
    """A payload that sends a symmetric d x d matrix as d (d + 1) / 2 values.

    Attributes:
        size: d, the number of rows of the matrix.
        values: a lower triangle, row by row, floating [d (d + 1) / 2], in the dtype that is sent.

    Raises:
        PayloadError: `values` does not have this shape.
    """

    addable = True

    size: int
    values: torch.Tensor

    def __post_init__(self) -> None:
        self.numel = self.size**2
        self.alignment = max(1, self.numel)
        if self.values.shape != (_triangle_numel(self.size),):
            raise PayloadError(
                f"the triangle of a {self.size} x {self.size} matrix has {_triangle_numel(self.size)} values, "
                f"got {list(self.values.shape)}"
            )

    @property
    @abc.abstractmethod
    def matrix(self) -> torch.Tensor:
        """Return the decoded symmetric matrix [d, d] as a new tensor."""

    @override
    @classmethod
    def from_wire(cls, wire: Received) -> Self:
        size = math.isqrt(wire.numel)
        if size**2 != wire.numel or wire.num_entries != _triangle_numel(size):
            raise PayloadError(f"{wire.num_entries} entries are not the triangle of a matrix of {wire.numel} elements")
        return cls(size, wire.body.tensor(wire.num_entries, wire.dtype), *wire.numbers)

    @override
    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        dense.add_(divided(self.matrix.view(-1), divisor, dense.dtype))

    @override
    def _cut(self, start: int, stop: int) -> Self:
        return self if stop - start == self.numel else type(self)(0, self.values[:0])


def _triangle_numel(size: int) -> int:  # the diagonal included
    return size * (size + 1) // 2


def _pack_triangle(matrix: torch.Tensor) -> torch.Tensor:
    """Return the lower triangle of a matrix [d, d], diagonal included, row by row: [d (d + 1) / 2].

    Raises:
        PayloadError: the matrix is not square.
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise PayloadError(f"only square matrices have a triangle to send, got {list(matrix.shape)}")
    return matrix.masked_select(_triangle(matrix))


def _unpack_triangle(values: torch.Tensor, size: int) -> torch.Tensor:
    matrix = values.new_zeros(size, size)
    return matrix.masked_scatter_(_triangle(matrix), values)


def _triangle(matrix: torch.Tensor) -> torch.Tensor:  # a mask of the lower triangle, diagonal included
    return torch.ones_like(matrix, dtype=torch.bool).tril_()


@dataclasses.dataclass(eq=False)
class Triangle(Triangular):
    """A payload that sends the lower triangle of a symmetric d x d matrix."""

    code = 7
    elementwise = True

    @classmethod
    def from_matrix(cls, matrix: torch.Tensor) -> Self:
        """Return the payload of a symmetric matrix [d, d]; the elements above the diagonal are not read."""
        return cls(matrix.shape[0], _pack_triangle(matrix))

    @property
    @override
    def matrix(self) -> torch.Tensor:
        lower = _unpack_triangle(self.values, self.size)
        return lower + lower.tril(-1).T

    @override
    def _add(self, other: Payload, keep_lost: KeepLost | None) -> Payload:
        # `keep_lost` is ignored, because there is no error feedback for matrices of second moments
        if not isinstance(other, Triangle):
            raise PayloadError(f"Triangle and {type(other).__name__} payloads cannot be added without decoding them")
        return Triangle(self.size, add_values(self.values, other.values))

    @override
    def with_wire(self, wire: torch.Tensor) -> Payload:
        return Triangle(self.size, wire)


@dataclasses.dataclass(eq=False)
class CholeskyFactor(Triangular):
    """A payload that sends a symmetric d x d matrix as its damping and the Cholesky factor L of matrix + damping I.

    The matrix is decoded as L L^T - damping I.

    Attributes:
        size: d, the number of rows of the matrix.
        values: the lower triangle of L row by row, floating [d (d + 1) / 2], in the dtype that is sent.
        damping: number added to the diagonal before factoring, in fp32 precision; dampings add up in a sum.

    Raises:
        PayloadError: `values` does not have this shape, a value is not finite, or the damping is negative or not
            finite.
    """

    code = 8
    fixed = struct.Struct("<f4x")

    damping: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not bool(torch.isfinite(self.values).all()):
            raise PayloadError("a Cholesky factor must be finite; the matrix that it comes from was not")
        self.damping = float(torch.tensor(self.damping, dtype=torch.float32))
        if not 0 <= self.damping < math.inf:
            raise PayloadError(f"damping must be finite and not negative, got {self.damping}")
        self.numbers = (self.damping,)

    @classmethod
    def from_factor(cls, factor: torch.Tensor, damping: float = 0.0) -> Self:
        """Return the payload of a Cholesky factor L [d, d], which is zero above the diagonal.

        Raises:
            PayloadError: L is not lower triangular, or not finite.
        """
        if bool(factor.triu(1).any()):
            raise PayloadError("a Cholesky factor must be lower triangular; transpose an upper one")
        return cls(factor.shape[0], _pack_triangle(factor), damping)

    @property
    def factor(self) -> torch.Tensor:
        """Return L [d, d] in fp32, or fp64 if the values are fp64, with zeros above the diagonal."""
        wide = torch.promote_types(self.values.dtype, torch.float32)
        return _unpack_triangle(self.values.to(wide), self.size)

    @property
    def matrix(self) -> torch.Tensor:
        """Return L L^T - damping I, [d, d] in the type of `factor`."""
        product = self.factor @ self.factor.T
        product.diagonal().sub_(self.damping)
        return product

    def _add(self, other: Payload, keep_lost: KeepLost | None) -> Payload:
        # by QR in fp32 or wider, rounded once; `keep_lost` is ignored, because these matrices have no error feedback
        if not isinstance(other, CholeskyFactor):
            raise PayloadError(f"CholeskyFactor and {type(other).__name__} payloads cannot be added")
        dtype = torch.promote_types(self.values.dtype, other.values.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        factor = _lower_factor(torch.cat([self.factor.T.to(wide), other.factor.T.to(wide)]))
        return CholeskyFactor(self.size, to_value_dtype(_pack_triangle(factor), dtype), self.damping + other.damping)


def _lower_factor(matrix: torch.Tensor) -> torch.Tensor:
    """Return the lower triangular L [d, d] with L L^T = A^T A and a non-negative diagonal, for a matrix A [n, d]."""
    upper: torch.Tensor = torch.linalg.qr(matrix, mode="r").R
    return (torch.where(upper.diagonal() < 0, -1.0, 1.0).to(upper)[:, None] * upper).T


MatrixForm = Literal["cholesky", "triangle", "dense"]

# A matrix counts as symmetric if it differs from its transpose by at most this, relative to its largest element.
MAX_ASYMMETRY = 1e-6
# The given damping is multiplied by these numbers, one after another, until the factorisation succeeds.
DAMPING_TRIES = (1, 10, 100, 1000)
# Default damping, relative to the mean of the diagonal: large enough to factor a rank-deficient matrix in fp32.
SHARE_OF_DIAGONAL = 1e-3


class Fallback(enum.IntEnum):
    """How the form of an encoded matrix differs from the requested form; the largest difference is last."""

    NONE = 0
    DAMPING = 1  # a factor with more damping than requested
    TRIANGLE = 2  # a triangle instead of a factor: the matrix is not positive definite
    DENSE = 3  # the whole matrix: it is not symmetric


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedMatrix:
    """The result of `encode_symmetric`.

    Attributes:
        payload: the encoded matrix.
        fallback: NONE if the payload has the requested form, otherwise how its form differs.
    """

    payload: CholeskyFactor | Triangle | Dense
    fallback: Fallback = Fallback.NONE


def encode_symmetric(
    matrix: torch.Tensor, form: MatrixForm, *, dtype: torch.dtype = torch.float32, damping: float = 0.0
) -> EncodedMatrix:
    """Encode a symmetric matrix as a payload in the requested form, or in the next form that the matrix allows.

    The forms are, in this order: "cholesky" with the given damping, with 10, 100 and 1000 times that damping,
    "triangle", "dense".

    Args:
        matrix: floating [d, d].
        form: "cholesky" sends a factor of matrix + damping I, "triangle" the lower triangle, "dense" every element.
        dtype: dtype in which values are sent; values beyond the range of fp16 are clamped to that range.
        damping: number added to the diagonal for "cholesky"; it is sent with the factor, and subtracted on decoding.

    Raises:
        PayloadError: the matrix is not square, or not finite.
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise PayloadError(f"only square matrices are symmetric, got {list(matrix.shape)}")
    if not bool(torch.isfinite(matrix).all()):
        raise PayloadError("a matrix must be finite to be sent")
    if form == "dense" or (
        matrix.numel() and bool((matrix - matrix.T).abs().max() > MAX_ASYMMETRY * matrix.abs().max())
    ):
        whole = Dense(to_value_dtype(matrix, dtype).flatten())
        return EncodedMatrix(whole, Fallback.NONE if form == "dense" else Fallback.DENSE)
    if form == "cholesky":
        for index, times in enumerate(DAMPING_TRIES):
            if (factor := cholesky(matrix, damping * times)) is not None:
                of_damped = CholeskyFactor.from_factor(to_value_dtype(factor, dtype), damping * times)
                return EncodedMatrix(of_damped, Fallback.DAMPING if index else Fallback.NONE)
    triangle = Triangle.from_matrix(to_value_dtype(matrix, dtype))
    return EncodedMatrix(triangle, Fallback.TRIANGLE if form == "cholesky" else Fallback.NONE)


def cholesky(matrix: torch.Tensor, damping: float) -> torch.Tensor | None:
    """Return the Cholesky factor L with L L^T = matrix + damping I, or None if the matrix cannot be factored.

    L is computed in the matrix's dtype; if that fails, in fp64.
    """
    for dtype in (matrix.dtype, torch.float64):
        damped = matrix.to(dtype, copy=True)
        damped.diagonal().add_(damping)
        factor, failed_at = torch.linalg.cholesky_ex(damped)
        if not int(failed_at):
            return cast(torch.Tensor, factor.to(matrix.dtype))
    return None


def positive_factor(matrix: torch.Tensor, floor: float) -> torch.Tensor:
    """Return a lower triangular L such that L L^T is the matrix with eigenvalues below `floor` raised to `floor`.

    Unlike `cholesky`, this also works for matrices that are not positive definite.

    Args:
        matrix: symmetric, floating [d, d].
        floor: smallest eigenvalue of L L^T, above 0.
    """
    eigenvalues, vectors = torch.linalg.eigh(matrix.double())
    return _lower_factor((vectors * eigenvalues.clamp(min=floor).sqrt()).T).to(matrix.dtype)


def relative_damping(matrix: torch.Tensor) -> float:
    """Return a damping with which any positive semi-definite matrix [d, d] can be factored and decoded accurately."""
    mean = float(matrix.diagonal().mean()) if matrix.numel() else 0.0
    return SHARE_OF_DIAGONAL * mean if mean > 0 else 1.0  # a zero matrix is decoded exactly from L = I
