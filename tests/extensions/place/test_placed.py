"""The strategy `placed`: what it refuses before any process starts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.testing.invoke import REPOSITORY
from tests.testing.refusals import check_choice, check_complete, shown

CXL = REPOSITORY / "examples" / "cxl.toml"
PLACED, BY_DATA = f"placed:devices={CXL}", f"placed:by=data,devices={CXL}"
# What its table refuses.
CHOICES: list[dict[str, Any]] = [
    {"strategy": PLACED, "hosts": 5},
    {"strategy": PLACED, "nnodes": 5, "rdzv_endpoint": "host0:29500"},
    {"strategy": PLACED, "device": "cuda"},
    {"strategy": PLACED, "bucket_mb": 1.0},
    {"strategy": PLACED, "accumulate": 2},
    {"strategy": PLACED, "clip_norm": 1.0},
    {"strategy": PLACED, "amp": "bf16"},
    {"strategy": PLACED, "profile": 1},
    {"strategy": PLACED, "straggler": "rank=0,slowdown=2"},
    {"strategy": PLACED, "collective": "ring"},
    {"strategy": BY_DATA, "collective": "native"},
    {"strategy": f"{BY_DATA},merge=host", "collective": "ring"},
    {"strategy": f"{PLACED},merge=host"},
    {"strategy": f"{BY_DATA},activations=dpu"},
    {"strategy": BY_DATA, "compressor": "torch_fp16"},
    {"strategy": PLACED, "compressor": "topk"},
    {"strategy": PLACED, "optimizer": "muon"},
    {"strategy": BY_DATA, "optimizer": "kfac:inner=max_adabelief"},
    {"strategy": BY_DATA, "optimizer": "zero_one_adam"},
]


@pytest.mark.parametrize("choice", CHOICES, ids=map(shown, CHOICES))
def test_a_refusal_names_the_choice_and_its_advice_is_legal(choice: dict[str, Any]) -> None:
    check_choice(choice)


def test_every_refusal_applies_to_some_choice() -> None:
    check_complete(CHOICES, {"Placed.refusals": 0}, set())
