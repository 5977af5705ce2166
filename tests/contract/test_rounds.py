"""The rounds that a collective describes without running are the messages that a transport sees when it runs."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence

import pytest
import torch

from collectives.allreduce import Allgather
from collectives.payloads import Bundle, Dense
from collectives.payloads.base import Payload
from collectives.schedule.rounds import Layout, Piece, PieceMessage, Round, leaves
from collectives.transport.base import Pending, Receive, Send
from tests.testing.collectives import COLLECTIVES, clone, key_of
from tests.testing.memory_transport import MemoryTransport, run_threads
from tests.testing.payloads import make
from tests.testing.thinned import checkered

LENGTH = 1009
KEY = (3,)
PackedLengths = Callable[[Piece], Sequence[int]]
Sent = dict[int, list[int]]
"""Peer -> bytes of each message, in the order in which they were sent."""


class Recorder(MemoryTransport):
    """A transport that records the bytes of its gradient messages, by the peer's number among all ranks."""

    def __init__(self, transport: MemoryTransport, members: list[int], rank: int, sent: Sent) -> None:
        super().__init__(transport.wires, rank, members, transport.ledger)
        self.sent = sent

    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        for tensor, to in sends:
            if self.ledger.purpose == "gradient":
                self.sent.setdefault(self.names[to], []).append(tensor.nbytes)
        return super().post(sends, receives)

    def view(self, ranks: Sequence[int]) -> Recorder:
        members = [self.names[rank] for rank in ranks]
        return Recorder(self, members, list(ranks).index(self.rank), self.sent)


def described(rounds: Sequence[Round], length_of: PackedLengths) -> Sent:
    sent: Sent = {}
    for round_ in rounds:
        for message in round_.sends:
            sent.setdefault(message.peer, []).append(nbytes_of(round_, message, length_of))
    return sent


def nbytes_of(round_: Round, message: PieceMessage, length_of: PackedLengths) -> int:
    if round_.itemsize is not None:
        return round_.itemsize * message.numel
    lengths = [length for piece in message.pieces for length in length_of(piece)]
    return lengths[0] if len(lengths) == 1 else Bundle.packed_nbytes(lengths)


def seen(name: str, payloads: Sequence[Payload]) -> list[Sent]:
    """Return the messages that each rank sends."""

    def rank(transport: MemoryTransport) -> Sent:
        recorder = Recorder(transport, list(range(transport.world_size)), transport.rank, {})
        bound = COLLECTIVES[name]().bind(recorder)
        bound.sum(clone(payloads[transport.rank]), key_of(payloads[0]))
        bound.close()
        return recorder.sent

    return run_threads(rank, len(payloads))


def packed_lengths(payloads: Sequence[Payload], piece: Piece) -> list[int]:
    """Return the packed lengths of a piece: its ranks' contributions, decoded and added in rank order."""
    parts = [payloads[rank].slice(piece.start, piece.stop) for rank in sorted(piece.terms)]
    return [leaf.nbytes for leaf in leaves(functools.reduce(lambda a, b: a.add(b), parts))]


DESCRIBED = [name for name in COLLECTIVES if COLLECTIVES[name]().rounds(4, 0, Layout.dense(1, key=KEY)) is not None]


def test_only_a_backend_shared_memory_and_what_is_made_of_others_hide_their_rounds() -> None:
    hidden = set(COLLECTIVES) - set(DESCRIBED)
    assert hidden == {name for name in COLLECTIVES if name.partition(":")[0] in ("native", "pool", "hierarchical")}


@pytest.mark.parametrize("world_size", range(1, 10))
@pytest.mark.parametrize("name", DESCRIBED)
def test_dense(name: str, world_size: int) -> None:
    payloads = [make("dense", LENGTH, torch.float32, rank).payload for rank in range(world_size)]
    layout = Layout.dense(LENGTH, key=KEY)
    for rank, sent in enumerate(seen(name, payloads)):
        rounds = COLLECTIVES[name]().rounds(world_size, rank, layout) if world_size > 1 else []
        assert rounds is not None
        assert described(rounds, lambda piece: [Dense(torch.empty(piece.numel)).nbytes]) == sent, f"rank {rank}"


PACKED = (
    "ring",
    "halving_doubling",
    "tree",
    "direct",
    "allgather",
    "server:downlink=union",
    "server:placement=sharded,downlink=union",
)


@pytest.mark.parametrize(
    ("name", "kind", "world_size"),
    checkered(PACKED, ["sparse", "group_sparse", "row_sparse", "sparse_codes", "bundle"], [2, 3, 4, 5, 8]),
)
def test_packed(name: str, kind: str, world_size: int) -> None:
    payloads = [make(kind, LENGTH, torch.float32, rank).payload for rank in range(world_size)]
    if kind == "bundle":
        payloads = [Bundle([leaf for leaf in leaves(payload) if not leaf.elementwise]) for payload in payloads]
    layout = Layout.of(payloads[0], key_of(payloads[0]))
    for rank, sent in enumerate(seen(name, payloads)):
        rounds = COLLECTIVES[name]().rounds(world_size, rank, layout)
        assert rounds is not None
        assert described(rounds, functools.partial(packed_lengths, payloads)) == sent, f"rank {rank}"


@pytest.mark.parametrize("world_size", range(2, 10))
@pytest.mark.parametrize("name", DESCRIBED)
def test_what_one_rank_sends_another_receives_and_all_end_with_every_contribution(name: str, world_size: int) -> None:
    layout = Layout.dense(LENGTH, key=KEY)
    by_rank = [COLLECTIVES[name]().rounds(world_size, rank, layout) or [] for rank in range(world_size)]
    sent, received = collections.Counter(), collections.Counter()
    for rank, rounds in enumerate(by_rank):
        for round_ in rounds:
            sent.update((rank, message.peer, message.pieces) for message in round_.sends)
            received.update((message.peer, rank, message.pieces) for message in round_.receives)
    assert sent == received


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_no_two_ranks_of_an_all_gather_send_to_the_same_peer_at_once(world_size: int) -> None:
    by_rank = [Allgather().rounds(world_size, rank, Layout.dense(10, 4)) for rank in range(world_size)]
    for sends in zip(*[round_.sends for (round_,) in by_rank], strict=True):
        assert sorted(message.peer for message in sends) == list(range(world_size))
