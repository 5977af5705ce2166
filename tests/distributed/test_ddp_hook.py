"""`attach`: a user's own DDP model with a compressor and a collective, on real gloo ranks."""

from __future__ import annotations

import dataclasses
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives.allgather import Allgather, BoundAllgather
from collectives.base import Downlink, PendingSum
from collectives.native import Native
from collectives.ring import Ring
from collectives.transport.base import Transport, TransportError
from compressors.base import Compressor
from compressors.choice import Choice
from compressors.ddp.attaching import attach
from compressors.ddp.choosing.hook import ChoosingHook
from compressors.ddp.hook import CompressionHook, NonFiniteGradient
from compressors.dgc import Dgc
from compressors.group_topk import GroupTopK
from compressors.none import NONE
from compressors.topk import TopK
from compressors.torch_fp16 import TorchFp16
from tests.testing.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("ddp hook")  # its ranks play once for all tests

LR = 0.1


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 20, generator=generator), torch.randint(0, 5, (16,), generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x), y)


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(network(), **options)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(ddp: DistributedDataParallel, hook: CompressionHook, steps: range) -> torch.Tensor:
    """Weights after these steps of plain gradient descent."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    for step in steps:
        loss_of(ddp, dist.get_rank(), step).backward()
        assert hook.step_ok()
        optimizer.step()
        optimizer.zero_grad()
    return weights(ddp)


def trained(compressor: Compressor, num_steps: int, **options: Any) -> torch.Tensor:
    ddp = wrapped()
    hook = attach(ddp, compressor, Allgather(), **options)
    after = train(ddp, hook, range(num_steps))
    hook.close()
    return after


def trained_by_hand(world_size: int, num_steps: int, momentum: float = 0.0) -> torch.Tensor:
    """One process that sees all ranks' batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    for step in range(num_steps):
        sum(loss_of(model, rank, step) / world_size for rank in range(world_size)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def dense(rank: int) -> torch.Tensor:
    return trained(NONE(), 4)


def compressed(rank: int) -> dict[str, Any]:
    ddp = wrapped()
    hook = attach(ddp, "group_topk:ratio=0.05,group_size=100", "ring", seed=7)
    after = train(ddp, hook, range(4))
    hook.close()
    return {"weights": after, "nbytes": hook.traffic["gradient"].nbytes, "residuals": hook.residual_norms()}


def resumed(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(five steps, two steps and three more by another process's objects)."""
    options: dict[str, Any] = {"ratio": 0.05, "momentum_correction": True}
    whole = trained(TopK(**options), 5, momentum=0.9)
    first = wrapped()
    hook = attach(first, TopK(**options), Allgather(), momentum=0.9)
    train(first, hook, range(2))
    state, network_state = hook.state_dict(), first.state_dict()
    hook.close()
    second = wrapped()
    second.load_state_dict(network_state)
    hook = attach(second, TopK(**options), Allgather(), momentum=0.9)
    hook.load_state_dict(state)
    parts = train(second, hook, range(2, 5))
    assert hook.state_dict()["step"] == 5
    hook.close()
    return whole, parts


def momentum_moved(rank: int) -> torch.Tensor:
    """Momentum applied by the compressor, to layers that are all sent whole."""
    return trained(TopK(momentum_correction=True, min_numel=10**6), 4, momentum=0.9)


def warm_up(rank: int) -> list[int]:
    """Bytes sent with epoch 0 told, with epoch 9 told, and with none told."""
    sent = []
    for epoch in (0, 9, None):
        ddp = wrapped()
        hook = attach(ddp, TopK(ratio=0.01), Allgather())
        if epoch is not None:
            hook.set_epoch(epoch)
        train(ddp, hook, range(1))
        hook.close()
        sent.append(hook.traffic["gradient"].nbytes)
    return sent


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


def accumulated(rank: int) -> torch.Tensor:
    """Two batches per step, exchanged once."""
    ddp = wrapped()
    hook = attach(ddp, NONE(), Ring())
    with hook.no_sync():
        loss_of(ddp, rank, 0).backward()
    loss_of(ddp, rank, 1).backward()
    assert hook.step_ok()
    hook.close()
    return gradients(ddp)


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([cast(torch.Tensor, p.grad).flatten() for p in model.parameters()])


def telescoped(rank: int) -> dict[str, torch.Tensor]:
    """What was sent, what still waits, and all gradients, of three steps of two batches each on weights at rest."""
    ddp, alone = wrapped(), network()
    hook = attach(ddp, TopK(ratio=0.1, error_feedback=True), Allgather())
    sent = torch.zeros_like(weights(ddp))
    for step in range(0, 6, 2):
        with hook.no_sync():
            loss_of(ddp, rank, step).backward()
        loss_of(ddp, rank, step + 1).backward()
        assert hook.step_ok()
        sent += gradients(ddp)
        ddp.zero_grad()
    for step in range(6):
        loss_of(alone, rank, step).backward()
    waiting = hook.state_dict()["reducer"]["residuals"]
    hook.close()
    return {
        "sent": sent,
        "waiting": torch.cat([waiting[layer.id] for layer in hook.layers]),
        "all": gradients(alone),
    }


def ahead(rank: int) -> list[str]:
    """What is started and finished in a step of several buckets that are all there."""
    ddp = wrapped(bucket_cap_mb=3e-4)
    hook = attach(ddp, "topk:ratio=0.1", "allgather", trigger="sync")
    start, events = hook.collective.start, []

    def watched(*args: Any) -> PendingSum:
        events.append("start")
        pending = start(*args)
        return dataclasses.replace(pending, finish=lambda: (events.append("finish"), pending.finish())[1])

    hook.collective.start = watched  # type: ignore[method-assign]
    train(ddp, hook, range(2))  # DDP's first step is one bucket
    hook.close()
    return events[2:]


def chosen(rank: int) -> dict[str, Any]:
    """Thirty steps in which pairs are tried, and those choices made again, with a state saved half way."""
    first = wrapped()
    hook = cast(ChoosingHook, attach(first, "auto", "ring"))
    optimizer = torch.optim.SGD(first.parameters(), lr=LR)
    held: list[Choice] = []
    for step in range(30):
        loss_of(first, rank, step).backward()
        choice = hook.finish_step().choice
        assert choice is not None
        held += [] if choice in held else [choice]
        optimizer.step()
        optimizer.zero_grad()
    hook.close()
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("".join(json.dumps(choice.to_dict()) + "\n" for choice in held))
        file.flush()
        second, third = wrapped(), wrapped()
        hook = cast(ChoosingHook, attach(second, f"auto:choices={file.name}", "ring"))
        train(second, hook, range(12))
        third.load_state_dict(second.state_dict())
        later = attach(third, f"auto:choices={file.name}", "ring")
        later.load_state_dict(hook.state_dict())
        cast(ChoosingHook, later).follow(held[:1])  # as a run does that had written down no more
        hook.close()
        again = train(third, later, range(12, 30))
        later.close()
    return {"weights": weights(first), "again": again, "ways": [choice.to_dict() for choice in held]}


SCENES: dict[str, Callable[[int], Any]] = {
    scene.__name__: scene
    for scene in (
        dense,
        compressed,
        resumed,
        chosen,
        momentum_moved,
        warm_up,
        bad_gradient,
        bad_gradient_raises,
        forgotten,
        closed,
        accumulated,
        ahead,
        telescoped,
    )
}


def play(rank: int) -> bytes:
    return saved({name: scene(rank) for name, scene in SCENES.items()})


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every scene gave, per rank; one pair of processes plays them all."""
    return [loaded(result) for result in run_ranks(play, 2, tmp_path_factory.mktemp("ranks"), timeout_s=100)]


def saved(value: Any) -> bytes:
    """Tensors for another process; sent as they are, they would be shared with one that has ended."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(raw: bytes) -> Any:
    return torch.load(io.BytesIO(raw))


def test_without_compression_it_trains_as_one_process_with_all_batches(played: list[dict[str, Any]]) -> None:
    torch.testing.assert_close(played[0]["dense"], trained_by_hand(2, 4))
    assert torch.equal(played[0]["dense"], played[1]["dense"])


def test_compressed_ranks_stay_equal_and_every_byte_is_counted(played: list[dict[str, Any]]) -> None:
    first, second = (rank["compressed"] for rank in played)
    assert torch.equal(first["weights"], second["weights"])
    dense_nbytes = 4 * first["weights"].numel() * 4  # fp32, in 4 steps of a ring of two
    assert 0 < first["nbytes"] < dense_nbytes / 4
    assert all(norm > 0 for norm in first["residuals"].values())


def test_the_next_bucket_is_sent_before_the_first_is_decoded(played: list[dict[str, Any]]) -> None:
    for rank in played:
        assert rank["ahead"] == ["start", "start", "finish", "finish"]


def test_a_saved_state_goes_on_bit_for_bit(played: list[dict[str, Any]]) -> None:
    for rank in played:
        whole, parts = rank["resumed"]
        assert torch.equal(whole, parts)


def test_pairs_are_tried_alike_on_all_ranks_and_choices_that_are_made_again_give_the_same_bits(
    played: list[dict[str, Any]],
) -> None:
    first, second = (rank["chosen"] for rank in played)
    assert first["ways"] == second["ways"]
    assert len(first["ways"]) > 1
    for rank in (first, second):
        assert torch.equal(rank["weights"], first["weights"])
        assert torch.equal(rank["again"], first["weights"])


def test_momentum_is_handed_over(played: list[dict[str, Any]]) -> None:
    torch.testing.assert_close(played[0]["momentum_moved"], trained_by_hand(2, 4, momentum=0.9))
    assert not torch.allclose(played[0]["momentum_moved"], trained_by_hand(2, 4))


def test_the_warm_up_follows_the_epoch_where_it_is_told(played: list[dict[str, Any]]) -> None:
    early, late, untold = played[0]["warm_up"]
    assert early > 3 * late
    assert untold == late


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


def test_gradients_accumulate_under_no_sync(played: list[dict[str, Any]]) -> None:
    model = network()
    sum(loss_of(model, rank, step) / 2 for rank in range(2) for step in range(2)).backward()  # type: ignore[union-attr]
    expected = torch.cat([cast(torch.Tensor, p.grad).flatten() for p in model.parameters()])
    torch.testing.assert_close(played[0]["accumulated"], expected)


def test_what_was_sent_and_what_waits_are_all_gradients_that_accumulated(
    played: list[dict[str, Any]],
) -> None:
    first, second = (answer["telescoped"] for answer in played)
    assert first["waiting"].count_nonzero() > 0
    everything = (first["all"] + second["all"]) / 2
    torch.testing.assert_close(first["sent"] + (first["waiting"] + second["waiting"]) / 2, everything)


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


def two_of_three(rank: int) -> bytes | None:
    """DDP over ranks 2 and 0 of three; the other one knows of nothing."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    ddp = DistributedDataParallel(network(), process_group=group)
    hook = attach(ddp, NONE(), Ring())
    after = train(ddp, hook, range(2))
    hook.close()
    return saved(after)


def test_ddp_over_some_of_the_ranks(tmp_path: Path) -> None:
    first, _, last = run_ranks(two_of_three, 3, tmp_path)
    assert torch.equal(loaded(first), loaded(last))
    assert not torch.equal(loaded(first), weights(network()))


def refusals(rank: int) -> dict[str, str]:
    small, large = wrapped(), DistributedDataParallel(nn.Linear(1000, 1000))
    tries: dict[str, Callable[[], Any]] = {
        "pair": lambda: attach(small, TopK(), Native()),
        "missing": lambda: attach(small, Dgc(), Allgather()),
        "range": lambda: attach(small, Dgc(), Allgather(), momentum=1.0),
        "in vain": lambda: attach(small, TopK(), Allgather(), momentum=0.9),
        "buckets": lambda: attach(large, GroupTopK(preset="patent"), Ring()),
        "engine": lambda: attach(small, TorchFp16(), Native()),
    }
    return {name: message_of(call) for name, call in tries.items()}


def test_what_cannot_work_is_refused_in_one_sentence_before_anything_starts(tmp_path: Path) -> None:
    (said,) = run_ranks(refusals, 1, tmp_path)
    assert said["pair"].startswith("ValueError: topk sends Sparse payloads: ")
    assert said["missing"].startswith("ValueError: dgc applies the momentum itself")
    assert said["range"] == said["missing"]
    assert said["in vain"].startswith("ValueError: topk applies no momentum")
    assert said["buckets"].endswith("wrap it with DistributedDataParallel(..., bucket_cap_mb=4)")
    assert said["engine"].startswith("ValueError: torch_fp16 is PyTorch's own hook")
