"""Synthetic payloads that `bench collectives` sums, one per rank, and the overlap of their index sets."""

from __future__ import annotations

import copy
import dataclasses
from typing import cast

import torch

from bench.core import spec
from bench.extensions.microbenchmarks.options import CollectivesConfig
from bench.train.rank import gather_bytes
from bench.train.sent import support_overlap
from collectives.payloads.base import Payload, unpack
from collectives.payloads.dense import Dense
from collectives.transport.base import Transport
from compressors.base import PerLayer
from compressors.ddp.reducer import PerLayerReducer
from compressors.ddp.report import Bucket
from compressors.layer import Layer, Step

TORCH_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "int32": torch.int32,
}
_INT8_MAX = 127


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticPayloads:
    """The payloads that the ranks sum.

    Attributes:
        own: this rank's payload; do not pass it to a collective, which may overwrite it.
        of_all: the payloads of all ranks in rank order, packed and unpacked once.
        overlap: share of entries that two ranks both send, mean over pairs of ranks; None if all elements are sent.
    """

    own: Payload
    of_all: list[Payload]
    overlap: float | None

    def fresh(self) -> Payload:
        """Return a copy of this rank's payload."""
        return copy.deepcopy(self.own)


def make_synthetic_payloads(
    config: CollectivesConfig, compressor: str, count: int, transport: Transport
) -> SyntheticPayloads:
    """Return all ranks' payloads, each of a tensor of `count` elements; every rank must call.

    Args:
        config: the configuration of the sweep.
        compressor: spec text; with `none`, the payload is the tensor in its own type.
        count: number of elements.
        transport: used by compressors whose ranks communicate before they encode.
    """
    tensor = synthetic_tensor(config, count, transport.rank).to(transport.device)
    own = payload_of(tensor, compressor, config, transport)
    packed = gather_bytes(own.pack().cpu().numpy().tobytes())
    of_all = [unpack(torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(transport.device)) for raw in packed]
    return SyntheticPayloads(own=own, of_all=of_all, overlap=support_overlap(of_all))


def payload_of(tensor: torch.Tensor, compressor: str, config: CollectivesConfig, transport: Transport) -> Payload:
    """Return the payload that a compressor produces for one layer at full compression; every rank must call.

    Args:
        tensor: 1-D tensor of a floating-point type; with compressor `none`, of any type.
        compressor: spec text; `none` keeps the tensor's own type.
        config: the configuration of the sweep.
        transport: used by compressors whose ranks communicate before they encode.
    """
    component = cast(PerLayer, spec.build("compressors", compressor))
    if component.component_name == "none":
        return Dense(tensor.clone())
    count = tensor.numel()
    layer = Layer(id=0, name="tensor", shape=(1, count), kind="linear", numel=count, position=0.5)
    step = Step(index=0, epoch=0, rank=transport.rank, world_size=config.world_size, seed=config.seed, warmup=False)
    payload = PerLayerReducer(component).message(
        Bucket(layers=[layer], gradients=[tensor.clone()], step=step), transport
    )
    assert payload is not None  # sizes without elements are refused earlier
    return payload


def synthetic_tensor(config: CollectivesConfig, count: int, rank: int) -> torch.Tensor:
    """Return one rank's tensor [count]: normally distributed values, or small integers whose sum does not overflow.

    At a share `config.overlap` of positions, all ranks have the same magnitude with independent signs, so that a
    sparsifier selects the same entries on all ranks. At other positions the magnitudes are independent.
    """
    dtype = TORCH_DTYPES[config.dtype]
    private = torch.Generator().manual_seed(config.seed * 1_000_003 + 1 + rank)
    if not dtype.is_floating_point:
        limit = max(1, _INT8_MAX // config.world_size)
        return torch.randint(-limit, limit + 1, (count,), generator=private, dtype=dtype)
    values = torch.randn(count, generator=private)
    if config.overlap:
        common = torch.Generator().manual_seed(config.seed * 1_000_003)
        magnitudes = torch.randn(count, generator=common).abs()
        is_common = torch.rand(count, generator=common) < config.overlap
        values = torch.where(is_common, magnitudes.copysign(values), values)
    return values.to(dtype)
