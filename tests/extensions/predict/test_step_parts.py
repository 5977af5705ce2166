"""The parts of a step that calibration records."""

from __future__ import annotations

import torch

from bench.extensions.predict.calibration import BucketParts, LinearCost
from bench.extensions.predict.message_profile import work_of
from bench.extensions.predict.options import CalibrateConfig
from bench.extensions.predict.step_parts import bucket_parts, encoded
from bench.extensions.predict.sums import layout_of
from compressors.layer import layers_of


def test_a_message_is_cut_by_layer_as_its_payloads_lie_in_it_and_not_as_gradients_lie_in_the_bucket() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.BatchNorm1d(96), torch.nn.Linear(96, 48))
    backwards = layers_of(model)[::-1]
    gradients = [(backwards, [torch.randn(layer.numel) for layer in backwards])]
    ((message,),) = (each.offers for each in encoded("topk", [gradients] * 2, CalibrateConfig(), lambda: None)[0])
    bucket = BucketParts(
        ready_s=0.0,
        layers=tuple(layer.id for layer in backwards),
        numels=tuple(layer.numel for layer in backwards),
    )
    cut = layout_of(message, bucket).by_layer()
    numel_of = {layer.id: layer.numel for layer in backwards}
    assert sorted(layer for part in cut for layer in part.key) == sorted(numel_of)
    assert all(part.numel == sum(numel_of[layer] for layer in part.key) for part in cut)
    assert len(cut) == len(message.leaves) > 1


def test_work_on_a_whole_and_on_a_part_tells_what_any_part_takes() -> None:
    assert work_of((1000, 0.006), (100, 0.0015)) == LinearCost(fixed_s=0.001, per_byte_s=5e-6)
    assert work_of((1000, 0.002), (100, 0.003)) == LinearCost(fixed_s=0.003)  # a longer payload never takes less time
    assert work_of((1000, 0.002)) == work_of((1000, 0.002), (1000, 0.001)) == LinearCost(fixed_s=0.002)


def test_compressors_are_measured_as_they_are_in_the_end_and_not_at_first() -> None:
    model = torch.nn.Linear(64, 96)
    layers = layers_of(model)[::-1]
    gradients = [(layers, [torch.randn(layer.numel) for layer in layers])]
    at_first, at_last = (
        encoded(text, [gradients] * 2, CalibrateConfig(turns=4), lambda: None)[0][0]
        for text in ("powersgd:dense_steps=3,min_compression_rate=1", "powersgd:min_compression_rate=1")
    )
    assert [offer.nbytes for offer in at_first.offers] == [offer.nbytes for offer in at_last.offers]


def test_layers_without_elements_are_no_part_of_a_bucket() -> None:
    layers = layers_of(torch.nn.ParameterList([torch.empty(0), torch.zeros(3)]))
    assert bucket_parts(0.5, layers) == BucketParts(ready_s=0.5, layers=(1,), numels=(3,))
