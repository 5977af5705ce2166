"""PowerSGD against PyTorch's hook, and against known mistakes of other implementations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from collectives.options import OptionError
from compressors.layer import Layer, layers_of
from compressors.powersgd import PowerSgd
from gradwire.exchange.reducer import Reducer, reducer_for
from tests.testing.compressor_cases import alone, gradient, layers_of_shapes, on_ranks, reduce_once, step_at

LAYERS = layers_of_shapes((24, 10, 2, 1), (24, 20), (20,), (30, 16))


_GROUPS: list[dist.ProcessGroup | None] = []
"""Keeps references to groups: a group's thread must not drop the last one, because it would wait for itself."""


@pytest.fixture
def lone_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    _GROUPS.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


@dataclasses.dataclass
class FakeBucket:
    """The part of DDP's bucket that the hook uses."""

    flat: torch.Tensor
    layers: list[Layer]

    def buffer(self) -> torch.Tensor:
        return self.flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def gradients(self) -> list[torch.Tensor]:
        parts = torch.split(self.flat, [layer.numel for layer in self.layers])
        return [part.view(layer.shape) for part, layer in zip(parts, self.layers, strict=True)]


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_it_walks_with_pytorchs_hook(rank: int) -> None:
    """Same start, same gradients, six steps of warm start and error feedback: updates agree to 1e-5."""
    compressor = PowerSgd(rank=rank, min_compression_rate=1.0)
    reducer = reducer_for(compressor)
    starts = started(reducer, [layer for layer in LAYERS if not compressor.leaves_dense(layer)])
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1.0)
    state.iter = 2
    state.q_memory_dict[0] = torch.cat([q.reshape(-1) for q in starts])
    state.p_memory_dict[0] = torch.empty(
        sum(min(rank, *matrix(layer)) * matrix(layer)[0] for layer in LAYERS if not compressor.leaves_dense(layer))
    )
    collective = alone()
    for index in range(6):
        gradients = [gradient(layer, index, 0) for layer in LAYERS]
        updates, _ = reduce_once(reducer, collective, LAYERS, gradients, step_at(index))
        theirs = powerSGD_hook(state, FakeBucket(torch.cat(gradients), LAYERS)).wait()  # type: ignore[arg-type]
        torch.testing.assert_close(torch.cat(updates), theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def started(reducer: Reducer, layers: list[Layer]) -> list[torch.Tensor]:
    """Let the first step start from random factors Q, and return them."""
    generator = torch.Generator().manual_seed(4)
    rank = reducer.compressor.rank
    starts = [torch.rand(matrix(layer)[1], min(rank, *matrix(layer)), generator=generator) * 2 - 1 for layer in layers]
    known = {layer.id: start.clone() for layer, start in zip(layers, starts, strict=True)}
    reducer.load_state_dict({"residuals": {}, "velocities": {}, "memory": {"last_q": known}})
    return starts


def matrix(layer: Layer) -> tuple[int, int]:
    return layer.shape[0], layer.numel // layer.shape[0]


def test_layers_of_one_shape_are_normalised_each_by_itself() -> None:
    """A norm over the whole batch would scale each layer by its share, and starve the small ones."""
    layers = layers_of_shapes((30, 20), (30, 20), (30, 20), (30, 20))
    gradients = [gradient(layer, 0, 0, scale=10.0**i) for i, layer in enumerate(layers)]
    together, _ = reduce_once(reducer_for(PowerSgd(rank=1)), alone(), layers, gradients, step_at(0))
    for layer, g, update in zip(layers, gradients, together, strict=True):
        (lone,), _ = reduce_once(reducer_for(PowerSgd(rank=1)), alone(), [layer], [g], step_at(0))
        torch.testing.assert_close(update, lone, rtol=1e-4, atol=1e-5 * float(lone.abs().max()))


def test_a_matrix_of_low_rank_arrives_whole_once_the_start_is_warm() -> None:
    layer = layers_of_shapes((40, 30))[0]
    generator = torch.Generator().manual_seed(0)
    g = (torch.randn(40, 2, generator=generator) @ torch.randn(2, 30, generator=generator)).view(-1)
    reducer = reducer_for(PowerSgd(rank=2, error_feedback=False))
    for index in range(3):
        (update,), _ = reduce_once(reducer, alone(), [layer], [g], step_at(index))
    torch.testing.assert_close(update, g, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("warm_start", [True, False])
def test_a_constant_gradient_is_transmitted(warm_start: bool) -> None:
    layer = layers_of_shapes((40, 30))[0]
    g, total = gradient(layer, 0, 0), torch.zeros(1200)
    reducer, collective = reducer_for(PowerSgd(rank=1, warm_start=warm_start)), alone()
    for index in range(200):
        (update,), _ = reduce_once(reducer, collective, [layer], [g], step_at(index))
        total += update
    assert float((total / 200 - g).norm() / g.norm()) < 0.25


def test_alternating_it_sends_one_factor_per_step_by_the_papers_formula() -> None:
    layer = layers_of_shapes((40, 30))[0]
    compressor = PowerSgd(rank=2, alternate=True)
    reducer, collective = reducer_for(compressor), alone()
    residual, (q,) = torch.zeros(40, 30), started(reducer, [layer])
    for index in range(6):
        g = gradient(layer, index, 0)
        (update,), _ = reduce_once(reducer, collective, [layer], [g], step_at(index))
        x = g.view(40, 30) + residual
        if index % 2 == 0:
            q = torch.linalg.qr(q).Q
            p = x @ q
        else:
            p = torch.linalg.qr(p).Q
            q = x.T @ p
        residual = x - p @ q.T
        torch.testing.assert_close(update.view(40, 30), p @ q.T, rtol=1e-4, atol=1e-5)
        assert compressor.num_exchanged(layer, step_at(index)) == 2 * (40, 30)[index % 2]


def test_residuals_differ_by_rank_and_their_mean_is_what_the_update_lacks() -> None:
    layers = layers_of_shapes((24, 20), (20,))

    def rank_of(transport: Any, collective: Any) -> tuple[torch.Tensor, torch.Tensor]:
        reducer = reducer_for(PowerSgd(rank=1))
        gradients = [gradient(layer, 0, transport.rank) for layer in layers]
        updates, _ = reduce_once(reducer, collective, layers, gradients, step_at(0, transport.rank, 3))
        return updates[0], reducer.state_dict()["residuals"][0]

    results = on_ranks(3, "ring", rank_of)
    gradients = [gradient(layers[0], 0, rank) for rank in range(3)]
    mean_residual = torch.stack([residual for _, residual in results]).mean(0)
    torch.testing.assert_close(results[0][0] + mean_residual, torch.stack(gradients).mean(0), rtol=1e-4, atol=1e-5)
    assert not torch.equal(results[0][1], results[1][1])


def test_every_matrix_of_a_language_model_is_factored() -> None:
    model = nn.ModuleDict({
        "table": nn.Embedding(90, 16), "attention": nn.MultiheadAttention(16, 2), "linear": nn.Linear(16, 16),
        "norm": nn.LayerNorm(16),
    })  # fmt: skip
    compressor = PowerSgd(rank=2)
    exchanged = {
        layer.name: compressor.num_exchanged(layer, step_at(0))
        for layer in layers_of(model)
        if not compressor.leaves_dense(layer)
    }
    assert exchanged == {
        "table.weight": 2 * (90 + 16), "attention.in_proj_weight": 2 * (48 + 16),
        "attention.out_proj.weight": 2 * 32, "linear.weight": 2 * 32,
    }  # fmt: skip


def test_rows_of_zeros_stay_zero() -> None:
    (table,) = layers_of(nn.Embedding(90, 16))
    x = gradient(table, 0, 0).view(90, 16)
    x[3:] = 0
    (update,), _ = reduce_once(reducer_for(PowerSgd(rank=3)), alone(), [table], [x.view(-1)], step_at(0))
    torch.testing.assert_close(update.view(90, 16), x, rtol=1e-4, atol=1e-5)  # of rank 3
    assert not update.view(90, 16)[3:].any()


def test_what_would_not_shrink_is_left_alone() -> None:
    compressor = PowerSgd(rank=2, min_compression_rate=2)
    shapes = {(64, 64): False, (8, 8): True, (64,): True, (64, 3, 1, 1): True, (64, 3, 3, 3): False}
    for shape, dense in shapes.items():
        assert compressor.leaves_dense(layers_of_shapes(shape, kinds=("other",))[0]) is dense
    assert compressor.expected_bucket_nbytes(layers_of_shapes((64, 64), (64,))) == 32 + 4 * (2 * 128 + 64)
    assert compressor.expected_bucket_nbytes(layers_of_shapes((64,))) == 16 + 256
    assert not PowerSgd(alternate=True).leaves_dense(layers_of_shapes((8, 8), kinds=("other",))[0])
    with pytest.raises(OptionError, match="alternate=true needs warm_start=true"):
        PowerSgd(alternate=True, warm_start=False)
