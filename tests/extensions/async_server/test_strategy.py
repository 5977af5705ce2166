"""The strategy `async_server`: refusals before any process starts, and accepted options."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.launch.resolve import resolve, with_ranks

ASP, SSP = "async_server:mode=asp", "async_server"

REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "async"}, "there is no strategy 'async' (did you mean 'async_server'?)"),
    ({"strategy": ASP, "trigger": "sync"}, "--trigger sync waits for all ranks"),
    ({"strategy": ASP, "bucket_mb": 1.0}, "--bucket-mb has no meaning with async_server"),
    ({"strategy": ASP, "compressor": "powersgd"}, "powersgd has ranks agree"),
    ({"strategy": SSP, "compressor": "terngrad:shared_scale=true"}, "terngrad has ranks agree"),
    ({"strategy": ASP, "compressor": "hylo:shared_threshold=true"}, "hylo has ranks agree"),
    ({"strategy": ASP, "compressor": "torch_powersgd"}, "works through DDP's communication hook; use --strategy ddp"),
    ({"strategy": ASP, "compressor": "group_topk:preset=patent"}, "wants the whole model as one message"),
    ({"strategy": ASP, "compressor": "dgc", "optimizer": "adam"}, "adam has no momentum to hand over"),
    ({"strategy": "async_server:mode=asp,staleness=2"}, "staleness=2 bounds mode=ssp; leave it out of mode=asp"),
    ({"strategy": "async_server:staleness=-1"}, "staleness=-1 is not possible"),
    ({"strategy": "async_server:mode=bsp"}, "mode=bsp is not possible"),
    ({"strategy": "async_server:root=2"}, "async_server: root=2 is none of the 2 ranks"),
    ({"strategy": ASP, "collective": "ring"}, "sums nothing; leave out --collective ring"),
    ({"strategy": ASP, "collective": "server:downlink=union"}, "leave out --collective server:downlink=union"),
    ({"strategy": ASP, "optimizer": "max_adabelief"}, "max_adabelief sends data of its own between all ranks, and"),
    ({"strategy": ASP, "optimizer": "kfac"}, "kfac sends data of its own between all ranks, and with"),
    ({"strategy": ASP, "optimizer": "demo"}, "demo sends data of its own between all ranks, and with"),
    ({"strategy": ASP, "optimizer": "muon"}, "muon needs the whole network, and the server of"),
    ({"strategy": ASP, "optimizer": "muon:shard=true"}, "muon sends data of its own between all ranks, and with"),
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


@pytest.mark.parametrize(("choice", "sentence"), REFUSALS, ids=[" ".join(map(str, c.values())) for c, _ in REFUSALS])
def test_refusal(choice: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        resolve(RunConfig(**choice))
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("choice", TAKEN, ids=[" ".join(map(str, choice.values())) for choice in TAKEN])
def test_taken(choice: dict[str, Any]) -> None:
    config = resolve(RunConfig(**choice))
    assert (config.strategy, config.collective, config.bucket_mb) == (choice["strategy"], "server", None)


def test_every_option_identifies_the_run() -> None:
    configs = [resolve(RunConfig(strategy=text)) for text in (SSP, "async_server:staleness=1", ASP)]
    assert configs[0].filled["strategy"] == "async_server:mode=ssp,root=0,staleness=0"
    assert len({config.config_id for config in configs}) == len(configs)


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="add --device cpu"):
        resolve(RunConfig(strategy=ASP))


def test_a_run_does_not_change_its_number_of_ranks() -> None:
    with pytest.raises(UsageError, match="async_server gives every rank a different task"):
        with_ranks(resolve(RunConfig(strategy=ASP)), 3)
