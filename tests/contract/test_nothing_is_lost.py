"""Updates times ranks, and what waits, make the gradients: whatever a collective rounds, encodes again or answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from collectives.base import BoundCollective, Collective
from collectives.options import build
from compressors.base import Compressor
from gradwire.exchange.communicator import CompressedSums
from gradwire.exchange.packed_state import pack_state, unpack_state
from gradwire.exchange.reducer import reducer_for
from gradwire.exchange.report import Bucket
from tests.testing.compressor_cases import layers_of_shapes, step_at
from tests.testing.memory_transport import MemoryTransport, run_threads

LAYERS = layers_of_shapes((30, 80), (500,), (12, 100), (7,))
NUMEL = sum(layer.numel for layer in LAYERS)
LAID_OUT = [[(0, 1, 2, 3)], [(3, 2), (1, 0)], [(3, 2), (1, 0)], [(3,), (2, 0, 1)]]
"""Keys of each step's messages: DDP's first step is one bucket in registration order, and later ones are reversed."""
WORLD_SIZE, STEPS, DROPPED, RESUMED = 4, 12, 5, 6


def add_by_layer_(into: torch.Tensor, parts: Sequence[torch.Tensor], key: Sequence[int], factor: int = 1) -> None:
    """Add the tensors of these layers to a vector of all layers in model order."""
    by_layer = into.split([layer.numel for layer in LAYERS])
    for layer, part in zip(key, parts, strict=True):
        by_layer[layer].add_(part, alpha=factor)


@pytest.mark.parametrize(
    ("compressor", "collective"),
    [
        ("group_topk:group_size=100,ratio=0.1", "ring"),
        ("group_topk:group_size=100,ratio=0.1,values=floats", "ring"),
        ("topk:ratio=0.1,value_dtype=bf16,skip=norm+bias", "halving_doubling"),
        ("adaptive_topk:ratio=0.1", "tree"),
        ("randomk:ratio=0.1", "hierarchical"),
        ("fp16:error_feedback=true,skip=bias", "ring"),
        ("fp16:error_feedback=true", "pool"),
        ("int8:block_numel=64,min_numel=10,error_feedback=true", "ring:requantise=true"),
        ("qsgd:bits=8,skip=linear", "ring:requantise=true"),
        ("group_topk:ratio=0.1,group_size=32,warmup_epochs=0", "server:downlink=recode"),
        ("group_topk:ratio=0.1,group_size=32,warmup_epochs=0", "server:downlink=recode,placement=sharded"),
        ("hylo:min_numel=60", "server:downlink=recode,placement=sharded"),
        ("topk:ratio=0.1", "server:downlink=union,placement=sharded,error_feedback=true"),
    ],
)
def test_whatever_the_buckets_a_dropped_step_and_a_resume(compressor: str, collective: str) -> None:
    """Layers that are left dense travel in the same message. Without feedback, sums are off by 0.01 or more."""
    made = build("compressors", Compressor, compressor)

    def bind(transport: MemoryTransport) -> tuple[BoundCollective, CompressedSums]:
        sums = CompressedSums(made, LAYERS)
        return build("collectives", Collective, collective).bind(transport, sums), sums

    def rank(transport: MemoryTransport) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (bound, sums), reducer = bind(transport), reducer_for(made)
        given, applied, kept = (torch.zeros(NUMEL, dtype=torch.float64) for _ in range(3))
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + transport.rank)
            sums.step = step_at(step, transport.rank, WORLD_SIZE)
            before = pack_state(bound.state_dict())
            for key in LAID_OUT[step % len(LAID_OUT)]:
                gradients = [torch.randn(LAYERS[layer].numel, generator=generator) for layer in key]
                bucket = Bucket(layers=[LAYERS[layer] for layer in key], gradients=gradients, step=sums.step)
                add_by_layer_(given, gradients, key, int(step != DROPPED))
                reducer.reduce(bucket, bound.sum, transport)
                add_by_layer_(applied, bucket.gradients, key, WORLD_SIZE * (step != DROPPED))
            if step == DROPPED:
                reducer.drop()
                bound.drop()
                bound.commit()  # has nothing to accept
                assert "server" in collective or torch.equal(pack_state(bound.state_dict()), before)
                continue
            reducer.commit()
            bound.commit()
            if step == RESUMED:
                state = unpack_state(pack_state(bound.state_dict()))
                bound.close()
                bound, sums = bind(transport)
                bound.load_state_dict(state)
        waiting = bound.state_dict().get("residuals", {})
        if "requantise" in collective:  # beside what waits, it has memory for the smallest layer's messages, if dense
            assert 0 <= bound.nbytes - sum(error.nbytes for error in waiting.values()) <= 4 * LAYERS[3].numel
        for (layer, start, stop), error in waiting.items():
            kept.split([each.numel for each in LAYERS])[layer][start:stop].add_(error.view(-1))
        for layer, error in reducer.state_dict()["residuals"].items():
            add_by_layer_(kept, [error], (layer,))
        bound.close()
        return given, applied, kept

    ranks = run_threads(rank, WORLD_SIZE)
    assert all(torch.equal(applied, ranks[0][1]) for _, applied, _ in ranks)
    given, kept = (sum(each[index] for each in ranks) for index in (0, 2))
    assert kept.norm() > 0
    if compressor != "qsgd:bits=8,skip=linear":  # whose own codes lose something as well
        assert float((ranks[0][1] + kept - given).abs().max()) < 1e-4


def test_without_error_feedback_nothing_is_kept() -> None:
    reducer = reducer_for(build("compressors", Compressor, "topk:error_feedback=false"))
    payload = reducer.message(Bucket(layers=LAYERS[:1], gradients=[torch.ones(2400)], step=step_at(0)))
    assert payload is not None
    assert payload.keep_lost is None
