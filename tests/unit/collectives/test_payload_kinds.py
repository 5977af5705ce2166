"""Properties of single kinds of payloads beyond the common interface."""

from __future__ import annotations

import pytest
import torch

from collectives.payloads import CholeskyFactor, Codes, Dense, GroupSparse, RowSparse, Seeded, Sparse, Triangle
from collectives.payloads.base import PayloadError, unpack
from collectives.payloads.codec.bits import find_codebook
from collectives.payloads.codec.philox import seeded_positions
from tests.testing.payloads import DEVICES, make, packed_codes


def test_dense_shares_its_tensor_and_decodes_in_place() -> None:
    values = torch.arange(4.0)
    assert Dense(values).wire is values
    packed = Dense(values).pack()
    again = unpack(packed)
    assert isinstance(again, Dense)
    packed[16:] = 0
    assert not again.values.any()


def test_dense_integers_sum_exactly() -> None:
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        a, b = Dense(torch.tensor([100, 1], dtype=dtype)), Dense(torch.tensor([27, 1], dtype=dtype))
        again = unpack(a.add(b).pack())
        assert isinstance(again, Dense)
        assert (again.values.dtype, again.values.tolist()) == (dtype, [127, 2])


def test_fp16_sums_saturate() -> None:
    values, where = torch.full((1,), 60000.0).half(), torch.zeros(1, dtype=torch.int64)
    for payload in (Dense(values), Sparse(1000, where, values), Seeded(10, 1, values), Triangle(1, values)):
        assert payload.add(payload).to_dense().max() == 65504


def test_sparse_add_widens_when_dense_is_no_longer() -> None:
    """100 fp32 elements: a bitmap of 13 bytes saves space up to 96 entries."""
    low, high = torch.arange(48), torch.arange(48, 96)
    total = Sparse(100, low, torch.ones(48)).add(Sparse(100, high, torch.ones(48)))
    assert isinstance(total, Sparse)
    wider = total.add(Sparse(100, torch.tensor([99]), torch.ones(1)))
    assert isinstance(wider, Dense)
    assert wider.to_dense().sum() == 97
    assert isinstance(wider.add(total), Dense)
    assert isinstance(total.add(wider), Dense)


def test_group_sparse_adds_to_sparse() -> None:
    a, b = make("group_sparse", 1024, torch.float16, 0), make("group_sparse", 1024, torch.float16, 1)
    total = a.payload.add(b.payload)
    assert isinstance(total, Sparse)
    assert total.indices.tolist() == (a.sent | b.sent).nonzero().view(-1).tolist()


def test_cancelling_values_stay_in_the_union() -> None:
    a = Sparse(1000, torch.tensor([3, 5]), torch.tensor([1.0, 2.0]))
    b = Sparse(1000, torch.tensor([3, 9]), torch.tensor([-1.0, 2.0]))
    total = a.add(b)
    assert isinstance(total, Sparse)
    assert (total.indices.tolist(), total.values.tolist()) == ([3, 5, 9], [0, 2, 2])
    assert a.add(Sparse(1000, a.indices, -a.values)).nbytes == 16


def test_row_sparse_add_joins_rows_and_widens() -> None:
    a = RowSparse(400, torch.tensor([1, 3]), torch.ones(2, 4))
    b = RowSparse(400, torch.tensor([3, 7]), torch.ones(2, 4))
    total = a.add(b)
    assert isinstance(total, RowSparse)
    assert (total.rows.tolist(), total.values[:, 0].tolist()) == ([1, 3, 7], [1, 2, 1])
    full = RowSparse(400, torch.arange(100), torch.ones(100, 4))
    assert isinstance(total.add(full), Dense)
    assert torch.equal(Dense(torch.ones(400)).add(total).to_dense(), 1 + total.to_dense())
    with pytest.raises(PayloadError, match="same row length"):
        a.add(RowSparse(400, torch.tensor([1]), torch.ones(1, 8)))


def test_counts_that_do_not_fit_are_refused() -> None:
    one = torch.ones(1)
    zero = torch.zeros(1, dtype=torch.int64)
    for build, message in (
        (lambda: Dense(torch.ones(2, 2)), "1-D"),
        (lambda: Sparse(9, zero, torch.ones(2)), "equally long"),
        (lambda: GroupSparse(9, 3, 4, one, zero), "k must lie in 1..3"),
        (lambda: GroupSparse(9, 3, 1, torch.ones(2), torch.zeros(2)), "do not fill 3 groups"),
        (lambda: GroupSparse(4, 3, 2, torch.ones(4), torch.zeros(4)), "do not fill 2 groups"),
        (lambda: RowSparse(9, zero, torch.ones(2, 3)), "kept"),
        (lambda: RowSparse(10, zero, torch.ones(1, 3)), "not whole rows of 3"),
        (lambda: Seeded(1, 0, torch.ones(2)), "do not fit"),
        (lambda: Seeded(2**32, 0, torch.ones(2)), "at most 4294967295 elements; send smaller buckets"),
        (lambda: Seeded(1, -1, one), "a seed lies in"),
        (lambda: Triangle(2, one), "has 3 values"),
        (lambda: Triangle.from_matrix(torch.ones(2, 3)), "square"),
        (lambda: CholeskyFactor(2, one), "has 3 values"),
        (lambda: CholeskyFactor(1, one, damping=-1), "damping"),
        (lambda: CholeskyFactor(1, one, damping=float("nan")), "damping"),
        (lambda: Codes(9, "sign", 1, torch.zeros(1, dtype=torch.uint8), one), "need 2 bytes and 1 scales"),
        (lambda: Codes(9, "sign", 2, torch.zeros(3, dtype=torch.uint8), one), "codes of"),
        (lambda: Codes(9, "morse", 1, torch.zeros(2, dtype=torch.uint8), one), "no codebook is called 'morse'"),
        (lambda: Sparse(9, zero, torch.ones(1, dtype=torch.int32)).pack(), "cannot carry torch.int32"),
        (lambda: Dense(torch.ones(1, dtype=torch.complex64)).pack(), "cannot carry torch.complex64"),
        (lambda: Sparse(2**32, zero, one).pack(), "send smaller buckets"),
    ):
        with pytest.raises(PayloadError, match=message):
            build()


@pytest.mark.parametrize("device", DEVICES)
def test_positions_of_a_seed_are_drawn_on_the_cpu_and_leave_the_global_generator_alone(device: str) -> None:
    before = torch.random.get_rng_state()
    payload = Seeded(1000, 42, torch.ones(100, device=device))
    assert torch.equal(payload.positions.cpu(), seeded_positions(1000, 100, 42))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("numel", "count"), [(0, 0), (1, 1), (10, 10), (1000, 0), (1000, 249), (1000, 251), (10**9, 20)]
)
def test_seeded_positions_ascend_and_differ_by_seed(numel: int, count: int) -> None:
    positions = seeded_positions(numel, count, 3)
    assert positions.numel() == count
    assert (positions.diff() > 0).all()
    assert count == 0 or 0 <= positions[0] <= positions[-1] < numel
    assert torch.equal(positions, seeded_positions(numel, count, 3))
    if 0 < count < numel:
        assert not torch.equal(positions, seeded_positions(numel, count, 4))


@pytest.mark.parametrize("count", [10, 40])
def test_seeded_positions_are_uniform(count: int) -> None:
    """Each of 100 elements is drawn with probability count / 100: five standard deviations over 500 seeds."""
    drawn = torch.zeros(100)
    for seed in range(500):
        drawn[seeded_positions(100, count, seed)] += 1
    p = count / 100
    assert (drawn - 500 * p).abs().max() < 5 * (500 * p * (1 - p)) ** 0.5


def test_seeded_payloads_with_other_positions_add_as_sparse() -> None:
    a, b = Seeded(1000, 1, torch.ones(10)), Seeded(1000, 2, torch.ones(10))
    assert isinstance(a.add(a), Seeded)
    assert isinstance(a.add(b), Sparse)
    assert torch.equal(a.add(b).to_dense(), a.to_dense() + b.to_dense())
    assert isinstance(a.slice(10, 500), Sparse)
    assert a.slice(0, 1000) is a


@pytest.mark.parametrize(
    ("codebook", "bits", "values"),
    [
        ("sign", 1, [-1, 1]),
        ("ternary", 2, [0, 0, -1, 1]),
        ("levels", 2, [0, 1, -2, -1]),
        ("levels", 4, [0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1]),
        (
            "natural",
            4,
            [0, 1, 0.5, 0.25, 2**-3, 2**-4, 2**-5, 2**-6, 0, -1, -0.5, -0.25, -(2**-3), -(2**-4), -(2**-5), -(2**-6)],
        ),
    ],
)
def test_codebooks(codebook: str, bits: int, values: list[float]) -> None:
    assert find_codebook(codebook).values(bits).tolist() == values
    codes = torch.arange(2**bits)
    payload = packed_codes(codes, codebook=codebook, bits=bits, scales=torch.tensor([0.5]))
    assert payload.to_dense().tolist() == [value / 2 for value in values]


def test_natural_reaches_the_smallest_normal_number() -> None:
    values = find_codebook("natural").values(8)
    assert values[127] == torch.finfo(torch.float32).smallest_normal
    assert (values[1:127] == 2 * values[2:128]).all()


def test_negative_levels_may_be_given_as_they_are() -> None:
    levels = torch.tensor([-7, -1, 0, 3, 7])
    payload = packed_codes(levels, codebook="levels", bits=4, scales=torch.tensor([2.0]))
    assert payload.to_dense().tolist() == [-14, -2, 0, 6, 14]


def test_blocks_have_their_own_scale() -> None:
    codes = torch.ones(10, dtype=torch.uint8)
    scales = torch.tensor([1.0, 2.0, 3.0])
    payload = packed_codes(codes, codebook="levels", bits=4, scales=scales, block_numel=4)
    assert payload.to_dense().tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert payload.alignment == 4
    assert payload.slice(4, 10).to_dense().tolist() == [2, 2, 2, 2, 3, 3]


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


def test_a_narrow_factor_stays_positive_definite_where_a_narrow_triangle_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64))
    matrix = q @ torch.diag(torch.logspace(0, -6, 64, dtype=torch.float64)) @ q.T
    factor = CholeskyFactor.from_factor(torch.linalg.cholesky(matrix).half())
    restored = factor.factor.double() @ factor.factor.double().T
    assert torch.linalg.eigvalsh(restored).min() > 0
    assert torch.linalg.eigvalsh(Triangle.from_matrix(matrix.half()).matrix.double()).min() < 0


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
