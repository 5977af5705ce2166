"""State by layer: proposed, committed, dropped, and laid out anew when buckets change."""

from __future__ import annotations

import torch

from compressors.state import LayerDict, LayerStore
from compressors.unit import Unit, cut
from tests.testing.compressor_cases import layers_of_shapes

LAYERS = layers_of_shapes((3,), (2,), (4,), (1,))


def unit_of(*ids: int) -> Unit:
    layers = [LAYERS[i] for i in ids]
    (unit,) = cut(layers, "bucket", lambda layer: False)
    return Unit(layer=unit.layer, layers=layers, gradients=[torch.zeros(layer.numel) for layer in layers])


def fill(store: LayerStore, unit: Unit, start: float) -> None:
    store.propose(unit).copy_(torch.arange(unit.numel) + start)


def values(store: LayerStore) -> dict[int, list[float]]:
    return {layer_id: tensor.tolist() for layer_id, tensor in sorted(store.by_layer().items())}


def test_nothing_is_accepted_before_commit() -> None:
    store, unit = LayerStore(), unit_of(0, 1)
    fill(store, unit, 10)
    assert store.accepted(unit) is None
    store.commit()
    assert values(store) == {0: [10, 11, 12], 1: [13, 14]}


def test_drop_keeps_what_was_accepted_and_memory_is_used_again() -> None:
    store, unit = LayerStore(), unit_of(0)
    for start in (0, 100, 200):
        fill(store, unit, start)
        store.commit()
    addresses = {store.propose(unit).data_ptr() for _ in range(1)}
    store.proposed(unit).fill_(-1)
    store.drop()
    assert values(store) == {0: [200, 201, 202]}
    accepted = store.accepted(unit)
    assert accepted is not None
    assert accepted.data_ptr() not in addresses
    assert store.propose(unit).data_ptr() in addresses


def test_regrouping_keeps_every_value() -> None:
    store = LayerStore()
    fill(store, unit_of(0, 1, 2), 0)
    store.commit()
    expected = values(store)
    middle = unit_of(1, 3)  # takes one layer out of its group, and one that is new
    accepted = store.accepted(middle)
    assert accepted is not None
    assert accepted.tolist() == [3, 4, 0]
    assert {i: v for i, v in values(store).items() if i != 3} == expected
    assert store.accepted(unit_of(0, 2)) is not None
    assert {i: v for i, v in values(store).items() if i != 3} == expected


def test_layers_that_are_new_to_a_store_with_others_start_at_nothing() -> None:
    store = LayerStore()
    fill(store, unit_of(0), 5)
    store.commit()
    assert store.accepted(unit_of(2)) is None


def test_loading_replaces_everything_by_copies() -> None:
    store, source = LayerStore(), {1: torch.tensor([1.0, 2.0]), 2: torch.ones(4)}
    fill(store, unit_of(0), 5)
    store.commit()
    store.load(source)
    source[1].zero_()
    assert values(store) == {1: [1, 2], 2: [1, 1, 1, 1]}


def test_a_dictionary_of_tensors_keeps_the_same_promises() -> None:
    store = LayerDict()
    store.propose(3, torch.tensor([1.0]))
    assert store.get(3) is None
    store.commit()
    store.propose(3, torch.tensor([2.0]))
    store.drop()
    assert store.get(3) == torch.tensor([1.0])
    store.load({4: torch.tensor([7.0])})
    assert store.get(3) is None
    assert store.by_layer() == {4: torch.tensor([7.0])}
