"""Methods that encode the layers of a bucket in fewer passes give, bit for bit, what encoding layer by layer gives."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch

from collectives.base import Key, PendingSum
from collectives.kernels.library import serving
from collectives.options import build
from collectives.payloads import Bundle, Payload
from collectives.payloads.base import Dense
from collectives.transport.base import SingleRank
from compressors.base import Compressor, LossyCompressor, PerLayer
from compressors.layer import Layer, Memory, Step
from compressors.parts.buckets import NonFinite
from compressors.quantizers import Int8
from compressors.topk import TopK
from gradwire.exchange.reducer import PerLayerReducer
from gradwire.exchange.report import Bucket
from tests.testing.compressor_cases import CASES, Case, case, gradient, layers_of_shapes, step_at
from tests.testing.hard_numbers import hard_numbers
from tests.testing.loops import same
from tests.testing.thinned import every_second

LAYERS = layers_of_shapes(
    (123, 45), (64, 16, 3, 3), (50,), (1,), (3, 1), (40, 8), kinds=("linear", "conv", "bias", "bias", "bias", "linear")
)
LONG = layers_of_shapes((700, 400), (3,), (500, 601), kinds=("linear", "bias", "linear"))
"""Layers with more elements than fit into a cache, whose results bypass it; the last layer is not aligned."""

FUSED = [
    case("group_topk", group_size=100),
    case("group_topk", ratio=0.2, values="sigma"),
    case("topk", ratio=0.001, value_dtype="fp32", warmup_epochs=0),
    case("topk", ratio=0.05, value_dtype="bf16"),
    case("topk", ratio=1.0),
    case("topk", ratio=0.05, values="two_magnitudes"),
    case("qsparse", ratio=0.05),
    case("adaptive_topk", ratio=0.05, refresh=4),
    case("threshold", threshold=2.0),
    case("threshold", threshold=0.7, unit="absolute"),
    case("dgc", ratio=0.2, sample_ratio=1.0),
    case("dgc", ratio=0.2, sample_ratio=1.0, momentum_correction=False),
    case("algc", ratio=0.05, min_numel=0, refresh=4),
    case("algc", ratio=0.05, min_numel=100, flush_every=3, value_dtype="fp32"),
    case("hylo", min_numel=100),
    case("hylo", min_numel=100, decode="threshold", pow2_threshold=True),
    case("hylo", min_numel=100, threshold=0.1),
    case("int8", rounding="stochastic", block_numel=100),
    case("qsgd", norm="max", block_numel=13),
]
ENCODERS = [each for each in [*CASES, *FUSED] if isinstance(each.make(), PerLayer)]
each_encoder = pytest.mark.parametrize("encoder", ENCODERS, ids=str)
each_path = pytest.mark.parametrize("path", ["native", "reference"])


def kernels(path: str) -> contextlib.AbstractContextManager[None]:
    return serving("reference") if path == "reference" else contextlib.nullcontext()


def layer_by_layer(compressor: PerLayer) -> PerLayer:
    """Return the same compressor, which encodes each layer by itself."""
    kind = type(compressor)
    own = {"encode_bucket": PerLayer.encode_bucket, "__module__": kind.__module__}
    plain = type("ByLayer", (kind,), own, name=kind.component_name)
    return cast(PerLayer, plain.from_text(compressor.option_texts()))


def usual_gradients(step: int, layers: Sequence[Layer] = LAYERS) -> list[torch.Tensor]:
    """Return gradients: of one layer too small for fp16, of another all zero in the first step."""
    gradients = [gradient(layer, step, 0).view(-1) for layer in layers]
    gradients[2] *= 1e-8
    if step == 0:
        gradients[-1].zero_()
    return gradients


def hard_gradients(step: int) -> list[torch.Tensor]:
    """Return numbers that are difficult, but of which sums are finite."""
    numbers = [torch.cat([torch.ones(1), hard_numbers(10 * step + layer.id)]) for layer in LAYERS]
    repeated = [x.repeat(-(-layer.numel // len(x)))[: layer.numel] for x, layer in zip(numbers, LAYERS, strict=True)]
    return [x.nan_to_num(0).clamp(-1e30, 1e30) for x in repeated]


def steps_of(
    compressor: PerLayer, gradients_at: Callable[[int], list[torch.Tensor]], *, momentum: float = 0.9
) -> list[object]:
    """Return the message, its report and the state of each of six steps."""
    reducer, seen = PerLayerReducer(compressor, momentum=momentum), list[object]()
    for index in range(6):
        bucket = Bucket(layers=LAYERS, gradients=gradients_at(index), step=step_at(index))
        message = reducer.message(bucket, SingleRank())
        assert message is not None
        reducer.commit()
        seen += [message.pack(), message.to_dense(), message.nbytes, message.num_entries]
        seen += [(each.layer.id, each.payload, each.num_entries, each.density_wanted) for each in bucket.encoded]
        seen += [float(each.nbytes) for each in bucket.encoded]
        state = reducer.state_dict()
        by_name = {"residuals": state["residuals"], "velocities": state["velocities"], **state["memory"]}
        seen += [tensor for _, of_layers in sorted(by_name.items()) for _, tensor in sorted(of_layers.items())]
    return seen


def assert_equal(some: Sequence[object], others: Sequence[object]) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert same(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize(
    ("encoder", "gradients_at"),
    every_second((encoder, gradients) for gradients in (usual_gradients, hard_gradients) for encoder in ENCODERS),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_bucket_is_encoded_as_its_layers_are(encoder: Case, gradients_at: Callable[..., object]) -> None:
    compressor = cast(PerLayer, encoder.make())
    assert_equal(steps_of(compressor, gradients_at), steps_of(layer_by_layer(compressor), gradients_at))


@each_encoder
def test_native_loops_send_what_the_reference_path_sends_for_buckets_and_layers(encoder: Case) -> None:
    compressor = cast(PerLayer, encoder.make())
    native = steps_of(compressor, usual_gradients)
    with serving("reference"):
        assert_equal(native, steps_of(compressor, usual_gradients))
        assert_equal(native, steps_of(layer_by_layer(compressor), usual_gradients))


@pytest.mark.parametrize("encoder", FUSED, ids=str)
def test_what_is_written_past_the_caches_arrives(encoder: Case) -> None:
    def residuals() -> list[torch.Tensor]:
        reducer = encoder.reducer()
        flat = torch.cat([gradient(layer, 0, 0).view(-1) for layer in LONG])
        parts = list(flat.split([layer.numel for layer in LONG]))
        for index in range(2):
            given = [part.clone() if index else part for part in parts]
            reducer.reduce(
                Bucket(layers=LONG, gradients=given, step=step_at(index)), lambda payload, key: payload, SingleRank()
            )
            reducer.commit()
        return [*parts, *reducer.state_dict()["residuals"].values()]

    native = residuals()
    with serving("reference"):
        assert_equal(native, residuals())


def arguments(compressor: PerLayer, x: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor | None, ...]:
    """Return gradients, a residual of zeros, and memory for what is left, as far as the compressor keeps a residual."""
    if not compressor.traits.keeps_residual:
        return x, None, None
    return x, torch.zeros(sum(map(len, x))), torch.empty(sum(map(len, x)))


@each_path
@each_encoder
def test_what_is_not_finite_is_found(encoder: Case, path: str) -> None:
    for value in (torch.nan, -torch.inf):
        compressor = cast(PerLayer, encoder.make())
        layers = [layer for layer in LAYERS if not compressor.leaves_dense(layer)] or LAYERS
        step = dataclasses.replace(step_at(7), memory=Memory(scales={layer.id: 1.0 for layer in layers}))
        with kernels(path):
            finite = [gradient(layer, 1, 0).view(-1) for layer in layers]
            compressor.encode_bucket(*arguments(compressor, finite), layers, step, screen=True)
            finite[-1][-1] = value
            with pytest.raises(NonFinite):
                compressor.encode_bucket(*arguments(compressor, finite), layers, step, screen=True)


def second_step(
    compressor: Compressor, gradients: list[torch.Tensor], screen: Callable[[Sequence[torch.Tensor]], object]
) -> list[torch.Tensor]:
    """Return the message and the residuals of a step that follows an ordinary one."""
    reducer, seen = PerLayerReducer(cast(PerLayer, compressor), momentum=0.9), list[torch.Tensor]()
    for index, given in enumerate((usual_gradients(0), [one.clone() for one in gradients])):
        bucket = Bucket(layers=LAYERS, gradients=given, step=step_at(index), screen_=screen)

        def start_sum(payload: Payload, key: Key) -> PendingSum:
            seen.append(payload.pack().clone())
            return PendingSum.done(payload)

        reducer.start(bucket, start_sum, SingleRank()).finish()
        reducer.commit()
    return [seen[-1], *reducer.state_dict()["residuals"].values()]


def zero_all(gradients: Sequence[torch.Tensor]) -> None:
    if not all(bool(one.isfinite().all()) for one in gradients):
        for one in gradients:
            one.zero_()


@each_encoder
def test_a_step_with_such_a_value_is_one_of_zeros(encoder: Case) -> None:
    gradients = usual_gradients(1)
    gradients[1][77] = torch.nan
    found = second_step(encoder.make(), gradients, zero_all)
    zeros = second_step(encoder.make(), [torch.zeros_like(one) for one in gradients], lambda given: None)
    assert_equal(found, zeros)


@pytest.mark.parametrize("encoder", [each for each in ENCODERS if not each.make().traits.needs_all_ranks], ids=str)
def test_nobody_looks_at_finite_gradients_before_they_are_encoded(encoder: Case) -> None:
    looks: list[bool] = []
    second_step(encoder.make(), usual_gradients(1), lambda given: looks.append(True))
    assert not looks


@pytest.mark.parametrize("name", ["group_topk", "group_topk:values=floats", "topk", "topk:values=int8", "qsparse"])
def test_finite_numbers_whose_sum_overflows_are_encoded_as_ever(name: str) -> None:
    def step_of(compressor: PerLayer) -> list[torch.Tensor]:
        reducer = PerLayerReducer(compressor)
        residuals = {layer.id: torch.full((layer.numel,), 3e38) for layer in LAYERS}
        reducer.load_state_dict({"residuals": residuals, "velocities": {}, "memory": {}})
        huge = [torch.full((layer.numel,), 3e38) for layer in LAYERS]
        bucket = Bucket(layers=LAYERS, gradients=huge, step=step_at(1), screen_=lambda tensors: None)
        reducer.reduce(bucket, lambda payload, key: payload, SingleRank())
        reducer.commit()
        return [*bucket.updates, *reducer.state_dict()["residuals"].values()]

    compressor = build("compressors", PerLayer, name)  # type: ignore[type-abstract]
    found = step_of(compressor)
    assert any(bool(one.isinf().any()) for one in found)
    assert_equal(found, step_of(layer_by_layer(compressor)))


@pytest.mark.parametrize("base", [TopK, Int8])
def test_a_class_cannot_define_an_encode_that_nobody_calls(base: type[LossyCompressor]) -> None:
    def doubled(self: PerLayer, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        return Dense(2 * x)

    with pytest.raises(TypeError, match="Doubled defines encode, which the encode_bucket that it inherits does not"):
        type("Doubled", (base,), {"encode": doubled})
    with pytest.raises(TypeError, match=r"select_all = Sparsifier\.select_each"):
        type("Odd", (TopK,), {"select": lambda self, x, layer, step: torch.arange(1, len(x), 2)})
    both = {"encode": doubled, "encode_bucket": PerLayer.encode_bucket}
    reducer = PerLayerReducer(cast(PerLayer, type("Doubled", (base,), both)()))
    message = reducer.message(Bucket(layers=LAYERS, gradients=usual_gradients(1), step=step_at(1)))
    assert message is not None
    assert same(message.to_dense(), 2 * torch.cat(usual_gradients(1)))


@pytest.mark.parametrize("name", ["topk:ratio=0.05", "topk:ratio=0.05,skip=bias", "onebit", "adaptive_topk"])
def test_rounding_errors_reach_the_residual_of_their_layer(name: str) -> None:
    reducer = PerLayerReducer(build("compressors", PerLayer, name))  # type: ignore[type-abstract]
    message = reducer.message(Bucket(layers=LAYERS, gradients=usual_gradients(1), step=step_at(1)), SingleRank())
    assert isinstance(message, Bundle)
    assert message.keep_lost is not None
    message.keep_lost(LAYERS[0].numel + 7, torch.tensor([1e6]))
    keep_lost = message.payloads[1].keep_lost
    assert keep_lost is not None
    keep_lost(9, torch.tensor([1e6]))
    reducer.commit()
    assert (reducer.state_dict()["residuals"][1] > 1e5).nonzero().flatten().tolist() == [7, 9]


@pytest.mark.parametrize("name", ["topk", "sign", "threshold"])
def test_a_single_layer_has_a_message_without_a_bundle(name: str) -> None:
    reducer = PerLayerReducer(build("compressors", PerLayer, name))  # type: ignore[type-abstract]
    bucket = Bucket(layers=LAYERS[:1], gradients=usual_gradients(1)[:1], step=step_at(0))
    assert not isinstance(reducer.message(bucket, SingleRank()), Bundle)
