"""Every collective x payload kind x number of ranks x length: correct, equal on all ranks, bytes as documented."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from collectives.allreduce import Allgather, Ring
from collectives.options import Incompatible, OptionError
from collectives.payloads import Bundle, Dense, GroupSparse, Sparse, members
from collectives.payloads.base import Payload, PayloadError
from collectives.payloads.sparse import Seeded
from collectives.recoding import EVERY_RANK
from collectives.schedule import execution
from collectives.schedule.execution import PackedPieces
from collectives.schedule.rounds import LayerStretch, Layout, Piece, ReceiveEffect, Round, leaves
from collectives.server import Server
from collectives.transport.base import Pending, Receive, Send, wait_all
from gradwire.exchange.reducer import keep_in
from tests.testing.collectives import COLLECTIVES, Result, check, clone, key_of, refusal
from tests.testing.memory_transport import MemoryTransport, MemoryWires, run_threads
from tests.testing.payloads import make
from tests.testing.thinned import checkered

error_bound = pytest.importorskip("bench.extensions.microbenchmarks.serial").error_bound

KINDS = (
    *("dense", "sparse", "group_sparse", "row_sparse", "seeded", "sparse_codes", "sparse_codes-sigma"),
    *("codes-levels", "triangle", "cholesky", "bundle"),
)
# Of all world sizes, 1, 3, 4 and 7 show every shape of trees, groups and remainders.
LONG = (2, 5)
SOME_WORLD_SIZES = (3, 4, 7)
WORLD_SIZES = (*SOME_WORLD_SIZES, *(pytest.param(n, marks=pytest.mark.long) for n in LONG))


def lengths(world_size: int) -> list[int]:
    return sorted({0, 1, world_size - 1, world_size, world_size + 1, 10_007})


def run(name: str, payloads: Sequence[Sequence[Payload]]) -> list[list[Result]]:
    """Return [rank][payload] -> (decoded total, bytes sent) when rank r contributes payloads[i][r]."""

    def rank(transport: MemoryTransport) -> list[Result]:
        collective = COLLECTIVES[name]().bind(transport)
        results = []
        for contributions in payloads:
            before = transport.traffic["gradient"].nbytes
            total = collective.sum(contributions[transport.rank], key_of(contributions[0]))
            results.append((total.to_dense(), transport.traffic["gradient"].nbytes - before))
        collective.close()
        return results

    return run_threads(rank, len(payloads[0]))


def cases_of_sums() -> list[Any]:
    """Return every collective with numbers of ranks and kinds; variants only where groups and shards are uneven."""
    plain, variants = ([name for name in COLLECTIVES if (":" in name) is is_variant] for is_variant in (False, True))
    rare = [pytest.param(*each, marks=pytest.mark.long) for each in itertools.product(plain, LONG, KINDS)]
    return [*checkered(plain, (1, *SOME_WORLD_SIZES), KINDS), *checkered(variants, (4, 7), KINDS), *rare]


@pytest.mark.parametrize(("name", "world_size", "kind"), cases_of_sums())
def test_sum(name: str, world_size: int, kind: str) -> None:
    payloads = [[make(kind, n, torch.float32, rank).payload for rank in range(world_size)] for n in lengths(world_size)]
    if reason := refusal(COLLECTIVES[name](), payloads[0][0]):
        assert "use" in reason or "takes" in reason  # the reason says what would work
        return
    results = run(name, [[clone(payload) for payload in contributions] for contributions in payloads])
    for contributions, by_rank in zip(payloads, zip(*results, strict=True), strict=True):
        check(name, contributions, by_rank)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", ["ring", "halving_doubling", "tree", "tree:segment_bytes=4000"])
def test_long_tensors_are_received_in_place(name: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of long tensors are parts of the tensor itself; slow ranks must not see them change too early."""
    monkeypatch.setattr(execution, "EAGER_BYTES", 0)
    payloads = [[make("dense", n, torch.float32, rank).payload for rank in range(world_size)] for n in (1, 5, 10_007)]
    results = run(name, [[clone(payload) for payload in contributions] for contributions in payloads])
    for contributions, by_rank in zip(payloads, zip(*results, strict=True), strict=True):
        check(name, contributions, by_rank)


class InStepTransport(MemoryTransport):
    """A transport like NCCL: the messages of one post are one group call, and the next begins after it is complete."""

    in_step = True

    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        pendings = super().post(sends, receives)
        wait_all(pendings)
        return pendings

    def view(self, ranks: Sequence[int]) -> InStepTransport:
        members = [self.names[rank] for rank in ranks]
        return InStepTransport(self.wires, list(ranks).index(self.rank), members, self.ledger)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kind", ["dense", "sparse", "codes-levels"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_group_calls_in_step(name: str, kind: str, world_size: int) -> None:
    payloads = [make(kind, 1001, torch.float32, rank).payload for rank in range(world_size)]
    if refusal(COLLECTIVES[name](), payloads[0]):
        return

    def rank(transport: MemoryTransport) -> Result:
        in_step = InStepTransport(transport.wires, transport.rank, list(range(world_size)), transport.ledger)
        collective = COLLECTIVES[name]().bind(in_step)
        total = collective.sum(clone(payloads[transport.rank]), key_of(payloads[0]))
        collective.close()
        return total.to_dense(), transport.traffic["gradient"].nbytes

    check(name, payloads, run_threads(rank, world_size))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("name", [name for name in COLLECTIVES if "native" not in name])
def test_sum_of_short_floats(name: str, kind: str, dtype: torch.dtype) -> None:
    payloads = [make(kind, 1001, dtype, rank).payload for rank in range(5)]
    results = run(name, [[clone(payload) for payload in payloads]])
    check(name, payloads, [by_payload[0] for by_payload in results], itemsize=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "kind", "world_size"),
    checkered(
        [name for name in COLLECTIVES if not re.search("native|server", name)],
        ["dense", "sparse", "group_sparse", "row_sparse", "seeded", "sparse_codes", "bundle"],
        SOME_WORLD_SIZES,
    ),
)
def test_what_rounding_takes_off_is_kept_by_one_rank(name: str, kind: str, dtype: torch.dtype, world_size: int) -> None:
    """The total plus the parts that the ranks keep is the exact sum, up to the precision of fp32."""
    payloads = [make(kind, 1000, dtype, rank).payload for rank in range(world_size)]
    if refusal(COLLECTIVES[name](), payloads[0]):
        return

    def rank(transport: MemoryTransport) -> tuple[torch.Tensor, torch.Tensor]:
        collective = COLLECTIVES[name]().bind(transport)
        payload = clone(payloads[transport.rank])
        members = leaves(payload)
        kept = torch.zeros(payload.numel)
        for leaf, part in zip(members, kept.split([leaf.numel for leaf in members]), strict=True):
            leaf.keep_lost = keep_in(part)
        payload = members[0] if len(members) == 1 else Bundle(members)
        total = collective.sum(payload, key_of(payload))
        collective.close()
        return total.to_dense(), kept

    results = run_threads(rank, world_size)
    exact, _ = error_bound(payloads)
    magnitude = sum(payload.to_dense().abs() for payload in payloads)
    found = results[0][0].double() + sum(kept.double() for _, kept in results)
    assert ((found - exact).abs() <= world_size * 2**-23 * magnitude).all()
    if kind == "dense" and name in ("ring", "halving_doubling", "tree", "pool"):
        assert not torch.equal(results[0][0].double(), exact)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_integers_are_exact_fp16_saturates_and_nan_stays(name: str) -> None:
    rows = torch.randint(-(2**20), 2**20, (3, 1001), generator=torch.Generator().manual_seed(1))
    values = torch.tensor([60_000.0, -60_000.0, 1.0, torch.nan, 0.0], dtype=torch.float16)
    payloads = [[Dense(row.clone()) for row in rows], [Dense(values.clone()) for _ in rows]]
    limit = 3 * 60_000.0 if name == "allgather" else torch.finfo(torch.float16).max  # terms are added in fp32
    expected = torch.tensor([limit, -limit, 3.0, torch.nan, 0.0])
    for (integers, _), (floats, _) in run(name, payloads):
        assert torch.equal(integers.double(), rows.sum(0).double())  # below 2^24
        torch.testing.assert_close(floats, expected, rtol=1e-3, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if "allgather" not in name])
def test_max(name: str) -> None:
    rows = torch.randn(5, 101, generator=torch.Generator().manual_seed(2))

    def rank(transport: MemoryTransport) -> tuple[torch.Tensor, torch.Tensor]:
        collective = COLLECTIVES[name]().bind(transport)
        mixed = Bundle([Dense(rows[transport.rank].clone()), Dense(rows[transport.rank].double())])
        totals = members(collective.sum(mixed, (0, 1), op="max"), [101, 101])
        with pytest.raises((PayloadError, Incompatible), match=r"maximum|element by element"):
            collective.sum(Sparse(3, torch.tensor([1]), torch.tensor([1.0])), (0,), op="max")
        collective.close()
        return totals[0].to_dense(), totals[1].to_dense()

    for single, double in run_threads(rank, 5):
        assert torch.equal(single, rows.max(0).values)
        assert torch.equal(double, rows.max(0).values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_broadcast(kind: str, world_size: int) -> None:
    source = world_size - 1
    expected = make(kind, 1001, torch.float32).payload

    def rank(transport: MemoryTransport) -> tuple[torch.Tensor, int]:
        mine = expected if transport.rank == source else None
        total = Ring().bind(transport).broadcast(mine, source, (0,))
        return total.to_dense(), transport.traffic["gradient"].nbytes

    results = run_threads(rank, world_size)
    assert all(torch.equal(total, expected.to_dense()) for total, _ in results)
    assert sum(sent for _, sent in results) == (world_size - 1) * expected.nbytes


@pytest.mark.parametrize(
    ("name", "payloads", "nbytes"),
    [
        # chunks of 4, 3, 3 fp32 values: rank 0 sends chunks 0, 2, then 1, 0, which are 14 elements; others 13
        ("ring", [Dense(torch.ones(10)) for _ in range(3)], [56, 52, 52]),
        # One entry each, at 0 and at 399; a chunk holds 200 elements, so an index takes 1 byte, and a chunk with one
        # entry 16 + 4 + 1. Each rank sends its own chunk and then the finished one of the other.
        ("ring", [Sparse(400, torch.tensor([399 * rank]), torch.ones(1)) for rank in range(2)], [42, 42]),
        # 4 chunks of 2 values: ranks 0 to 3 send 4, 2, 2, 4 values; ranks 0 and 4 swap all 8
        ("halving_doubling", [Dense(torch.ones(8)) for _ in range(5)], [80, 48, 48, 48, 32]),
        # 5 fp16 values: 16 + 10 bytes up from each worker, and as many down to each
        ("server", [Dense(torch.ones(5, dtype=torch.float16)) for _ in range(3)], [52, 26, 26]),
        # rank 0 sends to 1 and 2; rank 1 to 0 and 3; ranks 2 and 3 upwards
        ("tree", [Dense(torch.ones(25)) for _ in range(4)], [200, 200, 100, 100]),
    ],
)
def test_bytes_by_hand(name: str, payloads: list[Payload], nbytes: list[int]) -> None:
    assert [sent for [(_, sent)] in run(name, [[clone(payload) for payload in payloads]])] == nbytes


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("group_size", [100_000, 30_000])
@pytest.mark.parametrize("name", ["ring", "halving_doubling"])
def test_groups_that_are_few_are_shared_out(name: str, group_size: int, world_size: int) -> None:
    """Every rank sends about the same number of bytes, and the sum is the serial one, as with whole groups."""
    generator = torch.Generator().manual_seed(3)

    def payload() -> GroupSparse:
        rows = [torch.randperm(n, generator=generator)[: n // 20].sort().values for n in sizes]
        return GroupSparse(
            100_000, group_size, len(rows[0]), torch.randn(sum(map(len, rows)), generator=generator), torch.cat(rows)
        )

    sizes = [min(group_size, 100_000 - start) for start in range(0, 100_000, group_size)]
    payloads = [payload() for _ in range(world_size)]
    results = [by_payload[0] for by_payload in run(name, [payloads])]
    check(name, payloads, results)
    sent = [nbytes for _, nbytes in results]
    p = 1 << (world_size.bit_length() - 1)  # halving-doubling gives ranks from p on, and their partners, more work
    if name == "ring" or world_size == p:
        assert max(sent) <= 1.05 * sum(sent) / world_size


class LargeOnes:
    """Encodes the elements of magnitude 1 or more of sums; layer i has numels[i] elements."""

    def __init__(self, **numels: int) -> None:
        self.numels = {int(name[1:]): numel for name, numel in numels.items()} or {7: 4}
        self.encoded: list[tuple[int, ...]] = []

    def numel(self, layer_id: int) -> int:
        return self.numels[layer_id]

    def encode(self, total: torch.Tensor, stretches: Sequence[LayerStretch], hop: int = 0) -> Payload:
        assert stretches == [(layer, 0, self.numels[layer]) for layer, _, _ in stretches]
        assert total.numel() == sum(stop for _, _, stop in stretches)
        self.encoded.append(tuple(layer for layer, _, _ in stretches))
        return Sparse(total.numel(), (total.abs() >= 1).nonzero().view(-1), total[total.abs() >= 1])


@pytest.mark.parametrize("name", COLLECTIVES)
def test_options_stay_what_they_are_and_every_bind_starts_anew(name: str) -> None:
    chosen = COLLECTIVES[name]()
    texts = chosen.option_texts()

    def rank(transport: MemoryTransport) -> torch.Tensor:
        mine = COLLECTIVES[name]() if transport.rank else chosen
        first, second = mine.bind(transport), mine.bind(transport)
        assert first is not second
        assert first.options is second.options is mine
        first.sum(Dense(torch.ones(5)), (0,))
        first.close()
        total = second.sum(Dense(torch.ones(5)), (0,)).to_dense()
        second.close()
        return total

    for total in run_threads(rank, 3):
        assert torch.equal(total, torch.full((5,), 3.0))
    assert chosen.option_texts() == texts
    assert not {"transport", "scratch"} & vars(chosen).keys()


def answered_bytes(payloads: Sequence[Payload], downlink: LargeOnes, key: tuple[int, ...], **options: Any) -> list[int]:
    """Return the bytes that each rank sends for a sum over sharded servers, and check the sum."""

    def rank(transport: MemoryTransport) -> int:
        server = Server(**{"placement": "sharded", **options}).bind(transport, downlink)
        total = server.sum(payloads[transport.rank], key).to_dense()
        assert torch.equal(total, torch.stack([payload.to_dense() for payload in payloads]).sum(0))
        return transport.traffic["gradient"].nbytes

    return run_threads(rank, len(payloads))


def test_layers_of_one_message_are_sharded_by_layer_unless_that_would_only_add_tables() -> None:
    """Layers 0, 1 and 2 of 100, 10 and 1 values on ranks 0, 1, 2: each sends two shards up and its own down twice."""
    payloads, layers = [Dense(torch.arange(111.0)) for _ in range(3)], LargeOnes(_0=100, _1=10, _2=1)
    shards = [16 + 4 * numel for numel in (100, 10, 1)]
    assert answered_bytes(payloads, layers, (0, 1, 2)) == [sum(shards) + shard for shard in shards]
    whole = answered_bytes(payloads, layers, (0, 1, 2), placement="colocated")
    assert whole == [2 * (16 + 444), 16 + 444, 16 + 444]  # one server that answers densely sums layers as they come
    # Four groups of 10: two servers take two each, though the layers' border lies within a group.
    groups = [GroupSparse(40, 10, 1, torch.ones(4), torch.zeros(4, dtype=torch.int64)) for _ in range(2)]
    shard = GroupSparse.packed_nbytes(20, 10, 2, torch.float32)
    assert answered_bytes(groups, LargeOnes(_5=25, _6=15), (5, 6)) == [shard + 16 + 80] * 2


def test_a_server_that_encodes_its_answers_leaves_dense_layers_dense() -> None:
    """A message has two dense layers in one payload and a sparse one: only the sparse one is encoded, separately."""
    dense, sparse = torch.full((5,), 0.1), torch.tensor([2.0])
    downlink = LargeOnes(_0=2, _1=3, _2=4)

    def rank(transport: MemoryTransport) -> torch.Tensor:
        server = Server(downlink="recode").bind(transport, downlink)
        message = Bundle([Dense(dense.clone()), Sparse(4, torch.tensor([1]), sparse.clone())])
        return server.sum(message, (0, 1, 2)).to_dense()

    for total in run_threads(rank, 2):
        assert total.tolist() == [*(2 * dense).tolist(), 0, 4, 0, 0]
    assert downlink.encoded == [(2,)]


def test_a_layer_whose_parts_would_be_of_another_kind_goes_to_one_server_whole() -> None:
    """Random entries come back in the same form, and are not encoded again; if cut, they would need indices."""

    def rank(transport: MemoryTransport) -> tuple[torch.Tensor, int]:
        server = Server(downlink="recode", placement="sharded", split_numel=10).bind(transport, LargeOnes(_0=90))
        total = server.sum(Seeded(90, 3, torch.full((9,), 1.0 + transport.rank)), (0,))
        return total.to_dense(), total.num_entries

    for total, num_entries in run_threads(rank, 3):
        assert num_entries == 9
        assert torch.equal(total, Seeded(90, 3, torch.full((9,), 6.0)).to_dense())


def test_shares_of_residuals_on_every_rank_are_added_where_they_are_served() -> None:
    """This happens after a resume with another number of ranks."""

    def rank(transport: MemoryTransport) -> tuple[list[float], list[int]]:
        server = Server(downlink="recode", root=1).bind(transport, LargeOnes())
        given = {"residuals": {(7, 0, 4): torch.ones(4)}, "keepers": {(7, 0, 4): EVERY_RANK}}
        server.load_state_dict(given)
        total = server.sum(Sparse(4, torch.tensor([2]), torch.tensor([1.0])), (7,))
        server.commit()
        state = server.state_dict()
        assert state["keepers"] == {(7, 0, 4): 1}
        return total.to_dense().tolist(), list(state["residuals"])

    answers = run_threads(rank, 3)
    assert answers == [([3, 3, 6, 3], []), ([3, 3, 6, 3], [(7, 0, 4)]), ([3, 3, 6, 3], [])]


@pytest.mark.parametrize(
    ("options", "downlink", "numel", "sentence"),
    [
        ({"downlink": "recode"}, None, 4, "downlink=dense or downlink=union without error feedback"),
        ({"downlink": "recode", "error_feedback": False}, None, 4, "downlink=dense or downlink=union"),
        ({"downlink": "recode"}, LargeOnes(), 5, r"was given 5 elements for layers \[7\], which have 4"),
        ({"root": 2}, None, 4, "root=2 is none of the 2 ranks"),
    ],
)
def test_what_a_server_cannot_do_is_refused(
    options: dict[str, Any], downlink: LargeOnes | None, numel: int, sentence: str
) -> None:
    def rank(transport: MemoryTransport) -> None:
        with pytest.raises((OptionError, PayloadError), match=sentence):
            Server(**options).bind(transport, downlink).sum(Sparse(numel, torch.tensor([2]), torch.ones(1)), (7,))

    run_threads(rank, 2)


def test_payload_of_an_unexpected_length_is_refused_not_sent() -> None:
    """A rank whose payload is longer than expected would end the others' processes on gloo; it must stop itself."""

    def rank(transport: MemoryTransport) -> None:
        with pytest.raises(PayloadError, match="longer than the"):
            Allgather().bind(transport).start_like(Dense(torch.ones(100_000)), Layout.dense(3), "sum").finish()

    run_threads(rank, 2)


@pytest.mark.parametrize("effect", ["replace", "own + received", "received + own"])
@pytest.mark.parametrize("numel", [1, 5])
def test_a_message_of_another_length_is_refused(effect: ReceiveEffect, numel: int) -> None:
    """Also one that would spread over all elements, or that holds none of its own."""
    own = make("codes-levels", 3, torch.float32).payload
    pieces = PackedPieces(MemoryWires(2).transport(0), own, Layout.of(own))
    round_ = Round()
    round_.receive(1, Piece(0, 3, frozenset([1])), effect=effect)
    for received in (Dense(torch.ones(numel)), make("codes-levels", numel, torch.float32).payload):
        with pytest.raises(PayloadError, match=f"rank 1 sent {numel} elements instead of 3"):
            pieces.apply(round_, [received.pack()].copy)
