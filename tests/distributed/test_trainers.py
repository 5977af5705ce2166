"""Trainers make the updates of a plain loop, evaluate and save its weights, and resume as if they had never stopped."""

from __future__ import annotations

import os
import runpy
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from gradwire import attach_local
from tests.testing.ddp_scenes import message_of, weights
from tests.testing.engines import assert_same_on_all_ranks
from tests.testing.trainers import (
    EPOCH,
    FAILS_AFTER,
    TRAINERS,
    Accelerate,
    Lightning,
    Network,
    Transformers,
    plain,
    trainers,
)

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
kinds = pytest.mark.parametrize("is_local", [False, True], ids=["gradients", "local steps"])


@kinds
@trainers()
def test_a_trainer_equals_a_plain_loop_also_after_it_resumed(
    rank: int, trainer: str, is_local: bool, folder: Path
) -> None:
    adapter = TRAINERS[trainer](rank, folder, is_local=is_local)
    wanted, first_nbytes = plain(rank, is_local=is_local)
    assert_same_on_all_ranks(wanted.seen[0])
    for checkpoint in ("", adapter.half):
        run = adapter.run(checkpoint)
        seen = wanted.seen[1:] if checkpoint else wanted.seen
        assert len(run.seen) == len(seen)
        assert all(map(torch.equal, run.seen, seen)), checkpoint
        assert torch.equal(run.saved, wanted.saved)
        states = [hook.state_dict() for hook in (run.hook, wanted.hook)]
        assert states[0].pop("options", None) == states[1].pop("options", None)
        torch.testing.assert_close(*states, rtol=0, atol=0, equal_nan=True)
        if not is_local:
            nbytes = wanted.hook.traffic["gradient"].nbytes
            assert run.hook.traffic["gradient"].nbytes == nbytes - (first_nbytes if checkpoint else 0)
    dist.barrier()
    adapter.state_file(1).unlink(missing_ok=True)
    dist.barrier()
    assert message_of(lambda: adapter.run(adapter.half)).startswith("ValueError: there is no state of rank 1 beside ")


@trainers("lightning")
def test_lightning_is_told_what_it_cannot_do(rank: int, trainer: str, folder: Path) -> None:
    adapter = Lightning(rank, folder, is_local=False)
    network = Network()
    trained = adapter.trainer(network)
    adapter.fit(trained, network)
    trained.save_checkpoint(folder / "after.ckpt")  # when the hook is closed
    assert (folder / f"gradwire-{rank}-after.safetensors").is_file()
    scaled = adapter.strategy()
    scaled.precision_plugin = SimpleNamespace(scaler=object())
    assert "train in bf16" in message_of(scaled._register_ddp_hooks)
    assert message_of(lambda: adapter.strategy(ddp_comm_hook=print)).endswith(
        "brings the communication hook of the model; leave out ddp_comm_hook"
    )
    assert message_of(lambda: adapter.strategy().remove_checkpoint("memory://a.ckpt")).endswith(
        "memory://a.ckpt is not in one"
    )
    adapter.is_local = True
    assert message_of(lambda: adapter.strategy(find_unused_parameters=True)).endswith(
        "the module is not in DDP, so find_unused_parameters has no effect; leave it out"
    )


@trainers("accelerate")
def test_accelerate_is_told_what_it_cannot_do(rank: int, trainer: str, folder: Path) -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from gradwire.trainers.accelerate import check

    adapter = Accelerate(rank, folder, is_local=False)
    network = Network()
    accelerator, optimizer = Accelerator(cpu=True), network.descent()
    hooked = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="fp16")])
    prepared, types = accelerator.prepare(optimizer), type(accelerator.distributed_type)

    def checked(**changes: Any) -> str:
        usual = {"distributed_type": accelerator.distributed_type, "multi_device": False, "mixed_precision": "no"}
        return message_of(lambda: check(SimpleNamespace(**usual | changes)))  # type: ignore[arg-type]

    assert "train in bf16" in checked(mixed_precision="fp16")
    assert checked(distributed_type=types.NO).endswith(
        "there is only one process; start several with torchrun or accelerate launch"
    )
    assert checked(distributed_type=types.FSDP).endswith("this Accelerator uses FSDP")
    for sentence, call in {
        "has a communication hook already; create it without comm_hook": lambda: adapter.handler(
            hooked, network, optimizer
        ),
        "is prepared already; create GradwireHandler before accelerator.prepare": lambda: adapter.handler(
            accelerator, network, prepared
        ),
        "call accelerator.prepare(model, optimizer, ...) first": lambda: adapter.handler(
            accelerator, network, optimizer
        ).close(),
    }.items():
        assert message_of(call).endswith(sentence)
    adapter.is_local = True
    in_ddp = accelerator.prepare(Network())
    assert message_of(lambda: adapter.handler(accelerator, in_ddp, optimizer)).endswith(
        "this model is prepared already; create GradwireLocalHandler before accelerator.prepare"
    )


@trainers("transformers")
def test_transformers_refuses_a_state_of_other_weights_and_loads_the_best_model(
    rank: int, trainer: str, folder: Path
) -> None:
    adapter = Transformers(rank, folder, is_local=False)
    adapter.run()
    half, own = folder / adapter.half, f"gradwire-{rank}.safetensors"
    (half / own).write_bytes((half.with_name(f"checkpoint-{2 * EPOCH}") / own).read_bytes())
    dist.barrier()
    said = message_of(lambda: adapter.run(adapter.half))
    assert "belongs to other weights than those that were loaded" in said
    dist.barrier()
    adapter.is_local = True
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    seen = adapter.run(**best).seen
    assert torch.equal(seen[-1], seen[0])  # whose loss is the larger one


def num_open() -> int:
    """Return the number of hooks of this process that are not closed."""
    return [thread.name for thread in threading.enumerate()].count("exchange")


@trainers(long=("lightning", "accelerate"))  # all three close an earlier hook through attach
def test_a_training_after_one_that_failed_is_like_any_other(rank: int, trainer: str, folder: Path) -> None:
    adapter, open_before = TRAINERS[trainer](rank, folder, is_local=False), num_open()
    expected = adapter.short(Network(momentum=0.0))
    assert_same_on_all_ranks(expected)
    network = Network(momentum=0.0)
    network.error = RuntimeError("as a user's code may raise")
    failed = adapter.trainer(network, num_epochs=1)
    assert "as a user's" in message_of(lambda: adapter.short(network, failed))
    for _ in range(2):
        after = adapter.short(network, None if trainer == "lightning" else failed)  # Lightning's counts on
        assert torch.equal(after, expected)
    if trainer == "lightning":
        adapter.fit(failed, network)
        assert failed.global_step > FAILS_AFTER
    if trainer == "transformers":
        network.error = RuntimeError("DefaultCPUAllocator: can't allocate memory")
        smaller: Any = adapter.trainer(network, num_epochs=1, auto_find_batch_size=True)
        adapter.fit(smaller, network)
        assert smaller._train_batch_size < smaller.args.per_device_train_batch_size
        first, second = smaller.added, adapter.add(smaller)
        assert "two callbacks of gradwire; remove one with trainer.remove_callback" in message_of(smaller.train)
        smaller.remove_callback(second)
        smaller.added = first
        adapter.fit(smaller, network)
    assert num_open() <= open_before


@trainers("accelerate", long=("accelerate",))
def test_a_handler_serves_one_model_at_a_time_and_the_next_after_it_was_closed(
    rank: int, trainer: str, folder: Path
) -> None:
    adapter, network = Accelerate(rank, folder, is_local=False), Network()
    accelerator, optimizer = adapter.trainer(network), network.descent()
    handler = adapter.handler(accelerator, network, optimizer)
    for _ in range(2):
        model, prepared = accelerator.prepare(network, optimizer)
        accelerator.backward(model(torch.ones(4, 20)).sum())
        prepared.step()
        assert message_of(lambda: accelerator.prepare(Network())).startswith("ValueError: GradwireHandler serves")
        handler.close()
        accelerator.free_memory()
        assert_same_on_all_ranks(weights(network))
    accelerator.prepare(network, optimizer)  # whose training ends with an exception
    later = adapter.handler(accelerator, network, optimizer)
    assert handler.hook.is_closed
    accelerator.prepare(network, optimizer)
    later.close()


@trainers("lightning")
def test_the_example_in_lightning_trains_as_a_plain_loop(rank: int, trainer: str, folder: Path) -> None:
    Lightning(rank, folder, is_local=True)
    os.environ["TORCHELASTIC_RUN_ID"] = "of torchrun"
    os.chdir(folder)  # for Lightning's checkpoint
    sys.path.insert(0, str(EXAMPLES))
    of_example = runpy.run_path(str(EXAMPLES / "train_lightning_local.py"), run_name="__main__")
    torch.manual_seed(1)
    data, model = of_example["train"], of_example["network"]()
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    local = attach_local(model, optimizer, "bf16", "ring", preset="diloco", steps=10)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 32, sampler=sampler, drop_last=True):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    local.close()
    assert torch.equal(weights(of_example["model"]), weights(model))
