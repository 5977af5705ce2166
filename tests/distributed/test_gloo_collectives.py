"""The collectives over gloo: processes are started once, and the ranks are first some, then all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from collectives.payloads.base import Payload
from collectives.transport.process_group import ProcessGroupTransport
from tests.testing.collectives import COLLECTIVES, Result, check, clone, key_of, refusal
from tests.testing.limits import LIMIT_S
from tests.testing.payloads import make
from tests.testing.ranks import run_ranks

CASES = [("dense", 6), ("dense", 10_007), ("bundle", 10_007), ("codes-levels", 10_007)]
Case = tuple[str, int, str, int]
"""(collective, world size, payload kind, length)"""


def contributions(case: Case) -> list[Payload]:
    _, world_size, kind, length = case
    return [make(kind, length, dtype=torch.float32, seed=rank).payload for rank in range(world_size)]


def sum_all_cases(rank: int, world_sizes: tuple[int, ...]) -> dict[Case, Result]:
    results = {}
    for world_size in world_sizes:
        group = dist.new_group(list(range(world_size)))
        if not isinstance(group, dist.ProcessGroup):
            continue  # this process takes no part
        transport = ProcessGroupTransport(group, timeout_s=LIMIT_S)
        for name in COLLECTIVES:
            bound = COLLECTIVES[name]().bind(transport)
            for kind, length in CASES:
                case = (name, world_size, kind, length)
                payload = contributions(case)[rank]
                if not refusal(bound.options, payload):
                    before = transport.traffic["gradient"].nbytes
                    total = bound.sum(clone(payload), key_of(payload)).to_dense()
                    results[case] = (total, transport.traffic["gradient"].nbytes - before)
            bound.close()
    return results


# Very different sizes: powers of two and others. The in-memory tests cover all sizes.
@pytest.mark.parametrize("world_sizes", [(3, 4), pytest.param((2, 5), marks=pytest.mark.long)], ids=str)
def test_sums_over_gloo(world_sizes: tuple[int, ...], tmp_path: Path) -> None:
    by_rank = run_ranks(sum_all_cases, max(world_sizes), tmp_path, args=[world_sizes])
    assert len(by_rank[0]) > 125
    for case in by_rank[0]:
        name, world_size, _, _ = case
        check(name, contributions(case), [results[case] for results in by_rank[:world_size]])
