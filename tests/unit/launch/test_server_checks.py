"""What the asynchronous server refuses, before any process starts; and what it takes."""

from __future__ import annotations

from typing import Any

import pytest

from bench.core.errors import UsageError
from bench.core.request import Request
from bench.launch import plan as plan_module
from bench.launch.plan import plan

REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"collective": "server:mode=asp", "trigger": "sync"}, "--trigger sync waits for all ranks"),
    ({"collective": "server:mode=asp", "bucket_mb": 1.0}, "--bucket-mb has no meaning with server:mode=asp"),
    ({"collective": "server:mode=asp", "compressor": "powersgd"}, "powersgd has ranks agree"),
    ({"collective": "server:mode=ssp", "compressor": "terngrad:shared_scale=true"}, "terngrad has ranks agree"),
    ({"collective": "server:mode=asp", "compressor": "hylo:shared_threshold=true"}, "hylo has ranks agree"),
    ({"collective": "server:staleness=2"}, "staleness=2 bounds mode=ssp"),
    ({"collective": "server:mode=asp,staleness=2"}, "staleness=2 bounds mode=ssp"),
    ({"collective": "server:mode=ssp,staleness=-1"}, "staleness=-1 is not possible"),
    ({"collective": "server:mode=asp,placement=sharded"}, "leave placement and downlink out"),
    ({"collective": "server:mode=ssp,downlink=union"}, "leave placement and downlink out"),
    ({"collective": "server:mode=asp,root=2"}, "root=2 is none of the 2 ranks"),
    ({"collective": "server:root=2"}, "root=2 is none of the 2 ranks"),
]
TAKEN: list[dict[str, Any]] = [
    {"collective": "server:mode=asp"},
    {"collective": "server:mode=ssp,root=1,staleness=3"},
    {"collective": "server:mode=asp", "compressor": "topk"},
    {"collective": "server:mode=asp", "compressor": "terngrad"},
    {"collective": "server:mode=asp", "compressor": "hylo"},
    {"collective": "server", "trigger": "sync", "bucket_mb": 1.0, "compressor": "powersgd"},
]


@pytest.mark.parametrize(("choice", "sentence"), REFUSALS, ids=[" ".join(map(str, c.values())) for c, _ in REFUSALS])
def test_refusal(choice: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        plan(Request(**choice))
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("choice", TAKEN, ids=[" ".join(map(str, choice.values())) for choice in TAKEN])
def test_taken(choice: dict[str, Any]) -> None:
    assert plan(Request(**choice)).collective == choice["collective"]


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_device", lambda _asked: "cuda")
    with pytest.raises(UsageError, match="add --device cpu"):
        plan(Request(collective="server:mode=asp"))
