"""Compressing in one pass agrees with separate adding, encoding and subtracting."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

from collectives.base import Key, PendingSum
from collectives.kernels.library import serving
from collectives.options import build
from collectives.payloads.base import Dense, Payload
from collectives.transport.base import SingleRank
from compressors.base import Compressor, PerLayer
from compressors.ddp.reducer import PerLayerReducer, reducer_for
from compressors.ddp.report import Bucket
from compressors.layer import Layer, Step
from compressors.quantizers import Int8
from compressors.topk import TopK
from tests.testing.compressor_cases import gradient, layers_of_shapes, step_at
from tests.testing.loops import same

LAYERS = layers_of_shapes((123, 45), (64, 16, 3, 3), (50,), kinds=("linear", "conv", "bias"))
SPECS = [
    "group_topk:group_size=100",
    "group_topk:group_size=100,values=floats",
    "group_topk:ratio=0.2,values=sigma",
    "group_topk:values=int8",
    "topk:ratio=0.05,values=two_magnitudes",
    "randomk:ratio=0.1",
    "topk:ratio=0.05",
    "topk:ratio=0.9,value_dtype=fp32",
    "qsparse:ratio=0.05",
    "adaptive_topk:ratio=0.05,refresh=4",
    "threshold",
    "threshold:threshold=2",
    "threshold:threshold=0.7,unit=absolute",
    "threshold:threshold=2,unit=rms",
    "sign",
    "onebit",
    "algc:ratio=0.05,min_numel=0,warmup_epochs=0,refresh=4",
    "algc:ratio=0.05,min_numel=100,flush_every=3,value_dtype=fp32",
    "hylo:min_numel=100",
    "hylo:min_numel=100,decode=threshold,pow2_threshold=true",
    "hylo:min_numel=100,threshold=0.1",
]


IN_PARTS = [
    "bf16",
    "fp16",
    "int8",
    "int8:rounding=stochastic,block_numel=100",
    "qsgd",
    "qsgd:norm=max,block_numel=13",
    "natural",
]
"""Compressors that encode the layers of a bucket in place."""

LONG = layers_of_shapes((700, 400), (3,), (500, 601), kinds=("linear", "bias", "linear"))
"""Layers with more elements than fit into a cache, whose results bypass it; the last layer is not aligned."""

NOTICING = ["group_topk:group_size=100,values=floats", "group_topk", "topk:ratio=0.05", "qsparse:ratio=0.05"]


def messages_and_residuals(spec: str) -> list[torch.Tensor]:
    """Return the messages and residuals of six steps."""
    reducer = reducer_for(build("compressors", Compressor, spec))
    seen: list[torch.Tensor] = []
    for index in range(6):
        bucket = Bucket(layers=LAYERS, gradients=[gradient(layer, index, 0) for layer in LAYERS], step=step_at(index))
        message = reducer.message(bucket, SingleRank())
        assert isinstance(message, Payload)
        reducer.commit()
        seen += [message.pack(), *reducer.state_dict()["residuals"].values()]
    return seen


@pytest.mark.parametrize("path", ["native", "reference"])
@pytest.mark.parametrize("spec", SPECS)
def test_one_pass_gives_what_three_give(spec: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving("reference") if path == "reference" else contextlib.nullcontext():
        in_one = messages_and_residuals(spec)
        monkeypatch.setattr(PerLayerReducer, "_encode_in_place", lambda *_, screened: None)
        in_three = messages_and_residuals(spec)
    for one, three in zip(in_one, in_three, strict=True):
        assert same(one, three)


@pytest.mark.parametrize("path", ["native", "reference"])
@pytest.mark.parametrize("spec", IN_PARTS)
def test_layers_where_they_lie_give_what_they_give_laid_end_to_end(
    spec: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving("reference") if path == "reference" else contextlib.nullcontext():
        in_parts = messages_and_residuals(spec)
        monkeypatch.setattr(PerLayerReducer, "_encode_in_place", lambda *_, screened: None)
        in_one = messages_and_residuals(spec)
    for parts, one in zip(in_parts, in_one, strict=True):
        assert same(parts, one)


@pytest.mark.parametrize("spec", [*SPECS, *IN_PARTS])
def test_native_loops_send_what_the_reference_path_sends(spec: str) -> None:
    native = messages_and_residuals(spec)
    with serving("reference"):
        reference = messages_and_residuals(spec)
    for one, other in zip(native, reference, strict=True):
        assert same(one, other)


@pytest.mark.parametrize("spec", [*SPECS, *IN_PARTS])
def test_what_is_written_past_the_caches_arrives(spec: str) -> None:
    def residuals() -> list[torch.Tensor]:
        reducer = reducer_for(build("compressors", Compressor, spec))
        flat = torch.cat([gradient(layer, 0, 0).view(-1) for layer in LONG])
        parts = list(flat.split([layer.numel for layer in LONG]))
        for index in range(2):
            bucket = Bucket(
                layers=LONG, gradients=[part.clone() if index else part for part in parts], step=step_at(index)
            )
            reducer.reduce(bucket, lambda payload, key: payload, SingleRank())
            reducer.commit()
        return [*parts, *reducer.state_dict()["residuals"].values()]

    native = residuals()
    with serving("reference"):
        reference = residuals()
    for one, other in zip(native, reference, strict=True):
        assert same(one, other)


@pytest.mark.parametrize("base", [TopK, Int8], ids=["encode_sum", "encode_parts"])
def test_a_class_that_derives_from_one_to_encode_in_its_own_way_does(base: type[Compressor]) -> None:
    class Own(base):  # type: ignore[valid-type, misc]
        def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
            return Dense(x.clone())

    reducer = reducer_for(Own())
    for index in range(2):
        gradients = [gradient(layer, index, 0) for layer in LAYERS]
        bucket = Bucket(layers=LAYERS, gradients=gradients, step=step_at(index))
        message = reducer.message(bucket, SingleRank())
        assert isinstance(message, Payload)
        assert same(message.to_dense(), torch.cat(gradients))
        reducer.commit()


@pytest.mark.parametrize("base", [TopK, Int8], ids=["encode_sum", "encode_parts"])
def test_a_class_may_add_to_what_its_base_class_encodes(base: type[PerLayer]) -> None:
    class Doubled(base):  # type: ignore[valid-type, misc]
        def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
            return super().encode(2 * x, layer, step)

    layer, step = LAYERS[0], step_at(0)
    x = gradient(layer, 0, 0).view(-1)
    assert same(Doubled().encode(x, layer, step).to_dense(), base().encode(2 * x, layer, step).to_dense())


def second_step(
    spec: str, gradients: list[torch.Tensor], screen: Callable[[list[torch.Tensor]], object]
) -> list[torch.Tensor]:
    """Return the message and the residuals of a step that follows an ordinary one."""
    reducer, seen = reducer_for(build("compressors", Compressor, spec)), []
    first = [gradient(layer, 0, 0) for layer in LAYERS]
    for index, given in enumerate((first, [one.clone() for one in gradients])):
        bucket = Bucket(layers=LAYERS, gradients=given, step=step_at(index), screen=lambda given=given: screen(given))

        def start_sum(payload: Payload, key: Key) -> PendingSum:
            seen.append(payload.pack().clone())
            return PendingSum.done(payload)

        reducer.start(bucket, start_sum, SingleRank()).finish()
        reducer.commit()
    return [seen[-1], *reducer.state_dict()["residuals"].values()]


def zero_all(gradients: list[torch.Tensor]) -> None:
    if not all(bool(one.isfinite().all()) for one in gradients):
        for one in gradients:
            one.zero_()


@pytest.mark.parametrize("path", ["native", "reference"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("spec", NOTICING)
def test_what_is_not_finite_is_kept_away_where_encoding_finds_it(spec: str, value: float, path: str) -> None:
    gradients = [gradient(layer, 1, 0) for layer in LAYERS]
    gradients[1][77] = value
    with serving("reference") if path == "reference" else contextlib.nullcontext():
        found = second_step(spec, gradients, zero_all)
        zeros = second_step(spec, [torch.zeros_like(one) for one in gradients], lambda given: None)
    for one, other in zip(found, zeros, strict=True):
        assert same(one, other)


@pytest.mark.parametrize("spec", NOTICING)
def test_nobody_looks_at_finite_gradients_before_they_are_encoded(spec: str) -> None:
    looks: list[bool] = []
    second_step(spec, [gradient(layer, 1, 0) for layer in LAYERS], lambda given: looks.append(True))
    assert len(looks) == 1  # in the first step, which has no residual to add


@pytest.mark.parametrize("spec", NOTICING)
def test_finite_numbers_whose_sum_overflows_are_encoded_as_ever(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = [torch.full((layer.numel,), 3e38) for layer in LAYERS]
    monkeypatch.setattr(
        "tests.unit.compressors.test_encode_sum.gradient", lambda layer, step, rank: huge[layer.id].clone()
    )
    in_one = second_step(spec, huge, lambda given: None)
    monkeypatch.setattr(PerLayerReducer, "_encode_in_place", lambda *_, screened: None)
    in_three = second_step(spec, huge, lambda given: None)
    assert any(bool(one.isinf().any()) for one in in_one[1:])
    for one, other in zip(in_one, in_three, strict=True):
        assert same(one, other)
