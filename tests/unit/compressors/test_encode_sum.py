"""What a compressor does in one pass gives what adding, encoding and subtracting by themselves give."""

from __future__ import annotations

import contextlib

import pytest
import torch

from collectives.kernels.library import reference_path
from collectives.payloads.base import Payload
from collectives.spec import build
from collectives.transport.alone import Alone
from compressors.base import Compressor
from compressors.ddp.bucket import Bucket
from compressors.ddp.reducer import Reducer
from tests.testing.compressor_cases import gradient, layers_of_shapes, step_at
from tests.testing.loops import same

LAYERS = layers_of_shapes((123, 45), (64, 16, 3, 3), (50,), kinds=("linear", "conv", "bias"))
SPECS = [
    "group_topk:group_size=100",
    "randomk:ratio=0.1",
    "topk:ratio=0.05",
    "topk:ratio=0.9,value_dtype=fp32",
    "adaptive_topk:ratio=0.05,refresh=4",
    "sign",
    "onebit",
    "algc:ratio=0.05,min_numel=0,warmup_epochs=0,refresh=4",
    "algc:ratio=0.05,min_numel=100,flush_every=3,value_dtype=fp32",
    "hylo:min_numel=100",
    "hylo:min_numel=100,decode=threshold,pow2_threshold=true",
    "hylo:min_numel=100,threshold=0.1",
]


def messages_and_residuals(spec: str) -> list[torch.Tensor]:
    """Of six steps."""
    reducer = Reducer(build("compressors", Compressor, spec))
    seen: list[torch.Tensor] = []
    for index in range(6):
        bucket = Bucket(layers=LAYERS, gradients=[gradient(layer, index, 0) for layer in LAYERS], step=step_at(index))
        message = reducer.message(bucket, Alone())
        assert isinstance(message, Payload)
        reducer.commit()
        seen += [message.pack(), *reducer.state_dict()["residuals"].values()]
    return seen


@pytest.mark.parametrize("path", ["native", "reference"])
@pytest.mark.parametrize("spec", SPECS)
def test_one_pass_gives_what_three_give(spec: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with reference_path() if path == "reference" else contextlib.nullcontext():
        in_one = messages_and_residuals(spec)
        monkeypatch.setattr(Reducer, "_takes_sum", lambda self, unit: False)
        in_three = messages_and_residuals(spec)
    for one, three in zip(in_one, in_three, strict=True):
        assert same(one, three)


@pytest.mark.parametrize("spec", SPECS)
def test_native_loops_send_what_the_reference_path_sends(spec: str) -> None:
    native = messages_and_residuals(spec)
    with reference_path():
        reference = messages_and_residuals(spec)
    for one, other in zip(native, reference, strict=True):
        assert same(one, other)
