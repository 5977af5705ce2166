"""What holds for every optimizer that encodes what it exchanges: equal ranks, resumed training, refusals."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.launch.plan import check, plan
from bench.optimizers.base import Optimizer
from gradwire.optim.base import BoundOptimizer, FlatOptimizer
from tests.testing.belief_ranks import LR, Network, Rank, Tensors, noisy, set_gradients
from tests.testing.memory_transport import MemoryTransport, run_threads

METHODS = {
    "demo:chunk=8,k=3": "allgather",
    "demo:chunk=8,k=3,transform=none,value_dtype=bf16,lr_inside=false,weight_decay=0.1": "allgather",
    "onebit_adam:warmup_steps=5,weight_decay=0.1": "ring",
    "onebit_adam:warmup_steps=1,scale=l2": "allgather",
    "zero_one_adam:var_freeze_step=12,var_update_scaler=2,weight_decay=0.1": "ring",
    "zero_one_adam:var_freeze_step=4,local_step_scaler=2": "ring",
}


def build(text: str) -> Optimizer:
    return cast(Optimizer, spec.build("optimizers", text))


def rank_of(transport: MemoryTransport, text: str) -> Rank:
    return Rank(transport, build(text), collective=METHODS[text])


@pytest.mark.parametrize("text", METHODS)
def test_all_ranks_have_the_same_bits(text: str) -> None:
    def train(transport: MemoryTransport) -> list[bytes]:
        rank, history = rank_of(transport, text), []
        for _ in rank.train(noisy, 20):
            cast(BoundOptimizer, rank.optimizer).show_shared()
            history.append(b"".join(p.detach().numpy().tobytes() for p in rank.model.parameters()))
        return history

    first, *others = run_threads(train, 3)
    assert others == [first, first]
    assert len(set(first)) > 5


@pytest.mark.parametrize("text", METHODS)
@pytest.mark.parametrize("stop", [3, 9, 14])
def test_a_resumed_run_goes_on_bit_for_bit(text: str, stop: int) -> None:
    def train(transport: MemoryTransport) -> tuple[Tensors, Tensors]:
        whole, resumed = rank_of(transport, text), rank_of(transport, text)
        for index, _ in enumerate(whole.train(noisy, 20)):
            if index + 1 == stop:
                saved = copy.deepcopy([each.state_dict() for each in (whole.model, whole.optimizer, whole.channel)])
        for each, state in zip((resumed.model, resumed.optimizer, resumed.channel), saved, strict=True):
            each.load_state_dict(state)
        for _ in resumed.train(lambda rank, step: noisy(rank, step + stop), 20 - stop):
            pass
        return list(whole.model.parameters()), list(resumed.model.parameters())

    for whole, resumed in run_threads(train, 2):
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


@pytest.mark.parametrize("text", METHODS)
def test_a_single_rank_sends_nothing_and_trains_as_without_a_channel(text: str) -> None:
    def train(transport: MemoryTransport) -> tuple[Tensors, int]:
        *_, weights = rank_of(transport, text).train(noisy, 20)
        return weights, transport.traffic["gradient"].nbytes

    ((weights, nbytes),) = run_threads(train, 1)
    assert nbytes == 0
    model = Network()
    optimizer = build(text).bind(model, LR)
    for index in range(20):
        set_gradients(model, noisy(0, index))
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


@pytest.mark.parametrize("text", ["demo", "onebit_adam", "zero_one_adam"])
def test_parameters_in_16_bits_have_a_state_in_fp32(text: str) -> None:
    weight = torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    optimizer = build(text).bind(torch.nn.ParameterList([weight]), 0.125)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.dtype == torch.bfloat16
    assert bool((weight < 1).all())
    assert isinstance(optimizer, FlatOptimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {vector.dtype for vector in optimizer.memory.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"optimizer": "demo", "compressor": "topk"}, "demo encodes what it sends itself, so topk would have nothing"),
        ({"optimizer": "onebit_adam", "compressor": "sign"}, "use compressor none"),
        ({"optimizer": "zero_one_adam", "compressor": "torch_fp16"}, "exchanges something in their place"),
        ({"optimizer": "demo", "collective": "ring"}, "use collective allgather"),
        ({"optimizer": "demo", "bucket_mb": 1.0}, "--bucket-mb has no meaning with demo, which sends no gradients"),
        ({"optimizer": "demo", "strategy": "local"}, "demo sends data of its own between all ranks, and"),
        ({"optimizer": "demo:k=0"}, "demo: k=0 is not possible"),
        ({"optimizer": "demo:chunk=200"}, "demo: chunk=200 is not possible"),
        ({"optimizer": "onebit_adam:warmup_steps=0"}, "onebit_adam: warmup_steps=0 is not possible"),
        ({"optimizer": "onebit_adam:scale=l3"}, "onebit_adam: scale=l3 is not possible"),
        ({"optimizer": "zero_one_adam:local_step_clipper=0"}, "zero_one_adam: local_step_clipper=0 is not possible"),
    ],
)
def test_what_does_not_combine_is_refused_in_a_sentence(choice: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(RunConfig(**choice))  # type: ignore[arg-type]


def test_the_collective_that_an_optimizer_needs_is_the_default() -> None:
    assert plan(RunConfig(optimizer="demo")).collective == "allgather"
    assert plan(RunConfig(optimizer="onebit_adam")).collective == "ring"


@pytest.mark.parametrize("text", ["demo", "onebit_adam", "zero_one_adam"])
def test_clipping_is_accepted(text: str) -> None:
    assert plan(RunConfig(optimizer=text, clip_norm=1.0)).clip_norm == 1.0


def test_the_user_learns_how_long_gradients_travel_whole() -> None:
    (note,) = plan(RunConfig(optimizer="onebit_adam:warmup_steps=7")).notes
    assert "its first 7 steps" in note
