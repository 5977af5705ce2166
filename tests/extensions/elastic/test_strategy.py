"""The strategy `elastic`: refusals before any process starts, and the default collective."""

from __future__ import annotations

from typing import Any

import pytest

from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.launch.plan import plan
from tests.testing.refusals import check_choice, check_complete, refused, shown

# What its tables refuse.
CHOICES: list[dict[str, Any]] = [
    {"strategy": "elastic:steps=auto"},
    {"strategy": "elastic:preset=streaming"},
    {"strategy": "elastic:preset=post_local"},
    {"strategy": "elastic", "checkpoint_every": 1},
    {"strategy": "elastic", "device": "cuda"},
    {"strategy": "elastic", "collective": "native"},
    {"strategy": "elastic", "collective": "hierarchical:inter=native"},
    {"strategy": "elastic", "collective": "pool"},
    {"strategy": "elastic", "collective": "direct:shares=bandwidth"},
    {"strategy": "elastic", "compressor": "topk", "collective": "server:downlink=recode"},
    {"strategy": "elastic:quorum=3"},
    {"strategy": "elastic", "collective": "server:root=1"},
    {"strategy": "elastic", "optimizer": "kfac"},
]


@pytest.mark.parametrize("choice", CHOICES, ids=map(shown, CHOICES))
def test_a_refusal_names_the_choice_and_its_advice_is_legal(choice: dict[str, Any]) -> None:
    check_choice(choice)


def test_every_refusal_of_its_own_applies_to_some_choice() -> None:
    _, of_local = refused({"strategy": "local", "trigger": "sync"})
    _, of_options = refused({"strategy": "local:seconds=3"})
    inherited = {"Elastic.refusals": of_local.size, "Elastic._own_refusals": of_options.size}
    check_complete(CHOICES, inherited, set())


def test_a_quorum_is_one_rank_or_more() -> None:
    with pytest.raises(UsageError, match="elastic: quorum=0 is not possible: give 1 or more"):
        plan(RunConfig(strategy="elastic:quorum=0"))


def test_with_a_quorum_a_collective_works_with_so_many_ranks_or_more() -> None:
    config = plan(RunConfig(strategy="elastic:quorum=2", collective="server:root=1"))
    assert config.collective == "server:root=1"


@pytest.mark.parametrize("compressor", ["none", "topk", "powersgd", "randomk"])
def test_the_default_collective_does_without_a_process_group(compressor: str) -> None:
    config = plan(RunConfig(strategy="elastic:quorum=2", compressor=compressor))
    assert (config.strategy, config.collective) == ("elastic:quorum=2", "ring")
