"""Dense, sparse and seeded payloads: their sums change kind, and zeros travel as little as possible."""

from __future__ import annotations

import pytest
import torch

from collectives.payloads import CholeskyFactor, Codes, Dense, GroupSparse, RowSparse, Seeded, Sparse, Triangle
from collectives.payloads.base import PayloadError, unpack
from tests.testing.payloads import make


def test_dense_shares_its_tensor_decodes_in_place_and_sums_integers_exactly() -> None:
    values = torch.arange(4.0)
    assert Dense(values).wire is values
    packed = Dense(values).pack()
    decoded = unpack(packed)
    assert isinstance(decoded, Dense)
    packed[16:] = 0
    assert not decoded.values.any()
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


def test_sums_of_sparse_payloads_are_unions_in_which_cancelled_values_stay() -> None:
    a, b = make("group_sparse", 1024, torch.float16, 0), make("group_sparse", 1024, torch.float16, 1)
    total = a.payload.add(b.payload)
    assert isinstance(total, Sparse)
    assert total.indices.tolist() == (a.sent | b.sent).nonzero().view(-1).tolist()
    one = Sparse(1000, torch.tensor([3, 5]), torch.tensor([1.0, 2.0]))
    total = one.add(Sparse(1000, torch.tensor([3, 9]), torch.tensor([-1.0, 2.0])))
    assert isinstance(total, Sparse)
    assert (total.indices.tolist(), total.values.tolist()) == ([3, 5, 9], [0, 2, 2])
    assert one.add(Sparse(1000, one.indices, -one.values)).nbytes == 16


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


def test_seeded_payloads_with_other_positions_add_as_sparse() -> None:
    a, b = Seeded(1000, 1, torch.ones(10)), Seeded(1000, 2, torch.ones(10))
    assert isinstance(a.add(a), Seeded)
    assert isinstance(a.add(b), Sparse)
    assert torch.equal(a.add(b).to_dense(), a.to_dense() + b.to_dense())
    assert isinstance(a.slice(10, 500), Sparse)
    assert a.slice(0, 1000) is a


def test_wide_sparse_values_travel_dense_under_their_own_id() -> None:
    payload = Sparse(100, torch.arange(99), torch.ones(99))
    payload.tensor_id = 7
    again = unpack(payload.pack())
    assert isinstance(again, Dense)
    assert again.tensor_id == 7
    assert torch.equal(again.to_dense(), payload.to_dense())


def test_zeros_have_no_entries_unless_others_are_kept() -> None:
    nothing = torch.zeros(4)
    for payload in (Sparse(100, torch.arange(4), nothing), GroupSparse(20, 10, 2, nothing, torch.tensor([0, 1, 0, 1]))):
        assert payload.num_entries == unpack(payload.pack()).num_entries == 0
        assert not payload.to_dense().any()
        dense = torch.ones(payload.numel)
        payload.clear_in_(dense)
        assert dense.all()
    assert unpack(Sparse(100, torch.tensor([5, 6]), torch.tensor([0.0, 1.0])).pack()).num_entries == 2


def test_negative_zero_becomes_zero() -> None:
    values = torch.tensor([-0.0, 1.0])
    for payload in (
        Sparse(9, torch.tensor([0, 1]), values),
        GroupSparse(9, 9, 2, values, torch.tensor([0, 1])),
        RowSparse(2, torch.tensor([0, 1]), values[:, None]),
    ):
        assert not payload.values.signbit().any()
