"""The strategy `async_server`: refusals before any process starts, and accepted options."""

from __future__ import annotations

from typing import Any

import pytest

from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.launch.plan import plan, with_ranks
from tests.testing.refusals import check_choice, check_complete, shown

ASP, SSP = "async_server:mode=asp", "async_server"

# What its table refuses.
CHOICES: list[dict[str, Any]] = [
    {"strategy": ASP, "collective": "ring"},
    {"strategy": ASP, "collective": "server:downlink=union"},
    {"strategy": "async_server:root=2"},
    {"strategy": ASP, "device": "cuda"},
    {"strategy": ASP, "trigger": "sync"},
    {"strategy": ASP, "bucket_mb": 1.0},
    {"strategy": ASP, "accumulate": 2},
    {"strategy": ASP, "compressor": "torch_powersgd"},
    {"strategy": ASP, "compressor": "powersgd"},
    {"strategy": SSP, "compressor": "terngrad:shared_scale=true"},
    {"strategy": ASP, "compressor": "hylo:shared_threshold=true"},
    {"strategy": ASP, "compressor": "group_topk:preset=patent"},
    {"strategy": ASP, "optimizer": "max_adabelief"},
    {"strategy": ASP, "optimizer": "muon:shard=true"},
    {"strategy": ASP, "optimizer": "muon"},
]
# What it or another component refuses by itself, with a part of the sentence.
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "async"}, "there is no strategy 'async' (did you mean 'async_server'?)"),
    ({"strategy": ASP, "compressor": "dgc", "optimizer": "adam"}, "adam has no momentum to hand over"),
    ({"strategy": "async_server:mode=asp,staleness=2"}, "staleness=2 has a meaning only with mode=ssp; leave it out"),
    ({"strategy": "async_server:staleness=-1"}, "staleness=-1 is not possible"),
    ({"strategy": "async_server:mode=bsp"}, "mode=bsp is not possible"),
]
TAKEN: list[dict[str, Any]] = [
    {"strategy": ASP},
    {"strategy": "async_server:root=1,staleness=3"},
    {"strategy": ASP, "collective": "server", "compressor": "topk"},
    {"strategy": ASP, "compressor": "terngrad"},
    {"strategy": ASP, "compressor": "hylo"},
    {"strategy": ASP, "optimizer": "max_adabelief:mode=gradient"},
    {"strategy": ASP, "optimizer": "adabelief"},
    {"strategy": ASP, "clip_norm": 1.0},
]


@pytest.mark.parametrize("choice", CHOICES, ids=map(shown, CHOICES))
def test_a_refusal_names_the_choice_and_its_advice_is_legal(choice: dict[str, Any]) -> None:
    check_choice(choice)


def test_every_refusal_applies_to_some_choice() -> None:
    check_complete(CHOICES, {"AsyncServer.refusals": 0}, set())


@pytest.mark.parametrize(("choice", "sentence"), REFUSALS, ids=[shown(choice) for choice, _ in REFUSALS])
def test_what_a_component_refuses_by_itself(choice: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        plan(RunConfig(**choice))
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("choice", TAKEN, ids=[" ".join(map(str, choice.values())) for choice in TAKEN])
def test_taken(choice: dict[str, Any]) -> None:
    config = plan(RunConfig(**choice))
    assert (config.strategy, config.collective, config.bucket_mb) == (choice["strategy"], "server", None)


def test_every_option_identifies_the_run() -> None:
    configs = [plan(RunConfig(strategy=text)) for text in (SSP, "async_server:staleness=1", ASP)]
    assert configs[0].filled["strategy"] == "async_server:mode=ssp,root=0,staleness=0"
    assert len({config.config_id for config in configs}) == len(configs)


def test_a_run_does_not_change_its_number_of_ranks() -> None:
    with pytest.raises(UsageError, match="async_server gives every rank a different task"):
        with_ranks(plan(RunConfig(strategy=ASP)), 3)
