"""Kernels in Triton agree with the reference path bit for bit, on a GPU or in the interpreter."""

from __future__ import annotations

import pytest
import torch

from collectives.kernels.library import serving
from collectives.options import build, component_names
from collectives.payloads.codec.philox import random_words, uniform
from collectives.payloads.codec.values import to_value_dtype
from collectives.transport.base import SingleRank
from compressors.base import Compressor, PerLayer
from compressors.kernels import selection
from compressors.layer import Layer, Step
from gradwire.exchange.reducer import reducer_for
from gradwire.exchange.report import Bucket
from tests.testing.loops import (
    DEVICE,
    Computed,
    assert_triton_gives_what_the_reference_gives,
    needs_triton,
    on_triton,
    same,
)
from tests.unit.collectives.test_codec_loops import LOOPS as CODECS
from tests.unit.compressors.test_quantizer_loops import LOOPS as QUANTIZERS
from tests.unit.compressors.test_selection_loops import LOOPS as SELECTIONS

pytestmark = needs_triton


def key_of(seed: int) -> int:
    """Return a key of one word or of two."""
    return 2**62 + seed if seed % 2 else seed


KERNELS: dict[str, Computed] = {
    **{name: CODECS[name] for name in ("codes", "two means", "sixteen bits", "sparse", "group sparse")},
    **QUANTIZERS,
    **{name: lambda x, seed, computed=computed: [computed(x, seed)] for name, computed in SELECTIONS.items()},
    "uniform": lambda x, seed: [uniform(random_words(key_of(seed), x.numel(), x.device))],
    "random_words": lambda x, seed: [random_words(key_of(seed), x.numel(), x.device)],
}
PER_CASE = 100
"""Factor by which the interpreter is slower than a native loop."""


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_gives_what_the_reference_gives(name: str, cases: range) -> None:
    assert_triton_gives_what_the_reference_gives(KERNELS[name], cases[: -(-len(cases) // PER_CASE)])


def test_entries_are_counted_over_several_programs() -> None:
    """More than one program of every selection kernel, with ties across their borders."""
    x = torch.randn(40_000, generator=torch.Generator().manual_seed(1)).mul(8).round()
    level = float(x.abs().sort().values[-3000])
    with serving("reference"):
        expected = [selection.top_k(x, 3000), selection.reaching(x, level), selection.sum_of_squares(x)]
    with on_triton():
        there = x.to(DEVICE)
        results = [selection.top_k(there, 3000), selection.reaching(there, level), selection.sum_of_squares(there)]
    for mine, theirs in zip(results, expected, strict=True):
        assert same(mine.cpu() if isinstance(mine, torch.Tensor) else mine, theirs)


def encoders() -> list[str]:
    """Return the compressors that need no other ranks to encode, and only these kernels."""
    built = {name: build("compressors", Compressor, name) for name in component_names("compressors", Compressor)}
    return [name for name, made in built.items() if isinstance(made, PerLayer)]


@pytest.mark.parametrize("name", encoders())
def test_a_message_is_the_same_bytes_whichever_kernels_made_it(name: str) -> None:
    with serving("reference"):
        expected = messages(name, "cpu")
    with on_triton():
        assert messages(name, DEVICE) == expected


def messages(name: str, device: str) -> list[bytes]:
    """Return a rank's messages in two steps, the second with a residual."""
    reducer = reducer_for(build("compressors", Compressor, name), momentum=0.9)
    layer = Layer(id=0, name="layer", shape=(30, 100), kind="linear", numel=3000, position=0.5)
    sent = []
    for index in range(2):
        gradient = torch.randn(3000, generator=torch.Generator().manual_seed(index)).to(device)
        step = Step(index=index, epoch=0, rank=0, world_size=1, seed=1)
        message = reducer.message(
            Bucket(layers=[layer], gradients=[gradient], step=step), SingleRank(torch.device(device))
        )
        assert message is not None
        sent.append(message.pack().cpu().numpy().tobytes())
        reducer.commit()
    return sent


@pytest.mark.parametrize(("dtype", "tie"), [(torch.float16, 0x1000), (torch.bfloat16, 0x8000)])
def test_what_lies_between_two_16_bit_floats_becomes_the_even_one(dtype: torch.dtype, tie: int) -> None:
    upper = torch.arange(-(2**15), 2**15, 5, dtype=torch.int32) * (2 * tie)
    x = torch.cat([upper + tie - 1, upper + tie, upper + tie + 1]).view(torch.float32)
    with serving("reference"):
        expected = to_value_dtype(x, dtype)
    with on_triton():
        assert same(to_value_dtype(x.to(DEVICE), dtype).cpu(), expected)
