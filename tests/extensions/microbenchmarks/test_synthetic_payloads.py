"""Synthetic payloads: the requested overlap, sums that do not overflow, and real messages of compressors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.extensions.microbenchmarks.collectives_worker import payload_of, support_overlap, synthetic_tensor
from bench.extensions.microbenchmarks.options import CollectivesConfig
from collectives.payloads import Dense, Sparse, SparseCodes
from collectives.payloads.base import Payload
from tests.testing.limits import LIMIT_S
from tests.testing.memory_transport import MemoryTransport, run_threads

CONFIG = CollectivesConfig(
    pairs=(("ring", "none"),), sizes="4kB", iters=1, warmup=0, rounds=1,
    world_size=3, ranks_per_host=3, device="cpu", threads=1, timeout_s=LIMIT_S,
)  # fmt: skip
COUNT = 102_400


def compressed(compressor: str, **changes: object) -> list[Payload]:
    config = dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]

    def rank(transport: MemoryTransport) -> Payload:
        return payload_of(synthetic_tensor(config, COUNT, transport.rank), compressor, config, transport)

    return run_threads(rank, config.world_size)


@pytest.mark.parametrize(("overlap", "low", "high"), [(0.0, 0.005, 0.015), (0.5, 0.4, 0.6), (1.0, 1.0, 1.0)])
def test_supports_overlap_as_asked(overlap: float, low: float, high: float) -> None:
    for compressor in ("topk:ratio=0.01", "group_topk:ratio=0.01"):
        measured = support_overlap(compressed(compressor, overlap=overlap))
        assert measured is not None
        assert low <= measured <= high


def test_ranks_and_seeds_differ_and_one_seed_repeats() -> None:
    first = synthetic_tensor(CONFIG, 100, 0)
    assert torch.equal(first, synthetic_tensor(CONFIG, 100, 0))
    assert not torch.equal(first, synthetic_tensor(CONFIG, 100, 1))
    assert not torch.equal(first, synthetic_tensor(dataclasses.replace(CONFIG, seed=2), 100, 0))


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("int8", torch.int8), ("int32", torch.int32)])
def test_integers_sum_without_wrapping(dtype: str, torch_dtype: torch.dtype) -> None:
    config = dataclasses.replace(CONFIG, dtype=dtype, world_size=100)  # type: ignore[arg-type]
    rows = [synthetic_tensor(config, 1000, rank) for rank in range(100)]
    assert {row.dtype for row in rows} == {torch_dtype}
    assert torch.stack(rows).long().sum(0).abs().max() <= 127
    assert torch.cat(rows).unique().numel() > 1


def test_a_compressor_is_heard_as_it_trains() -> None:
    """Groups of 4096 keep 41 entries each; scales that ranks share are shared."""
    for payload in compressed("group_topk:ratio=0.01"):
        assert isinstance(payload, SparseCodes)
        assert payload.num_entries == 41 * COUNT // 4096
    shared = compressed("terngrad:shared_scale=true")
    assert all(isinstance(payload, Dense) and payload.values.dtype == torch.int8 for payload in shared)


def test_payloads_of_all_elements_have_no_overlap() -> None:
    one = Sparse(3, torch.tensor([1]), torch.ones(1))
    assert support_overlap([one, one]) == 1
    assert support_overlap([Dense(torch.ones(3)), one]) is None
