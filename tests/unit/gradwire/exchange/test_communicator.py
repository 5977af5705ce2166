"""Data that an optimizer sends are compressed and summed; the compressor also encodes a server's answers."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch

from bench.core import registry, spec
from collectives.base import Collective
from collectives.payloads import Dense, Sparse
from collectives.payloads.bundle import members
from collectives.schedule.rounds import Key, LayerStretch
from compressors.algc import Algc
from compressors.base import Compressor
from compressors.floats import NoCompression
from compressors.group_topk import GroupTopK
from compressors.quantizers import Qsgd
from compressors.topk import TopK
from gradwire.exchange.communicator import CompressedCommunicator, CompressedSums
from gradwire.exchange.reducer import reducer_for
from tests.testing.compressor_cases import gradient, layers_of_shapes, step_at
from tests.testing.memory_transport import MemoryTransport, run_threads

LAYERS = layers_of_shapes((3, 4), (5,), (1,))
COLLECTIVES = sorted(set(registry.entries("collectives")) - {"hierarchical", "pool"})
COLLECTIVES += ["server:placement=sharded", "server:downlink=recode"]


def channel_on(transport: MemoryTransport, collective: str = "ring", *, topk: bool = False) -> CompressedCommunicator:
    compressor = TopK(ratio=0.1, value_dtype="fp32", skip=()) if topk else NoCompression()
    built = spec.build("collectives", collective)
    assert isinstance(built, Collective)
    channel = CompressedCommunicator(LAYERS, reducer_for(compressor), built, transport)
    channel.start_step(step_at(0, transport.rank, transport.world_size))
    return channel


def tensors_of(rank: int) -> list[torch.Tensor]:
    """Return integers, so that sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(-8, 9, layer.shape, generator=generator).float() for layer in LAYERS]


@pytest.mark.parametrize(
    ("collective", "op"),
    [(c, op) for c in COLLECTIVES for op in ("sum", "mean", "max") if (c, op) != ("allgather", "max")],
)
def test_tensors_are_combined_whole(collective: str, op: str) -> None:
    def combined(transport: MemoryTransport) -> list[torch.Tensor]:
        tensors = tensors_of(transport.rank)
        channel_on(transport, collective, topk=True).combine_(tensors, op)  # type: ignore[arg-type]
        return tensors

    for number, results in enumerate(zip(*run_threads(combined, 4), strict=True)):
        stack = torch.stack([tensors_of(rank)[number] for rank in range(4)])
        expected = stack.amax(0) if op == "max" else stack.sum(0) / (4 if op == "mean" else 1)
        assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("collective", ["ring", "server:placement=sharded", "server:downlink=recode"])
def test_tensors_of_other_shapes_than_the_layers_pass_as_well(collective: str) -> None:
    def summed(transport: MemoryTransport) -> list[torch.Tensor]:
        tensors = [torch.full((4, 4), float(transport.rank)), torch.full((7,), 2.0, dtype=torch.float32)]
        channel_on(transport, collective).combine_(tensors, "sum", LAYERS[:2])
        return tensors

    for first, second in run_threads(summed, 3):
        assert torch.equal(first, torch.full((4, 4), 3.0))
        assert torch.equal(second, torch.full((7,), 6.0))


def test_what_was_not_sent_waits_until_the_step_is_accepted() -> None:
    def exchange(transport: MemoryTransport) -> None:
        channel = channel_on(transport, "allgather", topk=True)
        sent = [torch.zeros(layer.shape) for layer in LAYERS]

        def send(values: list[torch.Tensor]) -> list[torch.Tensor]:
            channel.mean_(values)
            return values

        first = send(tensors_of(transport.rank))
        channel.drop()
        channel.commit()
        assert channel.residual_norms() == {}
        again = send(tensors_of(transport.rank))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        channel.finish_step()
        assert max(channel.residual_norms().values()) > 0
        restored = channel_on(transport, "allgather", topk=True)
        restored.load_state_dict(channel.state_dict())
        nexts = [tensors_of(transport.rank + 5) for _ in range(2)]
        for each, tensors in zip((channel, restored), nexts, strict=True):
            each.mean_(tensors)
        assert all(torch.equal(a, b) for a, b in zip(*nexts, strict=True))
        channel.drop()
        for update, total in zip(again, sent, strict=True):
            total += update
        for _ in range(LAYERS[0].numel):
            for update, total in zip(send([torch.zeros(layer.shape) for layer in LAYERS]), sent, strict=True):
                total += update
            channel.finish_step()
        for number, total in enumerate(sent):
            mean = sum(tensors_of(rank)[number] for rank in range(2)) / 2
            assert torch.equal(total, mean)
        assert max(channel.residual_norms().values()) == 0

    run_threads(exchange, 2)


def test_both_messages_of_a_step_are_reported_and_counted() -> None:
    def exchange(transport: MemoryTransport) -> None:
        channel = channel_on(transport)
        channel.mean_(tensors_of(transport.rank))
        once = channel.traffic["gradient"].nbytes
        channel.combine_(tensors_of(transport.rank), "sum")
        assert once == 4 * sum(layer.numel for layer in LAYERS)  # 2 (n-1)/n of the tensor
        assert channel.traffic["gradient"].nbytes == 2 * once
        report = channel.finish_step()
        assert [part.layer.id for part in report.encoded] == [0, 1, 2, 0, 1, 2]
        assert report.exchange_s is not None
        assert report.exchange_s > 0
        assert report.exposed_s == report.exchange_s
        channel.start_step(step_at(1, transport.rank, 2))
        assert channel.finish_step().encoded == []

    run_threads(exchange, 2)


def test_what_a_compressor_learns_from_sums_is_kept_once_the_step_is_accepted() -> None:
    """Rank 0 serves, and Algc follows the threshold that its answers need."""

    def exchange(transport: MemoryTransport) -> list[dict[str, Any]]:
        server = spec.build("collectives", "server:downlink=recode")
        compressor = Algc(min_numel=0, ratio=0.2)

        def new() -> CompressedCommunicator:
            channel = CompressedCommunicator(LAYERS, reducer_for(compressor), cast(Collective, server), transport)
            channel.start_step(step_at(0, transport.rank, 2))
            return channel

        channel, states = new(), []
        for is_dropped in (True, False):
            channel.mean_(tensors_of(transport.rank))
            if is_dropped:
                channel.drop()
            channel.commit()
            states.append(channel.state_dict()["sums"])
        restored = new()
        restored.load_state_dict(channel.state_dict())
        return [*states, restored.state_dict()["sums"]]

    (dropped, accepted, restored), of_other = run_threads(exchange, 2)
    assert not dropped
    assert accepted["control"].keys() == restored["control"].keys() == {layer.id for layer in LAYERS}
    assert not any(of_other)


@pytest.mark.parametrize("objects", [True, False])
def test_one_rank_that_objects_is_heard_by_all(objects: bool) -> None:
    heard = run_threads(lambda transport: channel_on(transport).start_on_any_rank(objects and transport.rank == 1)(), 3)
    assert heard == [objects] * 3


def test_a_flag_is_on_its_way_while_other_ranks_are_still_busy() -> None:
    first_has_started = threading.Event()

    def heard(transport: MemoryTransport) -> bool:
        channel = channel_on(transport)
        if transport.rank:
            assert first_has_started.wait(), "rank 0 waited for the others before it went on"
        finish = channel.start_on_any_rank(transport.rank == 0)
        first_has_started.set()
        return finish()

    assert run_threads(heard, 3) == [True] * 3


LARGE = layers_of_shapes((100, 100), (50,), (40, 50), (300, 10))
TOTAL = torch.cat([gradient(layer, 0, 0) for layer in (LARGE[0], LARGE[3], LARGE[1], LARGE[2])])
KEY = (0, 3, 1, 2)  # the order in a worker's message: first the compressed layers, then the others


def whole(key: Key) -> list[LayerStretch]:
    return [LayerStretch(layer, 0, LARGE[layer].numel) for layer in key]


def sums_of(compressor: Compressor) -> CompressedSums:
    sums = CompressedSums(compressor, LARGE)
    sums.step = step_at(0, 0, 2)
    return sums


def test_layers_that_the_policy_leaves_alone_come_back_as_they_are() -> None:
    answer = sums_of(Algc(min_numel=2500)).encode(TOTAL, whole(KEY))
    parts = members(answer, [10_000, 3000, 2050])
    assert [type(part) for part in parts] == [Sparse, Sparse, Dense]
    assert torch.equal(parts[2].to_dense(), TOTAL[13_000:])
    assert all(0 < part.num_entries < 0.1 * part.numel for part in parts[:2])


def test_a_flat_bucket_is_encoded_as_one() -> None:
    answer = sums_of(GroupTopK(warmup_epochs=0)).encode(TOTAL[: 10_000 + 50], whole((0, 1)))
    assert answer.numel == 10_050
    assert answer.num_entries == 41 * 2 + 19


def test_the_memory_of_sums_is_accepted_with_the_step_and_not_before() -> None:
    sums, untouched = (sums_of(Algc(min_numel=2500)) for _ in range(2))
    sums.encode(TOTAL, whole(KEY))
    assert sums.memory.state_dict() == {}
    sums.memory.drop()
    sums.memory.commit()
    assert sums.memory.state_dict() == untouched.memory.state_dict() == {}
    sums.encode(TOTAL, whole(KEY))
    sums.memory.commit()
    state = sums.memory.state_dict()
    assert state["control"].keys() == {0, 3}
    resumed = sums_of(Algc(min_numel=2500))
    resumed.memory.load_state_dict(state)
    answers = [each.encode(2 * TOTAL, whole(KEY)).to_dense() for each in (sums, resumed, untouched)]
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])  # the threshold has been tracked


def test_sums_know_how_long_layers_are() -> None:
    assert [sums_of(GroupTopK()).numel(layer.id) for layer in LARGE] == [10_000, 50, 2000, 3000]


def test_an_answer_is_drawn_apart_from_the_servers_own_message() -> None:
    qsgd, layer = Qsgd(), LARGE[0]
    sums = sums_of(qsgd)
    own = qsgd.encode(TOTAL[:10_000], layer, sums.step)
    assert not torch.equal(sums.encode(TOTAL[:10_000], whole((0,))).to_dense(), own.to_dense())
