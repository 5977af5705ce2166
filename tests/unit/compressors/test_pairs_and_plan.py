"""Possible pairs, the reasons against the others, and the plan of a model."""

from __future__ import annotations

import pytest
from torch import nn

from bench.launch.layer_plan import planned_layers
from collectives.allreduce import Allgather, Native, Ring
from collectives.options import Incompatible, Options, build, incompatibility
from collectives.server import Server
from compressors.base import Compressor, PerLayer
from compressors.floats import NoCompression, NonZeroRows
from compressors.group_topk import GroupTopK
from compressors.hylo import Hylo
from compressors.layer import layers_of
from compressors.powersgd import PowerSgd
from compressors.quantizers import Qsgd, TernGrad
from compressors.randomk import RandomK
from compressors.topk import TopK
from compressors.torch_hooks import TorchPowerSgd


@pytest.mark.parametrize(
    ("compressor", "native", "ring", "allgather"),
    [
        (NoCompression(), True, True, True),
        (TopK(), False, True, True),
        (GroupTopK(), False, True, True),
        (RandomK(), True, True, True),
        (Qsgd(), False, False, True),
        (TernGrad(), False, False, True),
        (TernGrad(shared_scale=True), True, True, True),
        (PowerSgd(), True, True, True),
        (Hylo(), False, False, True),
        (NonZeroRows(), False, True, True),
        (Hylo(shared_threshold=True), False, True, True),
        (TorchPowerSgd(), True, False, False),
    ],
    ids=lambda value: getattr(value, "component_name", str(value)),
)
def test_pairs(compressor: Compressor, native: bool, ring: bool, allgather: bool) -> None:
    for collective, possible in ((Native, native), (Ring, ring), (Allgather, allgather)):
        assert (incompatibility(compressor.check_compatible, collective()) is None) is possible


def test_a_refusal_says_why_and_what_would_work() -> None:
    assert incompatibility(TopK().check_compatible, Native()) == (
        "topk sends Sparse payloads: native adds tensors element by element, which Sparse payloads do not allow; "
        "ring adds them by merging, allgather takes every kind"
    )
    with pytest.raises(Incompatible, match="use collective native"):
        TorchPowerSgd().check_compatible(Ring())


def test_plan() -> None:
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.BatchNorm2d(32), nn.Flatten(), nn.Linear(100, 40))
    rows = planned_layers(Hylo(min_numel=1000), layers_of(model))
    kept = 21  # (1000 / 2304)^0.5 = 0.659 of 32 filters
    assert [(row.name, row.shape, row.kind, row.payload) for row in rows] == [
        ("0.weight", (32, 8, 3, 3), "conv", "RowSparse"),
        ("0.bias", (32,), "bias", "Dense"),
        ("1.weight", (32,), "norm", "Dense"),
        ("1.bias", (32,), "norm", "Dense"),
        ("3.weight", (40, 100), "linear", "Codes"),
        ("3.bias", (40,), "bias", "Dense"),
    ]
    assert [row.sent_nbytes for row in rows] == [
        24 + kept * 72 * 4 + 4, 16 + 128, 16 + 128, 16 + 128, 28 + 1000, 16 + 160,
    ]  # fmt: skip
    assert [row.dense_nbytes for row in rows] == [9216, 128, 128, 128, 16000, 160]


@pytest.mark.parametrize(
    ("compressor", "possible"),
    [
        ("topk", True), ("algc", True), ("sign", True), ("qsgd:error_feedback=true", True),
        ("hylo", True), ("hylo:threshold=0.1", False), ("threshold:unit=absolute", True), ("twobit", False),
        ("randomk:scaled=true,error_feedback=false", True),  # its sums are returned unchanged
        ("qsgd", False), ("terngrad", False), ("sign:mode=vote,error_feedback=false", False),
    ],
)  # fmt: skip
def test_a_server_keeps_what_its_answers_lose_only_where_that_stays_bounded(compressor: str, possible: bool) -> None:
    built = build("compressors", Compressor, compressor)
    reason = incompatibility(built.check_compatible, Server(downlink="recode"))
    assert (reason is None) is possible
    built.check_compatible(Server())
    built.check_compatible(Server(downlink="recode", error_feedback=False))  # then there is no residual
    if reason:
        assert "is no contraction with these options; use " in reason
        assert "downlink=dense or downlink=union" in reason


def test_an_author_meets_at_most_thirteen_members() -> None:
    members = {name for cls in (PerLayer, Compressor) for name in vars(cls) if not name.startswith("_")}
    assert len(members - set(dir(Options))) <= 13
