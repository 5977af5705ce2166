"""The strategy `elastic`: refusals before any process starts, and the default collective."""

from __future__ import annotations

from typing import Any

import pytest

from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.launch.resolve import resolve

REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "elastic:quorum=3"}, "elastic: quorum=3 is more than the 2 ranks; lower it"),
    ({"strategy": "elastic:quorum=0"}, "elastic: quorum=0 is not possible: give 1 or more"),
    ({"strategy": "local:quorum=2"}, "local has no option 'quorum'"),
    ({"strategy": "elastic:steps=auto"}, "steps=auto plans the steps of all ranks, and some may be lost; use a number"),
    ({"strategy": "elastic:preset=streaming"}, "delay=5 leaves an exchange under way during later steps, and"),
    ({"strategy": "elastic:preset=post_local"}, "start_after=100 averages the gradients of all ranks in every"),
    (
        {"strategy": "elastic", "collective": "native"},
        "native is an operation of one process group, which breaks when a rank is lost, and with elastic ranks come",
    ),
    ({"strategy": "elastic", "collective": "hierarchical:inter=native"}, "native is an operation of one process"),
    ({"strategy": "elastic", "collective": "pool"}, "pool maps memory for a fixed set of ranks, and with elastic"),
    (
        {"strategy": "elastic", "collective": "direct:shares=bandwidth"},
        "direct divides the work by the links of all ranks, and with elastic ranks come and go; use collective ring",
    ),
    (
        {"strategy": "elastic", "compressor": "topk", "collective": "server:downlink=recode"},
        "server keeps errors of sums, which would be lost with a rank, and with elastic",
    ),
    (
        {"strategy": "elastic:quorum=1", "collective": "server:root=1"},
        "with quorum=1 there may be 1 rank(s), and server: root=1 is none of the 1 ranks",
    ),
    (
        {"strategy": "elastic", "checkpoint_every": 1},
        "--checkpoint-every needs all ranks at one step, and with",
    ),
    ({"strategy": "elastic", "device": "cuda"}, "elastic connects ranks on CPUs; use --device cpu"),
    ({"strategy": "elastic", "optimizer": "kfac"}, "kfac sends data of its own between all ranks, and with elastic a"),
]


@pytest.mark.parametrize(("choice", "sentence"), REFUSALS, ids=[" ".join(map(str, c.values())) for c, _ in REFUSALS])
def test_refusal(choice: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        resolve(RunConfig(**choice))
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_with_a_quorum_a_collective_works_with_so_many_ranks_or_more() -> None:
    config = resolve(RunConfig(strategy="elastic:quorum=2", collective="server:root=1"))
    assert config.collective == "server:root=1"


@pytest.mark.parametrize("compressor", ["none", "topk", "powersgd", "randomk"])
def test_the_default_collective_does_without_a_process_group(compressor: str) -> None:
    config = resolve(RunConfig(strategy="elastic:quorum=2", compressor=compressor))
    assert (config.strategy, config.collective) == ("elastic:quorum=2", "ring")
