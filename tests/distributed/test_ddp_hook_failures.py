"""What can go wrong with a hook of `attach`: gradients that are not finite, misuse, a lost rank, impossible pairs."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives.allgather import Allgather, BoundAllgather
from collectives.base import Downlink
from collectives.native import Native
from collectives.ring import Ring
from collectives.transport.base import Transport, TransportError
from compressors.ddp.attaching import attach
from compressors.ddp.hook import NonFiniteGradient
from compressors.dgc import Dgc
from compressors.group_topk import GroupTopK
from compressors.none import NONE
from compressors.topk import TopK
from compressors.torch_fp16 import TorchFp16
from tests.testing.ddp_scenes import loss_of, message_of, played_by_two, train, wrapped
from tests.testing.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("ddp hook failures")  # its ranks play once for all tests


@dataclasses.dataclass(kw_only=True)
class Witness(Allgather):
    """Counts what became of the steps."""

    def bind(self, transport: Transport, downlink: Downlink | None = None) -> BoundWitness:
        return BoundWitness(self, transport)


class BoundWitness(BoundAllgather):
    def __init__(self, options: Allgather, transport: Transport) -> None:
        super().__init__(options, transport)
        self.committed = self.dropped = 0

    def commit(self) -> None:
        self.committed += 1

    def drop(self) -> None:
        self.dropped += 1


def bad_gradient(rank: int) -> dict[str, Any]:
    ddp = wrapped()
    hook = attach(ddp, TopK(ratio=0.05), Witness())
    witness = cast(BoundWitness, hook.collective)
    train(ddp, hook, range(2))
    before = hook.state_dict()["reducer"]["residuals"]
    loss = loss_of(ddp, rank, 2)
    (loss * float("nan") if rank == 0 else loss).backward()
    ok = hook.step_ok()
    after = hook.state_dict()["reducer"]["residuals"]
    kept = all(torch.equal(before[key], after[key]) for key in before)
    ddp.zero_grad()
    loss_of(ddp, rank, 3).backward()
    ok_again = hook.step_ok()
    hook.close()
    return {"ok": ok, "kept": kept, "ok_again": ok_again, "collective": (witness.committed, witness.dropped)}


def bad_gradient_raises(rank: int) -> str:
    ddp = wrapped()
    hook = attach(ddp, NONE(), Allgather(), nonfinite="raise")
    (loss_of(ddp, rank, 0) * float("inf")).backward()
    message = message_of(hook.step_ok)
    hook.close()
    return message


def forgotten(rank: int) -> str:
    ddp = wrapped()
    hook = attach(ddp, NONE(), Allgather())
    loss_of(ddp, rank, 0).backward()
    message = message_of(lambda: loss_of(ddp, rank, 1).backward())
    hook.close()
    return message


def closed(rank: int) -> str:
    ddp = wrapped()
    attach(ddp, NONE(), Allgather()).close()
    return message_of(lambda: loss_of(ddp, rank, 0).backward())


def joined(rank: int) -> str:
    ddp = wrapped()
    hook = attach(ddp, NONE(), Allgather())
    with ddp.join():
        message = message_of(lambda: loss_of(ddp, rank, 0).backward())
    hook.close()
    return message


def given_back(_: int) -> list[bool]:
    """Whether the model lives on: while its hook is at work, and after that was closed, twice."""
    ddp = wrapped(gradient_as_bucket_view=True)
    hook = attach(ddp, TopK(ratio=0.05), Allgather())
    train(ddp, hook, range(2))
    model = weakref.ref(ddp)
    del ddp
    lives = [model() is not None]
    hook.close()
    hook.close()
    gc.collect()
    return [*lives, model() is not None]


def frozen() -> DistributedDataParallel:
    ddp = wrapped(find_unused_parameters=True)
    ddp.module[0].weight.requires_grad_(False)
    return ddp


def hooked() -> DistributedDataParallel:
    ddp = wrapped()
    attach(ddp, NONE(), Allgather()).close()
    return ddp


def refusals(rank: int) -> dict[str, str]:
    small, large = wrapped(), DistributedDataParallel(nn.Linear(1000, 1000))
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 3, sparse=True)))
    mixed = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.bfloat16)))
    tries: dict[str, Callable[[], Any]] = {
        "pair": lambda: attach(small, TopK(), Native()),
        "missing": lambda: attach(small, Dgc(), Allgather()),
        "range": lambda: attach(small, Dgc(), Allgather(), momentum=1.0),
        "in vain": lambda: attach(small, TopK(), Allgather(), momentum=0.9),
        "buckets": lambda: attach(large, GroupTopK(preset="patent"), Ring()),
        "types": lambda: attach(mixed, GroupTopK(scope="model"), Ring()),
        "engine": lambda: attach(small, TorchFp16(), Native()),
        "sparse": lambda: attach(sparse, TopK(), Allgather()),
        "complex": lambda: attach(DistributedDataParallel(nn.Linear(3, 3, dtype=torch.complex64)), TopK(), Allgather()),
        "frozen": lambda: attach(frozen(), TopK(), Allgather()),
        "hooked": lambda: attach(hooked(), TopK(), Allgather()),
        "skips": lambda: attach(
            wrapped(find_unused_parameters=True, skip_all_reduce_unused_params=True), TopK(), Allgather()
        ),
    }
    return {name: message_of(call) for name, call in tries.items()}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every scene gave, per rank."""
    scenes = (bad_gradient, bad_gradient_raises, forgotten, closed, joined, given_back, refusals)
    return played_by_two(scenes, tmp_path_factory.mktemp("ranks"))


def test_one_bad_gradient_skips_the_step_on_all_ranks_and_leaves_no_trace(played: list[dict[str, Any]]) -> None:
    expected = {"ok": False, "kept": True, "ok_again": True, "collective": (3, 1)}
    assert [rank["bad_gradient"] for rank in played] == [expected] * 2


def test_or_it_raises(played: list[dict[str, Any]]) -> None:
    wanted = f"{NonFiniteGradient.__name__}: a gradient was not finite at step 0"
    assert [rank["bad_gradient_raises"] for rank in played] == [wanted] * 2


def test_a_step_that_nobody_asked_about_is_an_error(played: list[dict[str, Any]]) -> None:
    assert played[0]["forgotten"] == (
        "RuntimeError: step_ok() was not called after the last backward(); call it after each"
    )


def test_a_closed_hook_says_so(played: list[dict[str, Any]]) -> None:
    assert "is closed; wrap it in DDP anew" in played[0]["closed"]


def test_ranks_that_join_are_told_that_they_cannot(played: list[dict[str, Any]]) -> None:
    assert [rank["joined"] for rank in played] == [
        "RuntimeError: ddp.join() is not possible with this hook; give every rank as many batches"
    ] * 2


def test_a_closed_hook_lets_go_of_the_model(played: list[dict[str, Any]]) -> None:
    assert [rank["given_back"] for rank in played] == [[True, False]] * 2


def test_what_cannot_work_is_refused_in_one_sentence_before_anything_starts(
    played: list[dict[str, Any]],
) -> None:
    said = played[0]["refusals"]
    assert said["pair"].startswith("ValueError: topk sends Sparse payloads: ")
    assert said["missing"].startswith("ValueError: dgc applies the momentum itself")
    assert said["range"] == said["missing"]
    assert said["in vain"].startswith("ValueError: topk applies no momentum")
    assert said["buckets"].endswith("wrap it with DistributedDataParallel(..., bucket_cap_mb=4)")
    assert "parameters of torch.bfloat16 and torch.float32 into buckets of their own" in said["types"]
    assert (
        said["sparse"] == "ValueError: Embedding 0 makes sparse gradients, which no bucket holds; give it sparse=False"
    )
    assert said["engine"].startswith("ValueError: torch_fp16 is PyTorch's own hook")
    assert said["complex"].startswith("ValueError: weight is complex, which no compressor knows")
    assert said["frozen"].startswith("ValueError: 0.weight was frozen after it was wrapped; freeze first")
    assert said["hooked"].startswith("ValueError: this model has a communication hook already, if a closed one")
    assert said["skips"].startswith("ValueError: with skip_all_reduce_unused_params ranks would not know")


def leave_early(rank: int) -> int | None:
    ddp = wrapped()
    hook = attach(ddp, NONE(), Ring(), timeout_s=20)
    train(ddp, hook, range(2))  # in its second step DDP itself talks, to lay its buckets anew
    if rank == 1:
        return None
    loss_of(ddp, rank, 2).backward()
    with pytest.raises(TransportError) as caught:
        hook.step_ok()
    return caught.value.lost_rank


def test_a_lost_rank_is_named_to_the_training_loop(tmp_path: Path) -> None:
    assert run_ranks(leave_early, 2, tmp_path)[0] == 1
