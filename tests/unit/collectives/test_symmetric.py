"""Symmetric matrices as payloads: exact restoration, restoration up to rounding, and fallbacks."""

from __future__ import annotations

import pytest
import torch

from collectives.payloads import CholeskyFactor, Dense, PayloadError, Triangle, unpack
from collectives.payloads.symmetric import (
    EncodedMatrix,
    Fallback,
    MatrixForm,
    encode_symmetric,
    positive_factor,
    relative_damping,
)

SIZES = (1, 2, 17, 64, 200)


def spd(size: int, condition: float = 100.0, seed: int = 0) -> torch.Tensor:
    """Return fp64 [size, size] with eigenvalues from 1 / condition to 1."""
    generator = torch.Generator().manual_seed(seed)
    basis: torch.Tensor = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    matrix = basis * torch.logspace(0, -torch.tensor(condition).log10(), size, dtype=torch.float64) @ basis.T
    return (matrix + matrix.T) / 2


def restored(encoded: EncodedMatrix, size: int) -> torch.Tensor:
    """Return the matrix that a receiver restores."""
    return unpack(encoded.payload.pack()).to_dense().view(size, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_a_factor_restores_its_matrix_to_rounding(size: int, damping: float) -> None:
    matrix = spd(size).float()
    encoded = encode_symmetric(matrix, "cholesky", damping=damping)
    assert isinstance(encoded.payload, CholeskyFactor)
    assert encoded.fallback is Fallback.NONE
    error = (restored(encoded, size) - matrix).norm() / matrix.norm()
    assert error <= 10 * size * 2.0**-24


@pytest.mark.parametrize("size", SIZES)
def test_a_triangle_is_exact_and_adds_up(size: int) -> None:
    a, b = spd(size, seed=1).float(), spd(size, seed=2).float()
    first, second = encode_symmetric(a, "triangle"), encode_symmetric(b, "triangle")
    assert torch.equal(restored(first, size), a)
    assert torch.equal(first.payload.wire + second.payload.wire, encode_symmetric(a + b, "triangle").payload.wire)


@pytest.mark.parametrize("form", ["cholesky", "triangle"])
def test_a_matrix_that_is_not_symmetric_goes_whole_and_says_so(form: MatrixForm) -> None:
    matrix = spd(8).float()
    matrix[0, 5] += 1e-4
    encoded = encode_symmetric(matrix, form, damping=1.0)
    assert isinstance(encoded.payload, Dense)
    assert encoded.fallback is Fallback.DENSE
    assert torch.equal(restored(encoded, 8), matrix)
    matrix[0, 5] = matrix[5, 0] * (1 + 2.0**-23)  # rounding does not count as asymmetry
    assert encode_symmetric(matrix, form).fallback is Fallback.NONE


def test_an_indefinite_matrix_goes_as_a_triangle_and_says_so() -> None:
    matrix = torch.diag(torch.tensor([1.0, -1.0]))
    encoded = encode_symmetric(matrix, "cholesky", damping=1e-4)
    assert isinstance(encoded.payload, Triangle)
    assert encoded.fallback is Fallback.TRIANGLE
    assert torch.equal(restored(encoded, 2), matrix)


def test_damping_grows_tenfold_three_times() -> None:
    """Its lowest eigenvalue is -0.05: damping of 0.001 or 0.01 does not lift it above zero, 0.1 does."""
    matrix = torch.diag(torch.tensor([1.0, -0.05]))
    encoded = encode_symmetric(matrix, "cholesky", damping=0.001)
    assert isinstance(encoded.payload, CholeskyFactor)
    assert encoded.fallback is Fallback.DAMPING
    assert encoded.payload.damping == pytest.approx(0.1)
    torch.testing.assert_close(restored(encoded, 2), matrix)
    assert encode_symmetric(matrix, "cholesky", damping=0.00006).fallback is Fallback.DAMPING
    assert encode_symmetric(matrix, "cholesky", damping=0.00004).fallback is Fallback.TRIANGLE


def test_singular_matrices_need_damping() -> None:
    vector = torch.tensor([1.0, 2.0, 3.0])
    matrix = torch.outer(vector, vector)
    assert encode_symmetric(matrix, "cholesky").fallback is Fallback.TRIANGLE
    encoded = encode_symmetric(matrix, "cholesky", damping=relative_damping(matrix))
    assert encoded.fallback is Fallback.NONE
    torch.testing.assert_close(restored(encoded, 3), matrix, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["cholesky", "triangle", "dense"])
def test_what_is_no_finite_square_matrix_is_refused(form: MatrixForm) -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(PayloadError, match="must be finite"):
            encode_symmetric(torch.full((2, 2), value), form)
    with pytest.raises(PayloadError, match="only square matrices"):
        encode_symmetric(torch.ones(2, 3), form)


@pytest.mark.parametrize("form", ["cholesky", "triangle", "dense"])
@pytest.mark.parametrize("matrix", [torch.empty(0, 0), torch.tensor([[4.0]]), torch.zeros(3, 3)])
def test_no_elements_one_element_and_zeros_are_restored_exactly(form: MatrixForm, matrix: torch.Tensor) -> None:
    encoded = encode_symmetric(matrix, form, damping=0.0 if matrix.any() else relative_damping(matrix))
    assert encoded.fallback is Fallback.NONE
    assert torch.equal(restored(encoded, len(matrix)), matrix)
    if isinstance(encoded.payload, CholeskyFactor) and matrix.any():
        assert encoded.payload.factor.item() == 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.float16, 2), (torch.bfloat16, 2)])
def test_bytes_are_half_of_the_whole_and_headers(size: int, dtype: torch.dtype, width: int) -> None:
    matrix, triangle = spd(size).float(), width * size * (size + 1) // 2
    lengths = {
        form: encode_symmetric(matrix, form, dtype=dtype, damping=0.1).payload.pack().numel()
        for form in ("cholesky", "triangle", "dense")
    }
    assert lengths == {"cholesky": 24 + triangle, "triangle": 16 + triangle, "dense": 16 + width * size**2}


@pytest.mark.parametrize(("dtype", "condition"), [(torch.float16, 1e6), (torch.bfloat16, 1e4)])
def test_in_sixteen_bits_a_factor_stays_semi_definite_and_a_triangle_does_not(
    dtype: torch.dtype, condition: float
) -> None:
    """A factor is computed in full precision and then rounded; its receiver restores L L^T."""
    matrix = spd(64, condition)
    factor = encode_symmetric(matrix, "cholesky", dtype=dtype)
    triangle = encode_symmetric(matrix, "triangle", dtype=dtype)
    assert factor.fallback is triangle.fallback is Fallback.NONE
    assert isinstance(factor.payload, CholeskyFactor)
    of_factor = factor.payload.factor.double()
    assert torch.linalg.eigvalsh(of_factor @ of_factor.T).min() >= -1e-15
    assert torch.linalg.eigvalsh(restored(triangle, 64).double()).min() < -1e-5


def test_what_elimination_in_fp32_loses_is_factored_in_fp64() -> None:
    """[[p, 1], [1, 1 / p rounded up]] is positive definite by less than the precision of fp32."""
    candidates = [torch.tensor([[float(p), 1.0], [1.0, 1 / p]]) for p in range(2, 40)]
    definite = [matrix for matrix in candidates if torch.linalg.det(matrix.double()) > 0]
    lost = [matrix for matrix in definite if int(torch.linalg.cholesky_ex(matrix)[1])]
    assert lost
    assert all(encode_symmetric(matrix, "cholesky").fallback is Fallback.NONE for matrix in lost)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_solving_with_a_received_factor_equals_solving_with_ones_own(dtype: torch.dtype) -> None:
    matrix, right = spd(64).float(), torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    payload = encode_symmetric(matrix, "cholesky", dtype=dtype, damping=0.003).payload
    received = unpack(payload.pack())
    assert isinstance(payload, CholeskyFactor)
    assert isinstance(received, CholeskyFactor)
    assert torch.equal(torch.cholesky_solve(right, received.factor), torch.cholesky_solve(right, payload.factor))
    if dtype is torch.float32:
        expected = torch.linalg.solve(matrix.double() + 0.003 * torch.eye(64), right.double())
        torch.testing.assert_close(
            torch.cholesky_solve(right, received.factor).double(), expected, rtol=1e-4, atol=1e-4
        )


def test_a_positive_factor_raises_low_eigenvalues_only() -> None:
    basis = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    factor = positive_factor(basis @ torch.diag(torch.tensor([2.0, 0.1, -1.0]).double()) @ basis.T, floor=0.5)
    assert torch.equal(factor, factor.tril())
    expected = basis @ torch.diag(torch.tensor([2.0, 0.5, 0.5]).double()) @ basis.T
    torch.testing.assert_close(factor @ factor.T, expected)


def test_triangle_reads_the_lower_half_only() -> None:
    matrix = torch.tensor([[1.0, 99.0], [2.0, 3.0]])
    assert Triangle.from_matrix(matrix).matrix.tolist() == [[1, 2], [2, 3]]


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_cholesky_factors_merge_by_qr(size: int) -> None:
    """R from qr([La^T; Lb^T]) gives L L^T = La La^T + Lb Lb^T, also for singular matrices."""
    generator = torch.Generator().manual_seed(size)
    full = torch.randn(size, size, generator=generator, dtype=torch.float64)
    thin = torch.randn(size, 1, generator=generator, dtype=torch.float64)
    thin_factor = torch.linalg.qr(thin.T).R.T @ torch.eye(1, size, dtype=torch.float64)  # of rank one
    a = CholeskyFactor.from_factor(torch.linalg.cholesky(full @ full.T + torch.eye(size)), damping=1.0)
    b = CholeskyFactor.from_factor(thin_factor.tril(), damping=0.25)
    total = a.add(b)
    assert total.damping == 1.25
    assert (total.factor.diagonal() >= 0).all()
    torch.testing.assert_close(total.matrix, a.matrix + b.matrix, rtol=1e-12, atol=1e-12 * size)


@pytest.mark.parametrize(
    ("factor", "sentence"),
    [
        (torch.tensor([[1.0, 2.0], [0.0, 1.0]]), "lower triangular"),
        (torch.tensor([[1.0, 0.0], [torch.inf, 1.0]]), "finite"),
        (torch.tensor([[torch.nan, 0.0], [1.0, 1.0]]), "finite"),
        (torch.tensor([[1.0, torch.nan], [1.0, 1.0]]), "lower triangular"),
    ],
)
def test_a_factor_is_lower_triangular_and_finite(factor: torch.Tensor, sentence: str) -> None:
    with pytest.raises(PayloadError, match=sentence):
        CholeskyFactor.from_factor(factor)
