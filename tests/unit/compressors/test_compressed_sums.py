"""A server's answers: encoded by the run's compressor, with a state that follows the steps."""

from __future__ import annotations

import torch

from collectives.payloads import Dense, Sparse
from collectives.payloads.bundle import members
from collectives.schedule.rounds import Key, LayerStretch
from compressors.algc import Algc
from compressors.base import Compressor
from compressors.group_topk import GroupTopK
from compressors.quantizers import Qsgd
from gradwire.exchange.communicator import CompressedSums
from tests.testing.compressor_cases import gradient, layers_of_shapes, step_at

LAYERS = layers_of_shapes((100, 100), (50,), (40, 50), (300, 10))
TOTAL = torch.cat([gradient(layer, 0, 0) for layer in (LAYERS[0], LAYERS[3], LAYERS[1], LAYERS[2])])
KEY = (0, 3, 1, 2)  # the order in a worker's message: first the compressed layers, then the others


def whole(key: Key) -> list[LayerStretch]:
    return [LayerStretch(layer, 0, LAYERS[layer].numel) for layer in key]


def sums_of(compressor: Compressor) -> CompressedSums:
    sums = CompressedSums(compressor, LAYERS)
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


def test_its_memory_is_accepted_with_the_step_and_not_before() -> None:
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


def test_it_knows_how_long_layers_are() -> None:
    assert [sums_of(GroupTopK()).numel(layer.id) for layer in LAYERS] == [10_000, 50, 2000, 3000]


def test_an_answer_is_drawn_apart_from_the_servers_own_message() -> None:
    qsgd, layer = Qsgd(), LAYERS[0]
    sums = sums_of(qsgd)
    own = qsgd.encode(TOTAL[:10_000], layer, sums.step)
    assert not torch.equal(sums.encode(TOTAL[:10_000], whole((0,))).to_dense(), own.to_dense())
