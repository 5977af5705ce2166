"""State by layer: proposed, committed, dropped, and rearranged when buckets change."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from compressors.layer import Memory
from compressors.topk import TopK
from gradwire.exchange.encode_group import EncodeGroup, LayerStore
from tests.testing.compressor_cases import layers_of_shapes

LAYERS = layers_of_shapes((3,), (2,), (4,), (1,))


def unit_of(*ids: int) -> EncodeGroup:
    layers = [LAYERS[i] for i in ids]
    gradients = [torch.zeros(layer.numel) for layer in layers]
    return EncodeGroup(compressor=TopK(), layers=layers, key=ids, gradients=gradients, updates=gradients)


def fill(store: LayerStore, unit: EncodeGroup, start: float) -> None:
    store.propose(unit).copy_(torch.arange(unit.layer.numel) + start)


def values(store: LayerStore) -> dict[int, list[float]]:
    return {layer_id: tensor.tolist() for layer_id, tensor in sorted(store.by_layer().items())}


def test_a_step_is_accepted_by_commit_and_forgotten_by_drop_and_its_memory_is_used_again() -> None:
    store, unit = LayerStore(), unit_of(0, 1)
    fill(store, unit, 10)
    assert store.accepted(unit) is None
    store.commit()
    assert values(store) == {0: [10, 11, 12], 1: [13, 14]}
    for start in (0, 100, 200):
        fill(store, unit, start)
        store.commit()
    proposed = store.propose(unit).fill_(-1).data_ptr()
    store.drop()
    assert values(store) == {0: [200, 201, 202], 1: [203, 204]}
    accepted = store.accepted(unit)
    assert accepted is not None
    assert accepted.data_ptr() != proposed == store.propose(unit).data_ptr()


def test_regrouping_keeps_every_value() -> None:
    store = LayerStore()
    fill(store, unit_of(0, 1, 2), 0)
    store.commit()
    expected = values(store)
    middle = unit_of(1, 3)  # has one layer of that group, and a new one
    accepted = store.accepted(middle)
    assert accepted is not None
    assert accepted.tolist() == [3, 4, 0]
    assert {i: v for i, v in values(store).items() if i != 3} == expected
    assert store.accepted(unit_of(0, 2)) is not None
    assert {i: v for i, v in values(store).items() if i != 3} == expected


def test_memory_of_a_first_step_that_was_dropped_is_kept_for_the_same_buckets_only() -> None:
    store = LayerStore()
    for unit in (unit_of(0, 1), unit_of(2)):
        fill(store, unit, 0)
    store.drop()
    for unit in (unit_of(1, 2), unit_of(0)):
        assert store.accepted(unit) is None
        fill(store, unit, 0)
    store.commit()
    assert store.proposed_nbytes == 0


def test_what_was_loaded_goes_to_where_the_gradients_are() -> None:
    store, elsewhere = LayerStore(), torch.zeros(3, device="meta")
    store.load({0: torch.ones(3)})
    unit = dataclasses.replace(unit_of(0), gradients=[elsewhere], updates=[elsewhere])
    accepted = store.accepted(unit)
    assert accepted is not None
    assert accepted.device == elsewhere.device


def test_loading_replaces_everything_by_copies() -> None:
    store, source = LayerStore(), {1: torch.tensor([1.0, 2.0]), 2: torch.ones(4)}
    fill(store, unit_of(0), 5)
    store.commit()
    assert store.accepted(unit_of(2)) is None
    store.load(source)
    source[1].zero_()
    assert values(store) == {1: [1, 2], 2: [1, 1, 1, 1]}


def test_a_memory_keeps_the_same_promises() -> None:
    memory = Memory()
    memory.propose("ages", 3, torch.tensor([1.0]))
    assert memory.get("ages", 3) is None
    memory.commit()
    memory.propose("ages", 3, torch.tensor([2.0]))
    memory.drop()
    assert memory.get("ages", 3) == torch.tensor([1.0])
    assert memory.get("curves", 3) is None
    source = {"ages": {4: torch.tensor([7.0])}}
    memory.load_state_dict(source)
    source["ages"][4].zero_()
    assert memory.get("ages", 3) is None
    assert memory.state_dict() == {"ages": {4: torch.tensor([7.0])}}


def test_what_derives_from_a_memory_is_made_once_between_two_commits() -> None:
    memory, made = Memory(), []

    def total() -> float:
        made.append(1)
        return float(sum(memory.by_layer("ages").values()))

    memory.propose("ages", 3, torch.tensor(1.0))
    assert [memory.derived("total", total), memory.derived("total", total)] == [0, 0]
    memory.drop()
    assert memory.derived("total", total) == 0
    assert len(made) == 1
    memory.propose("ages", 3, torch.tensor(5.0))
    memory.commit()
    assert memory.derived("total", total) == 5
    memory.load_state_dict({})
    assert memory.derived("total", total) == 0


@pytest.mark.parametrize("ids", [(0,), (0, 2)])
def test_the_state_of_another_model_is_refused(ids: tuple[int, ...]) -> None:
    store = LayerStore()
    store.load({0: torch.ones(2), 2: torch.ones(3)})
    with pytest.raises(ValueError, match=r"layer0.* it is of another model"):
        store.accepted(unit_of(*ids))
