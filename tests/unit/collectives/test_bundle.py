"""Bundles, the members of a total, and unreduced sums."""

from __future__ import annotations

import pytest
import torch

from collectives.payloads import Bundle, Dense, GroupSparse, RowSparse, Sparse, Triangle, UnreducedSum, members
from collectives.payloads.base import Payload, PayloadError, unpack
from collectives.payloads.bundle import mean_over_senders_
from collectives.schedule.rounds import Layout
from tests.testing.payloads import Example, bundled, cut, make, packed_codes

NUMELS = [70, 0, 1, 300, 9]
NAMES = ["sparse", "dense", "group_sparse", "group_sparse", "dense"]


def message(seed: int, dtype: torch.dtype = torch.float16) -> Example:
    """Return a rank's message for five layers."""
    return bundled([make(name, numel, dtype, seed) for name, numel in zip(NAMES, NUMELS, strict=True)])


def borders(payload: Payload, num_parts: int) -> list[int]:
    return [0, *(stop for _, stop in Layout.of(payload).cuts(num_parts))]


def assert_units(total: Payload, expected: torch.Tensor) -> None:
    units = members(total, NUMELS)
    assert [unit.numel for unit in units] == NUMELS
    for unit, dense in zip(units, expected.split(NUMELS), strict=True):
        assert torch.equal(unit.to_dense(), dense)


def test_bundles_inside_are_opened_and_on_the_wire_refused() -> None:
    inner = Bundle([Dense(torch.ones(1)), Dense(torch.ones(2))])
    bundle = Bundle([inner, Dense(torch.ones(3)), inner])
    assert [member.numel for member in bundle.payloads] == [1, 2, 3, 1, 2]
    packed = Bundle([Dense(torch.ones(9))]).pack()
    packed[24 + 2] = Bundle.code
    with pytest.raises(PayloadError, match="cannot hold another bundle"):
        unpack(packed)
    with pytest.raises(PayloadError, match="at least one payload"):
        Bundle([])


def test_a_bundle_is_what_its_members_are() -> None:
    dense, narrow = Dense(torch.ones(4)), Dense(torch.ones(4).half())
    sparse, triangle = Sparse(4, torch.tensor([1]), torch.ones(1)), Triangle.from_matrix(torch.eye(3))
    codes = packed_codes(torch.ones(4), codebook="sign", bits=1, scales=torch.ones(1))
    for payloads, elementwise, addable in (
        ([dense, triangle], True, True),
        ([dense, narrow], False, True),
        ([dense, sparse], False, True),
        ([dense, codes], False, False),
    ):
        bundle = Bundle(payloads)
        assert (bundle.elementwise, bundle.addable) == (elementwise, addable)
    groups = GroupSparse(32, 16, 1, torch.ones(2), torch.zeros(2, dtype=torch.int64))
    assert [Bundle([first, groups]).alignment for first in (groups, Dense(torch.ones(3)))] == [16, 35]
    assert Bundle([Dense(torch.ones(3)), dense]).alignment == 1


def test_elementwise_members_share_one_wire() -> None:
    bundle = Bundle([Dense(torch.arange(4.0)), Triangle.from_matrix(torch.eye(2)), Dense(torch.ones(0))])
    assert bundle.wire.tolist() == [0, 1, 2, 3, 1, 0, 1]
    total = bundle.with_wire(3 * bundle.wire)
    assert torch.equal(total.to_dense(), 3 * bundle.to_dense())


def test_borders_lie_where_members_can_be_cut() -> None:
    """Balanced borders of 20 + 64 + 4 elements are 30 and 59; rows of 16 start at 20, 36, 52, ..."""
    rows = RowSparse(64, torch.tensor([1]), torch.ones(1, 16))
    bundle = Bundle([Dense(torch.ones(20)), rows, Triangle.from_matrix(torch.ones(2, 2))])
    assert borders(bundle, 3) == [0, 36, 52, 88]
    assert borders(bundle, 88)[-3:] == [84, 88, 88]
    assert [part.numel for part in cut(bundle, 3)] == [36, 16, 36]
    with pytest.raises(PayloadError, match="can be cut at multiples of 16"):
        bundle.slice(0, 30)


def test_groups_are_split_where_whole_ones_would_make_parts_uneven() -> None:
    groups = GroupSparse(64, 16, 1, torch.ones(4), torch.tensor([3, 3, 15, 0]))
    bundle = Bundle([Dense(torch.ones(20)), groups])
    assert borders(bundle, 2) == [0, 42, 84]
    assert isinstance(bundle.slice(42, 84), Sparse)
    assert torch.equal(torch.cat([part.to_dense() for part in cut(bundle, 5)]), bundle.to_dense())
    assert borders(groups, 2) == [0, 32, 64]
    assert isinstance(groups.slice(16, 48), GroupSparse)
    assert borders(groups, 3) == [0, 22, 43, 64]
    large = GroupSparse(11 * 16, 16, 1, torch.ones(11), torch.zeros(11, dtype=torch.int64))
    assert borders(large, 10)[:3] == [0, 18, 36]  # 2 groups and 9 times one: up to 1.8 times the mean
    assert borders(large, 5)[:3] == [0, 36, 71]  # 3 groups and 4 times two: 1.36 times
    assert borders(large, 3) == [0, 64, 128, 176]  # 1.09 times


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 8])
def test_members_of_a_bundle_of_ring_pieces(num_parts: int) -> None:
    """The pieces that a ring concatenates are split at the layers' borders again."""
    a, b = message(0), message(1)
    chunks = [x.add(y) for x, y in zip(cut(a.payload, num_parts), cut(b.payload, num_parts), strict=True)]
    assert_units(unpack(Bundle(chunks).pack()), (a.dense + b.dense).half().float())


def test_members_of_a_message_of_its_dense_total_and_of_terms() -> None:
    a, b, c = (message(seed) for seed in range(3))
    assert isinstance(a.payload, Bundle)
    assert members(a.payload, NUMELS)[0] is a.payload.payloads[0]
    assert members(a.payload, [sum(NUMELS)])[0] is a.payload
    assert_units(a.payload, a.dense)
    assert_units(Dense(a.dense), a.dense)
    assert_units(UnreducedSum([a.payload, b.payload, c.payload]), a.dense + b.dense + c.dense)
    with pytest.raises(PayloadError, match="cannot be cut"):
        members(Dense(torch.ones(9)), [4, 4])
    other = make("dense", sum(NUMELS), torch.float16, 1)  # another kind is added at the borders of the members
    assert torch.equal(a.payload.add(other.payload).to_dense(), (a.dense + other.dense).half().float())


@pytest.mark.parametrize("divisor", [1, 2, 3, 5])
def test_terms_are_added_in_rank_order_in_fp32_and_then_divided(divisor: int) -> None:
    ranks = [make(name, 1025, torch.float16, seed) for seed, name in enumerate(["sparse", "dense", "group_sparse"])]
    serial = (ranks[0].dense + ranks[1].dense) + ranks[2].dense
    terms = UnreducedSum([rank.payload for rank in ranks])
    out = torch.zeros(1025)
    terms.add_to_(out, divisor=divisor)
    assert torch.equal(out, serial / divisor)
    out = torch.ones(1025)
    terms.add_to_(out, divisor=divisor)
    torch.testing.assert_close(out, 1 + serial / divisor)
    half = torch.zeros(1025, dtype=torch.float16)
    terms.add_to_(half, divisor=divisor)
    assert torch.equal(half, (serial / divisor).half())


def test_terms_share_the_payload_interface() -> None:
    ranks = [make("group_sparse", 1024, torch.float32, seed) for seed in range(2)]
    terms = UnreducedSum([rank.payload for rank in ranks])
    total = ranks[0].dense + ranks[1].dense
    assert (terms.numel, terms.alignment, terms.num_entries) == (1024, 64, 96)
    assert terms.nbytes == sum(rank.payload.nbytes for rank in ranks)
    assert torch.equal(torch.cat([part.to_dense() for part in cut(terms, 3)]), total)
    dense = torch.ones(1024)
    terms.clear_in_(dense)
    assert torch.equal(dense == 0, ranks[0].sent | ranks[1].sent)
    dense = total.clone()
    terms.subtract_from_(dense)
    assert dense.abs().max() < 1e-6


def test_terms_merge_into_what_can_travel() -> None:
    sparse = UnreducedSum([make("group_sparse", 1024, torch.float32, seed).payload for seed in range(3)])
    assert isinstance(sparse.merged(), Sparse)
    coded = UnreducedSum([make("codes-sign", 1024, torch.float32, seed).payload for seed in range(3)])
    assert isinstance(coded.merged(), Dense)
    for terms in (sparse, coded):
        assert torch.equal(unpack(terms.merged().pack()).to_dense(), terms.to_dense())
        with pytest.raises(PayloadError, match="cannot be sent"):
            terms.pack()
    with pytest.raises(PayloadError, match="at least one term"):
        UnreducedSum([])
    for numels in ((1, 2), (2, 1)):
        with pytest.raises(PayloadError, match="payloads of 1 and 2 elements cannot be added"):
            UnreducedSum([Dense(torch.ones(numel)) for numel in numels])


def sent_at(kind: str, positions: list[int], values: torch.Tensor) -> Payload:
    """Return a payload of 12 elements that sends these values, of which some are zero."""
    indices = torch.tensor(positions)
    match kind:
        case "sparse":
            return Sparse(12, indices, values)
        case "group_sparse":  # two of each group of four
            return GroupSparse(12, 4, 2, values, indices % 4)
        case "rows":
            return RowSparse(12, indices[::2] // 2, values.view(-1, 2))
        case _:
            return Bundle([Sparse(4, indices[:2], values[:2]), Sparse(8, indices[2:] - 4, values[2:])])


@pytest.mark.parametrize("kind", ["sparse", "group_sparse", "rows", "bundle"])
def test_a_mean_over_senders_counts_zeros_that_are_sent(kind: str) -> None:
    of_ranks = [[0, 1, 4, 5, 8, 9], [2, 3, 4, 5, 8, 9], [0, 1, 6, 7, 8, 9]]  # nobody sends 10 and 11
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 6, generator=generator)
    values[0, 1:3] = values[2, 5] = 0
    terms = [sent_at(kind, positions, row) for positions, row in zip(of_ranks, values, strict=True)]
    expected = torch.zeros(12, dtype=torch.float64)
    for element in range(12):
        sent = [row[at.index(element)].double() for at, row in zip(of_ranks, values, strict=True) if element in at]
        if sent:
            expected[element] = sum(sent) / len(sent)
    mean = mean_over_senders_(UnreducedSum(terms).to_dense(), terms)
    torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=0)
