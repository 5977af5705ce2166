"""A ring that encodes its partial sums again: the serial sum with the same rounding, bytes, and what the ranks keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from collectives.allreduce import Ring
from collectives.base import BoundCollective
from collectives.options import Incompatible, OptionError, build
from collectives.payloads import Bundle, Codes, Dense, Sparse
from collectives.payloads.base import Payload, PayloadError
from collectives.recoding import RequantisedPieces
from collectives.schedule.rounds import LayerStretch, Layout, Piece, Round
from compressors.base import Compressor, PerLayer
from compressors.layer import Layer, end_to_end
from gradwire.exchange.communicator import CompressedSums
from tests.testing.compressor_cases import layers_of_shapes, step_at
from tests.testing.memory_transport import MemoryTransport, MemoryWires, run_threads

LAYERS = layers_of_shapes((30, 80), (500,), (12, 100), (7,))
KEY, NUMEL = (0, 1, 2, 3), 2400 + 500 + 1200 + 7
COMPRESSORS = [
    "int8:block_numel=64",
    "int8:block_numel=64,rounding=stochastic",
    "qsgd:bits=8",
    "qsgd:bits=4,norm=max,block_numel=32",
    "qsgd:bits=4,error_feedback=true",
]


def made(text: str) -> PerLayer:
    compressor = build("compressors", Compressor, text)
    assert isinstance(compressor, PerLayer)
    return compressor


def ring_of(transport: MemoryTransport, compressor: str) -> tuple[BoundCollective, CompressedSums]:
    sums = CompressedSums(made(compressor), LAYERS)
    return Ring(requantise=True).bind(transport, sums), sums


def kept_by(ring: BoundCollective) -> dict[int, torch.Tensor]:
    """Return what the sums' encodings left out on this rank, by layer id."""
    return {layer: residual for (layer, _, _), residual in ring.state_dict()["residuals"].items()}


def contribution(compressor: str, step: int, rank: int, world_size: int, key: Sequence[int] = KEY) -> Payload:
    """Return a rank's codes of random numbers, one payload for all layers of a message."""
    flat = end_to_end([LAYERS[layer] for layer in key])
    x = torch.randn(flat.numel, generator=torch.Generator().manual_seed(100 * step + 10 * rank + key[0]))
    return made(compressor).encode(x, flat, step_at(step, rank, world_size))


def serial(compressor: str, terms: Sequence[Payload], errors: Sequence[torch.Tensor], step: int) -> torch.Tensor:
    """Return the sum of one message with `KEY`; `errors` [rank][element] is changed as the ranks change theirs."""
    n, total = len(terms), torch.empty(NUMEL)
    ends = torch.tensor([0, 2400, 2900, 4100])
    for chunk, (start, stop) in enumerate(Layout.of(terms[0], KEY).chunks(n)):
        travelling = terms[chunk].slice(start, stop)
        layer = int((ends <= start).sum()) - 1
        for hop in range(1, n):
            rank = (chunk + hop) % n
            x = errors[rank][start:stop]
            terms[rank].slice(start, stop).add_to_(x)
            travelling.add_to_(x)
            flat = Layer(id=layer, name="", shape=(stop - start,), numel=stop - start)
            at_hop = step_at(step, (1 + hop) * n + rank, 1)
            travelling = made(compressor).encode(x, flat, at_hop)
            travelling.subtract_from_(x)
        total[start:stop] = travelling.to_dense()
    return total


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_sums_are_the_serial_ones_and_nothing_is_lost(compressor: str, world_size: int) -> None:
    num_steps = 3
    messages = [[contribution(compressor, step, rank, world_size) for rank in range(world_size)] for step in range(3)]

    def rank(transport: MemoryTransport) -> tuple[list[torch.Tensor], torch.Tensor, int]:
        ring, sums = ring_of(transport, compressor)
        totals = []
        for step in range(num_steps):
            sums.step = step_at(step, transport.rank, world_size)
            totals.append(ring.sum(messages[step][transport.rank], KEY).to_dense())
            ring.commit()
        assert ring.nbytes == 4 * NUMEL
        errors = kept_by(ring)
        return totals, torch.cat([errors[layer].view(-1) for layer in KEY]), transport.traffic["gradient"].nbytes

    results = run_threads(rank, world_size)
    errors = [torch.zeros(NUMEL) for _ in range(world_size)]
    for step, terms in enumerate(messages):
        expected = serial(compressor, terms, errors, step)
        for totals, _, _ in results:
            assert torch.equal(totals[step], expected)
    for (_, kept, _), error in zip(results, errors, strict=True):
        assert torch.equal(kept, error)
    given = sum(term.to_dense().double() for terms in messages for term in terms)
    delivered = sum(total.double() for total in results[0][0])
    owed = sum(kept.double() for _, kept, _ in results)
    assert (delivered + owed - given).norm() <= 1e-6 * given.norm()
    assert owed.norm() > 1e-3 * given.norm()
    for number, (_, _, sent) in enumerate(results):
        assert sent == num_steps * closed_form(compressor, messages[0][0], number, world_size)


def closed_form(compressor: str, term: Payload, rank: int, world_size: int) -> int:
    """Return the bytes that a rank sends: every chunk's codes twice, except two chunks that it sends once."""
    assert isinstance(term, Codes)
    lengths = [
        Codes.packed_nbytes(stop - start, term.bits, block_numel=term.block_numel)
        for start, stop in Layout.of(term, KEY).chunks(world_size)
    ]
    return 2 * sum(lengths) - lengths[(rank + 1) % world_size] - lengths[(rank + 2) % world_size]


@pytest.mark.parametrize(("compressor", "ratio"), [("int8", 0.5), ("qsgd:bits=8", 0.5), ("qsgd:bits=4", 0.25)])
def test_hops_are_a_half_or_a_quarter_of_fp16(compressor: str, ratio: float) -> None:
    (layer,) = layers_of_shapes((1 << 17,))
    codes = made(compressor).encode(torch.randn(layer.numel), layer, step_at(0, 0, 4))
    assert isinstance(codes, Codes)
    in_fp16 = 2 * 3 / 4 * 2 * layer.numel
    assert ratio < closed_form(compressor, codes, 0, 4) / in_fp16 < 1.02 * ratio


def test_ranks_and_hops_round_differently() -> None:
    sums = CompressedSums(made("qsgd"), LAYERS)
    x = torch.randn(500, generator=torch.Generator().manual_seed(0))
    texts = set()
    for rank in range(4):
        sums.step = step_at(0, rank, 4)
        texts |= {sums.encode(x, [LayerStretch(1, 0, 500)], hop).to_dense().numpy().tobytes() for hop in range(4)}
    assert len(texts) == 16


@pytest.mark.parametrize(
    ("compressor", "reason"),
    [
        ("topk", "topk sends Sparse payloads: ring:requantise=true encodes sums of Codes again, and Sparse payloads "
                 "are not Codes; use collective ring"),
        ("onebit", "and TwoMeans payloads are not Codes; use collective allgather"),
        ("qsgd", "ring keeps the errors of the sums that it encodes, which would grow without limit: qsgd is no "
                 "contraction with these options; use qsgd:error_feedback=true or collective allgather"),
        ("qsgd:bits=4,block_numel=196", "use qsgd:error_feedback=true or collective allgather"),
        ("twobit", "twobit is no contraction with these options; use collective allgather"),
        ("twobit:error_feedback=false", "with these options; use collective allgather"),
        ("sign:mode=vote,error_feedback=false", "with these options; use collective allgather"),
        ("hylo", "use collective ring"),
        ("none", "ring: requantise=true encodes sums of codes again, and compressor none sends no codes; "
                 "leave it out"),
        ("bf16", "leave it out"),
        ("powersgd", "leave it out"),
        ("terngrad:shared_scale=true", "leave it out"),
    ],
)  # fmt: skip
def test_what_cannot_be_encoded_again_is_refused(compressor: str, reason: str) -> None:
    with pytest.raises(Incompatible) as refused:
        build("compressors", Compressor, compressor).check_compatible(Ring(requantise=True))
    assert reason in str(refused.value)
    assert str(refused.value).count(". ") == 0
    for accepted in ("int8", "qsgd:bits=8", "qsgd:error_feedback=true", "int8:min_numel=10", "sign"):
        build("compressors", Compressor, accepted).check_compatible(Ring(requantise=True))


def test_codes_need_the_layers_of_a_run() -> None:
    def rank(transport: MemoryTransport) -> None:
        codes = contribution("int8", 0, transport.rank, 2)
        with pytest.raises(OptionError, match="needs the compressor of a training run; use collective allgather"):
            Ring(requantise=True).bind(transport).sum(codes, KEY)
        with pytest.raises(PayloadError, match=r"given 4107 elements for layers \[0, 1\], which have 2900"):
            ring_of(transport, "int8")[0].sum(codes, KEY[:2])
        with pytest.raises(Incompatible, match="Sparse payloads are not Codes"):
            ring_of(transport, "int8")[0].sum(Sparse(3, torch.tensor([1]), torch.tensor([1.0])), (3,))

    run_threads(rank, 2)


def test_empty_chunks_and_dense_payloads_pass_through() -> None:
    """The layer of 7 elements has one block of codes, so two of three chunks are empty."""

    def rank(transport: MemoryTransport) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        ring, _ = ring_of(transport, "int8")
        codes = contribution("int8", 0, transport.rank, 3, (3,))
        mixed = Bundle([codes, Dense(torch.full((500,), 1.0, dtype=torch.float16))])
        total = ring.sum(mixed, (3, 1)).to_dense()
        ring.commit()
        return total, codes.to_dense(), kept_by(ring)

    results = run_threads(rank, 3)
    exact = sum(codes for _, codes, _ in results)
    kept = sum(errors[3] for _, _, errors in results)
    for total, _, errors in results:
        assert torch.equal(total, results[0][0])
        assert torch.equal(total[7:], torch.full((500,), 3.0))
        assert errors.keys() == {3}
    torch.testing.assert_close(results[0][0][:7] + kept, exact, rtol=0, atol=1e-5)


def test_partial_sums_with_other_payloads_are_refused() -> None:
    transport = MemoryWires(2).transport(0)
    codes = [made("int8").encode(torch.ones(n), LAYERS[1], step_at(0, 0, 2)) for n in (100, 400, 500)]
    own = Bundle(codes[:2])
    pieces = RequantisedPieces(
        transport, own, Layout.of(own, (1,)), CompressedSums(made("int8"), LAYERS), [0, 500], torch.zeros(500)
    )
    round_ = Round()
    round_.receive(1, Piece(0, 500, frozenset([1])), effect="received + own")
    for received in (codes[2], Bundle(codes[1::-1])):
        with pytest.raises(PayloadError, match="holds other payloads than this rank's own part"):
            pieces.apply(round_, [received.pack()].copy)


def test_every_kept_error_is_in_the_next_sum() -> None:
    """Also one of the chunk that a rank sends first, which it encoded when messages had another layout."""

    def rank(transport: MemoryTransport) -> torch.Tensor:
        ring, _ = ring_of(transport, "int8")
        ones = {(layer, 0, LAYERS[layer].numel): torch.ones(LAYERS[layer].numel) for layer in KEY}
        ring.load_state_dict({"residuals": ones, "keepers": {}})
        nothing = made("int8").encode(torch.zeros(NUMEL), end_to_end(LAYERS), step_at(0, transport.rank, 3))
        return ring.sum(nothing, KEY).to_dense()

    for total in run_threads(rank, 3):
        torch.testing.assert_close(total, torch.full((NUMEL,), 3.0))
