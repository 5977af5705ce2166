"""Error feedback for the rounding in collectives: sums lose nothing that fp32 can represent."""

from __future__ import annotations

import pytest
import torch

from collectives.base import Collective
from collectives.options import build
from compressors.base import Compressor
from gradwire.exchange.reducer import reducer_for
from gradwire.exchange.report import Bucket
from tests.testing.compressor_cases import LAYERS, gradient, step_at
from tests.testing.memory_transport import MemoryTransport, run_threads

RANKS, STEPS = 4, 30
NUMEL = sum(layer.numel for layer in LAYERS)


def off_by(compressor: str, collective: str, *, skipping: int = 0) -> float:
    """Return the largest |updates * ranks + residuals - gradients| over all steps; one of `skipping` is dropped."""

    def rank(transport: MemoryTransport) -> torch.Tensor:
        reducer = reducer_for(build("compressors", Compressor, compressor))
        bound = build("collectives", Collective, collective).bind(transport)
        balance = torch.zeros(NUMEL, dtype=torch.float64)
        for index in range(STEPS):
            gradients = [gradient(layer, index, transport.rank) for layer in LAYERS]
            bucket = Bucket(
                layers=list(LAYERS),
                gradients=[each.clone() for each in gradients],
                step=step_at(index, transport.rank, RANKS),
            )
            reducer.reduce(bucket, bound.sum, transport)
            if skipping and index % skipping == 1:
                reducer.drop()
                continue
            reducer.commit()
            balance += torch.cat(bucket.gradients).double() - torch.cat(gradients).double()
        residuals = reducer.state_dict()["residuals"]
        bound.close()
        waiting = [residuals.get(layer.id, torch.zeros(layer.numel)).double() for layer in LAYERS]
        return balance + torch.cat(waiting)

    return float(torch.stack(run_threads(rank, RANKS)).sum(0).abs().max())


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
    ],
)
def test_updates_and_residuals_are_the_gradients(compressor: str, collective: str) -> None:
    """Without the feedback the sums are off by 0.01 or more."""
    assert off_by(compressor, collective) < 1e-4


def test_a_dropped_step_leaves_nothing_behind() -> None:
    assert off_by("group_topk:group_size=100,ratio=0.1", "ring", skipping=3) < 1e-4


def test_without_error_feedback_nothing_is_kept() -> None:
    reducer = reducer_for(build("compressors", Compressor, "topk:error_feedback=false"))
    bucket = Bucket(layers=LAYERS[:1], gradients=[gradient(LAYERS[0], 0, 0)], step=step_at(0))
    payload = reducer.message(bucket)
    assert payload is not None
    assert payload.keep_lost is None
