"""How a symmetric matrix is sent: as its Cholesky factor, as its triangle, or whole, whichever it turns out to allow.

A matrix that is not symmetric has no triangle, and one that is not positive definite has no factor. That is seen only
when it is encoded, so what is asked for may not be what comes out, and the caller is told.

Both forms have (d + 1) / 2d of the elements of the whole matrix. The triangle costs no arithmetic, is exact and adds
up; the factor is what a receiver needs who solves with the matrix, and of a factor in 16 bits L L^T is still positive
semi-definite.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

import torch

from collectives.payloads.cholesky_factor import CholeskyFactor
from collectives.payloads.codec.values import to_value_dtype
from collectives.payloads.dense import Dense
from collectives.payloads.errors import PayloadError
from collectives.payloads.triangle import Triangle

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
