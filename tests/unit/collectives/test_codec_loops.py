"""The native loops of packing, unpacking and adding agree with the reference path bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from collectives.kernels.library import kernels_in_use
from collectives.payloads.base import Payload, PayloadError, unpack
from collectives.payloads.bundle import UnreducedSum
from collectives.payloads.codec.bits import LEVELS, NATURAL, SIGN, TERNARY, pack_bits, unpack_bits
from collectives.payloads.codec.index_sets import CODINGS, cheapest_coding, decode_indices, encode_indices
from collectives.payloads.codec.philox import seeded_positions
from collectives.payloads.codec.values import add_values, to_value_dtype
from collectives.payloads.codes import Codes, TwoMeans, num_scales
from collectives.payloads.fields import Reader, as_bytes
from collectives.payloads.group_sparse import GroupSparse
from collectives.payloads.packed_bundle import SparseBundle
from collectives.payloads.sparse import Sparse
from tests.testing.loops import assert_gives_what_the_reference_gives, needs_loops, same
from tests.testing.payloads import packed_codes

pytestmark = needs_loops

HALVES = torch.float16, torch.bfloat16
DTYPES = *HALVES, torch.float32
CODED = [(SIGN, 1), (TERNARY, 2), (LEVELS, 2), (LEVELS, 4), (LEVELS, 8), (NATURAL, 4), (NATURAL, 8)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bits(x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    width = seed % 33
    codes = x.contiguous().view(torch.int32).to(torch.int64)
    packed = pack_bits(codes, width)
    return [packed, unpack_bits(packed, x.numel(), width)]


def index_sets(x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    universe = x.numel() * [1, 2, 50, 300, 2**18][seed % 5] + 1
    indices = torch.randint(universe, (x.numel() // 2,), generator=generator(seed)).unique().to(x.device)
    results = []
    for coding in CODINGS if universe < 2**20 else ("coo", "elias_fano"):
        fields = encode_indices(indices, universe, coding)  # type: ignore[arg-type]
        packed = [as_bytes(field) for field in fields if isinstance(field, torch.Tensor)]
        body = torch.cat([*packed, torch.empty(0, dtype=torch.uint8, device=x.device)])
        results += [body, decode_indices(Reader(body), indices.numel(), universe, coding)]  # type: ignore[arg-type]
    return results


def coded(like: torch.Tensor, seed: int) -> Codes:
    numel = like.numel()
    book, width = CODED[seed % len(CODED)]
    block_numel = [0, 1, 8, 100, 4096, 5000][seed % 6]
    packed = torch.randint(256, (-(-numel * width // 8),), generator=generator(seed)).to(torch.uint8)
    scales = torch.randn(num_scales(numel, block_numel), generator=generator(seed))
    scales = scales.to(like.device, DTYPES[seed % 3])
    return Codes(numel, book.name, width, packed.to(like.device), scales, block_numel)


def added(payload: Payload, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    plus, minus = x.clone(), x.clone()
    payload.add_to_(plus, divisor=[1, 2, 3, 0.5][seed % 4])
    payload.subtract_from_(minus)
    return [plus, minus]


def sums_of_codes(x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    other = coded(x, seed)
    other.packed = other.packed.flip(0)
    return added(coded(x, seed), x, seed) + added(UnreducedSum([coded(x, seed), other]), x, seed)[:1]


def written_codes(x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Return a sum of codes written to adjacent tensors, or added to zeros if no loop writes it."""
    terms = [coded(x, seed) for _ in range(1 + seed % 3)]
    for number, term in enumerate(terms):
        term.packed = term.packed.roll(number)
    if seed % 7 == 0:
        terms[0] = dataclasses.replace(terms[0], packed=terms[0].packed[:0], scales=terms[0].scales[:0])  # only zeros
    total, divisor = UnreducedSum(terms), [1, 2, 3, 0.5][seed % 4]
    out = torch.full_like(x, torch.nan)
    borders = sorted((seed * factor) % (x.numel() + 1) for factor in (7, 31, 1009)[: seed % 4])
    is_written = total.write_to(out.tensor_split(borders), divisor=divisor)
    assert is_written == (kernels_in_use(x.device.type) == "native")
    if not is_written:
        total.add_to_(out.zero_(), divisor=divisor)
    return [out]


def two_means(x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    mask = torch.rand(x.numel(), generator=generator(seed)) < 0.5
    return added(TwoMeans(x.numel(), -0.1, 0.3, pack_bits(mask.to(x.device), 1)), x, seed)


def values_of(x: torch.Tensor, seed: int) -> torch.Tensor:
    return to_value_dtype(x, DTYPES[seed % 3])


def sparse(x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    kept = seeded_positions(x.numel(), x.numel() // 10, seed).to(x.device)
    payload = unpack(Sparse(x.numel(), kept, values_of(x[kept], seed)).pack())
    return added(payload, x, seed)


def group_sparse(x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    size = [8, 100, 1024][seed % 3]
    num_groups, k = -(-x.numel() // size), 1 + seed % 3
    indices = torch.rand(num_groups, size, generator=generator(seed)).argsort(1)[:, :k].sort(1).values.view(-1)
    if num_groups:
        indices[-k:] = 0
        indices = indices[: 1 - k or None]
    values = torch.ones(indices.numel(), dtype=DTYPES[seed % 3], device=x.device) / 3
    payload = GroupSparse(x.numel(), size, k, values, indices.to(x.device))
    return added(unpack(payload.pack()), x, seed)


def received_groups(x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Return the contents of a message whose indices may be damaged, or nothing if the damage is detected."""
    size, numel = [8, 100, 1024, 2**20 + 1][seed % 4], x.numel()
    num_groups, k = -(-numel // size), 1 + seed % 3
    last = min(k, numel - (num_groups - 1) * size) if numel else 0
    chosen = (
        torch.rand(num_groups, min(size, 2000), generator=generator(seed)).argsort(1)[:, :k].sort(1).values.view(-1)
    )
    indices = chosen[: len(chosen) - k + last]
    indices[len(indices) - last :] = torch.arange(last)
    packed = GroupSparse(numel, size, k, to_value_dtype(torch.ones(len(indices)), DTYPES[seed % 3]), indices).pack()
    if seed % 2:
        byte = int(torch.randint(24, packed.numel() + 1, (), generator=generator(seed)))
        packed[byte : byte + 1] ^= 1 << seed % 8
    around = torch.zeros(packed.numel() + seed % 9, dtype=torch.uint8, device=x.device)[seed % 9 :]
    try:
        payload = unpack(around.copy_(packed))
    except PayloadError:
        return []
    return [payload.positions, payload.indices.long(), payload.values]


def sixteen_bits(x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    rounded = [to_value_dtype(x, dtype, 1 + seed % 3) for dtype in HALVES]
    return [*rounded, *(add_values(half, half.flip(0)) for half in rounded)]


LOOPS: dict[str, Callable[[torch.Tensor, int], list[torch.Tensor]]] = {
    "bits": bits,
    "index sets": index_sets,
    "codes": sums_of_codes,
    "two means": two_means,
    "sparse": sparse,
    "group sparse": group_sparse,
    "received groups": received_groups,
    "sixteen bits": sixteen_bits,
    "positions": lambda x, seed: [seeded_positions(x.numel(), seed * 31 % (x.numel() + 1), seed)],
}


def test_a_sum_of_codes_is_written_as_it_would_be_added_to_zeros(cases: range) -> None:
    assert_gives_what_the_reference_gives(written_codes, cases)


def test_what_is_divided_to_nothing_is_written_without_its_sign() -> None:
    written, added = torch.empty(8), torch.zeros(8)
    payload = packed_codes(-torch.ones(8), codebook="levels", bits=8, scales=torch.tensor([1e-45]))
    assert payload.write_to([written], divisor=3)
    payload.add_to_(added, divisor=3)
    assert same(written, torch.zeros(8))
    assert same(written, added)


@pytest.mark.parametrize(
    "payload",
    [
        Codes(8, "sign", 1, torch.zeros(1, dtype=torch.uint8), torch.ones(1)),
        Codes(8, "levels", 8, torch.zeros(8, dtype=torch.uint8), torch.ones(2), 4),
        TwoMeans(8, -1.0, 1.0, torch.zeros(1, dtype=torch.uint8)),
    ],
)
def test_codes_are_not_read_beyond_their_end(payload: Payload) -> None:
    with pytest.raises(PayloadError, match="8 elements cannot be added to a tensor of 64"):
        payload.add_to_(torch.zeros(64))


@pytest.mark.parametrize("outside", [2**45, 64, -(2**45)])
@pytest.mark.parametrize("numel", [64, 63, 2**20])
def test_no_bit_is_set_outside_of_a_bitmap(numel: int, outside: int) -> None:
    indices = torch.tensor([*range(1, 14), outside if outside < 64 else outside - 64 + numel])
    payload = Sparse(numel, indices, torch.ones(14))
    assert cheapest_coding(14, numel) in ("bitmap", "elias_fano")
    with pytest.raises(IndexError, match=r"outside the .* bits"):
        payload.pack()


@pytest.mark.parametrize("outside", [2**45, 40, -(2**45), -1])
def test_no_value_of_a_batch_is_written_outside_of_its_payload(outside: int) -> None:
    """With as many values as elements, positions are not sent."""
    positions = torch.tensor([*range(14), outside])
    with pytest.raises(IndexError, match="outside the elements of its payload"):
        SparseBundle([15], [15], positions, torch.ones(15)).pack()


def test_every_half_is_read_as_it_is_also_where_subnormal_floats_are_flushed_to_zero() -> None:
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    expected = halves.float() + 0  # a sparse payload contains no -0
    payload = Sparse(halves.numel(), torch.arange(halves.numel()), halves)
    torch.set_flush_denormal(True)
    try:
        assert same(payload.to_dense(), expected)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_gives_what_the_reference_gives(name: str, cases: range) -> None:
    assert_gives_what_the_reference_gives(LOOPS[name], cases)


@pytest.mark.parametrize("k", [1, 4, 7, 10])
def test_indices_of_groups_are_unpacked_by_the_loop_itself(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain code repeats the check of indices that the loop rejects, and would hide a loop that rejects all of them."""
    indices = (torch.arange(k) * 9 + 1).repeat(23)
    sent = GroupSparse(23 * 100, 100, k, torch.ones(23 * k), indices)
    message = sent.pack()
    monkeypatch.delattr("collectives.payloads.group_sparse.unpack_bits")
    received = unpack(message)
    assert isinstance(received, GroupSparse)
    assert torch.equal(received.positions, sent.positions)
