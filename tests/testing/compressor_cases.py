"""The compressors and options that the contract is checked for, and gradients for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from bench.core import registry, spec
from collectives.allreduce import Allgather
from collectives.base import BoundCollective, Collective
from compressors.base import Compressor, DdpHook
from compressors.layer import Layer, Step
from gradwire.exchange.reducer import Reducer, reducer_for
from gradwire.exchange.report import Bucket
from tests.testing.memory_transport import MemoryTransport, MemoryWires, run_threads

T = TypeVar("T")

LATE_EPOCH = 99  # after every warm-up


@dataclasses.dataclass(frozen=True)
class Case:
    """One compressor with given options."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def make(self, **changes: Any) -> Compressor:
        return cast(Compressor, registry.load("compressors", self.name)(**{**dict(self.options), **changes}))

    def reducer(self, **changes: Any) -> Reducer:
        """Return a new reducer of the compressor."""
        return reducer_for(self.make(**changes))

    def __str__(self) -> str:
        return ",".join([self.name, *(f"{key}={value}" for key, value in self.options)])


def case(name: str, **options: Any) -> Case:
    return Case(name, tuple(options.items()))


def class_of(name: str) -> type[Compressor]:
    return cast(type[Compressor], registry.load("compressors", name))


NAMES = [name for name in registry.entries("compressors") if not issubclass(class_of(name), DdpHook)]

VARIANTS = [
    case("fp16", error_feedback=True),
    case("bf16", error_feedback=True, skip=("norm", "bias")),
    case("topk", value_dtype="fp32", ratio=0.1, dense_ends=True),
    case("topk", error_feedback=False),
    case("topk", momentum_correction=True, skip=("norm",)),
    case("topk", dense_steps=2),
    case("topk", values="two_magnitudes", ratio=0.1),
    case("topk", values="int8", momentum_correction=True, skip=("norm",)),
    case("adaptive_topk", values="sigma", refresh=2),
    case("qsparse", ratio=0.1, dense_ends=True),
    case("qsparse", momentum_correction=True, warmup_epochs=0),
    case("group_topk", group_size=100, ratio=0.03, value_dtype="bf16"),
    case("group_topk", preset="patent"),
    case("group_topk", momentum_correction=True, min_numel=100),
    case("group_topk", values="floats"),
    case("group_topk", values="two_magnitudes", group_size=100, ratio=0.03, error_feedback=False),
    case("group_topk", values="sigma", min_numel=100),
    case("group_topk", values="int8", group_size=64, ratio=0.25),
    case("randomk", error_feedback=False, scaled=True),
    case("threshold", unit="absolute", threshold=0.5),
    case("threshold", unit="rms", threshold=1.5, value_dtype="fp32"),
    case("int8", rounding="stochastic"),
    case("int8", error_feedback=True, block_numel=100),
    case("qsgd", bits=2, norm="max", block_numel=64),
    case("qsgd", error_feedback=True),
    case("natural", error_feedback=True),
    case("natural", bits=4, block_numel=99),
    case("terngrad", clip_sigmas=0),
    case("terngrad", error_feedback=True),
    case("terngrad", shared_scale=True),
    case("sign", mode="vote", error_feedback=False),
    case("sign", min_numel=50),
    case("onebit", dense_ends=True),
    case("dgc", ratio=0.05, momentum_correction=False),
    case("dgc", ratio=0.01, clip_norm=1.0, sample_ratio=0.1),
    case("adaptive_topk", ratio=0.05, refresh=2),
    case("algc", min_numel=0, ratio=0.05),
    case("algc", min_numel=100, threshold="exact", momentum_correction=True),
    case("algc", min_numel=100, flush_every=2),
    case("hylo", min_numel=50, exponent=0.3),
    case("hylo", min_numel=50, exponent=1.0, pow2_threshold=True, importance="l2", max_age=3),
    case("hylo", min_numel=50, shared_threshold=True, importance="random"),
    case("hylo", min_numel=50, decode="mean_selected", value_dtype="fp16", gamma=0.7),
    case("row_sparse", value_dtype="fp16"),
    case("powersgd", rank=1),
    case("powersgd", rank=4, warm_start=False, error_feedback=False),
    case("powersgd", dense_steps=2, skip=("conv",)),
    case("powersgd", alternate=True),
]
CASES = [case(name) for name in NAMES] + VARIANTS


def layers_of_shapes(*shapes: tuple[int, ...], kinds: Sequence[str] | None = None) -> list[Layer]:
    """Return layers as in a model: 4-D shapes are convolutions, 2-D linear, 1-D biases."""
    by_rank: dict[int, Any] = {4: "conv", 2: "linear", 1: "bias", 0: "other"}
    chosen: Sequence[Any] = kinds or [by_rank[len(shape)] for shape in shapes]
    return [
        Layer(
            id=index,
            name=f"layer{index}",
            shape=shape,
            kind=kind,
            numel=math.prod(shape),
            filter_axis=0 if kind in ("conv", "embedding") else None,
            position=index / max(1, len(shapes) - 1),
        )
        for index, (shape, kind) in enumerate(zip(shapes, chosen, strict=True))
    ]


LAYERS = layers_of_shapes(
    *((8, 3, 3, 3), (8,), (8,), (40, 72), (40,), (10, 40), (10,)),
    kinds=("conv", "bias", "norm", "linear", "bias", "linear", "bias"),
)


def gradient(
    layer: Layer, step: int, rank: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return heavy-tailed noise around a mean that all ranks share, which resembles a gradient."""
    shared = torch.Generator().manual_seed(1000 * layer.id + 7)
    own = torch.Generator().manual_seed(1_000_000 * (step + 1) + 1000 * layer.id + rank)
    mean = torch.randn(layer.numel, generator=shared)
    noise = torch.randn(layer.numel, generator=own)
    return (scale * (0.3 * mean + noise * noise.abs())).to(dtype)


def step_at(index: int, transport_or_rank: Any = 0, world_size: int = 1, *, epoch: int = LATE_EPOCH) -> Step:
    return Step(index=index, epoch=epoch, rank=transport_or_rank, world_size=world_size, seed=5)


def reduce_once(
    reducer: Reducer,
    collective: BoundCollective,
    layers: Sequence[Layer],
    gradients: Sequence[torch.Tensor],
    step: Step,
    *,
    commit: bool = True,
) -> tuple[list[torch.Tensor], Bucket]:
    """Return the updates for copies of these gradients, and the bucket after `reduce`."""
    bucket = Bucket(layers=list(layers)[::-1], gradients=[g.clone() for g in gradients][::-1], step=step)
    reducer.reduce(bucket, collective.sum, collective.transport)
    if commit:
        reducer.commit()
    return bucket.gradients[::-1], bucket


def alone() -> BoundCollective:
    """Return a collective with one rank."""
    return Allgather().bind(MemoryWires(1).transport(0))


def on_ranks(world_size: int, collective: str, fn: Callable[[MemoryTransport, BoundCollective], T]) -> list[T]:
    """Return `fn(transport, collective)` of every rank of an in-memory transport; `collective` is a spec."""

    def run(transport: MemoryTransport) -> T:
        made = cast(Collective, spec.build("collectives", collective)).bind(transport)
        try:
            return fn(transport, made)
        finally:
            made.close()

    return run_threads(run, world_size)
