"""Encoding all layers of a bucket in one call gives what encoding one after another gives."""

from __future__ import annotations

import pytest
import torch

from bench.train.overlap import sample_index_sets
from collectives.options import build
from collectives.payloads import Bundle, Payload
from collectives.payloads.batch import Batch
from collectives.transport.base import SingleRank
from compressors.base import Compressor
from compressors.ddp.reducer import PerLayerReducer, reducer_for
from compressors.ddp.report import Bucket
from compressors.layer import Layer
from tests.testing.compressor_cases import gradient, layers_of_shapes, step_at
from tests.testing.hard_numbers import hard_numbers
from tests.testing.loops import needs_loops, same

pytestmark = needs_loops

LAYERS = layers_of_shapes(
    (123, 45), (64, 16, 3, 3), (50,), (1,), (3, 1), (40, 8), kinds=("linear", "conv", "bias", "bias", "bias", "linear")
)
SPECS = [
    "topk",
    "topk:ratio=0.05,value_dtype=bf16,warmup_epochs=0",
    "topk:ratio=0.001,value_dtype=fp32,warmup_epochs=0",
    "topk:ratio=1,warmup_epochs=0",
    "topk:momentum_correction=true",
    "sign",
    "onebit",
    "terngrad",
    "terngrad:clip_sigmas=0",
    "dgc:warmup_epochs=0",
    "dgc",
    "dgc:ratio=0.2,sample_ratio=1,warmup_epochs=0",
]


def gradients_at(step: int) -> list[torch.Tensor]:
    """Return gradients: of one layer too small for fp16, of another all zero in the first step."""
    gradients = [gradient(layer, step, 0).view(-1) for layer in LAYERS]
    gradients[2] *= 1e-8
    if step == 0:
        gradients[5].zero_()
    return gradients


def hard_gradients_at(step: int) -> list[torch.Tensor]:
    """Return numbers that are difficult, but finite."""
    numbers = [torch.cat([torch.ones(1), hard_numbers(10 * step + layer.id)]) for layer in LAYERS]
    repeated = [x.repeat(-(-layer.numel // len(x)))[: layer.numel] for x, layer in zip(numbers, LAYERS, strict=True)]
    return [x.nan_to_num(0, 3e38, -3e38) for x in repeated]


def encoded(spec: str, gradients_of: object, *, nesterov: bool = False) -> tuple[PerLayerReducer, list[object]]:
    """Return the reducer after four steps, and for each step its message, its report and the state."""
    reducer = reducer_for(build("compressors", Compressor, spec), momentum=0.9, nesterov=nesterov)
    assert isinstance(reducer, PerLayerReducer)
    seen: list[object] = []
    for index in range(4):
        bucket = Bucket(layers=LAYERS, gradients=gradients_of(index), step=step_at(index))  # type: ignore[operator]
        message = reducer.message(bucket, SingleRank())
        assert isinstance(message, Payload)
        reducer.commit()
        seen += [message.pack(), message.to_dense(), message.nbytes, message.num_entries]
        seen += [(e.layer.id, e.payload, e.nbytes, e.num_entries, e.density_wanted) for e in bucket.encoded]
        state = reducer.state_dict()
        seen += [tensor for name in ("residuals", "velocities") for _, tensor in sorted(state[name].items())]
    return reducer, seen


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> object:
    """Return a function after whose call layers are encoded one after another."""
    return lambda: monkeypatch.setattr(PerLayerReducer, "_groups_to_encode", PerLayerReducer._groups)


@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
@pytest.mark.parametrize("gradients_of", [gradients_at, hard_gradients_at], ids=["usual", "hard"])
@pytest.mark.parametrize("spec", SPECS)
def test_one_call_gives_what_one_per_layer_gives(
    spec: str, gradients_of: object, nesterov: bool, apart: object
) -> None:
    _, together = encoded(spec, gradients_of, nesterov=nesterov)
    apart()  # type: ignore[operator]
    _, one_by_one = encoded(spec, gradients_of, nesterov=nesterov)
    assert len(together) == len(one_by_one)
    for one, other in zip(together, one_by_one, strict=True):
        assert same(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("spec", SPECS)
def test_the_layers_are_in_one_call(spec: str) -> None:
    reducer = reducer_for(build("compressors", Compressor, spec), momentum=0.9)
    assert isinstance(reducer, PerLayerReducer)
    bucket = Bucket(layers=LAYERS, gradients=gradients_at(0), step=step_at(0))
    assert isinstance(reducer.message(bucket, SingleRank()), Batch)


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "topk:ratio=0.05,skip=bias", "onebit"])
def test_rounding_errors_reach_the_residual_of_their_layer(spec: str) -> None:
    reducer = reducer_for(build("compressors", Compressor, spec))
    assert isinstance(reducer, PerLayerReducer)
    message = reducer.message(Bucket(layers=LAYERS, gradients=gradients_at(1), step=step_at(1)), SingleRank())
    assert isinstance(message, Bundle)
    assert message.keep_lost is not None
    message.keep_lost(LAYERS[0].numel + 7, torch.tensor([1e6]))
    keep_lost = message.payloads[1].keep_lost
    assert keep_lost is not None
    keep_lost(9, torch.tensor([1e6]))
    reducer.commit()
    residuals = reducer.state_dict()["residuals"]
    assert (residuals[1] > 1e5).nonzero().flatten().tolist() == [7, 9]


def test_positions_are_sampled_layer_by_layer(apart: object) -> None:
    numel = sum(layer.numel for layer in LAYERS)
    together, _ = encoded("topk:ratio=0.05", gradients_at)
    apart()  # type: ignore[operator]
    one_by_one, _ = encoded("topk:ratio=0.05", gradients_at)
    assert sample_index_sets(together.last_encoded, numel) == sample_index_sets(one_by_one.last_encoded, numel)


def test_a_single_layer_has_a_message_without_a_bundle() -> None:
    layer: Layer = LAYERS[0]
    reducer = reducer_for(build("compressors", Compressor, "topk"))
    assert isinstance(reducer, PerLayerReducer)
    message = reducer.message(Bucket(layers=[layer], gradients=[gradient(layer, 0, 0)], step=step_at(0)), SingleRank())
    assert not isinstance(message, Bundle)
