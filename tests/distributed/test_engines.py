"""Behaviour that all attach functions share: training, residuals, states, non-finite gradients, misuse, changes."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.step_guard import NonFiniteGradient
from tests.testing.ddp_scenes import message_of, weights
from tests.testing.engines import ENGINES, SHARDS, alone, assert_same_on_all_ranks, engines, network

SHARDED = ("fsdp", "reduce_scatter")
OF_GRADIENTS = ("ddp", "ddp with optimizer", *SHARDED)
SPARSE = ("topk:ratio=0.05,value_dtype=fp32,warmup_epochs=0", "allgather")
GROUPS = ("group_topk:ratio=0.01,warmup_epochs=0", "ring")


def of_every_rank(*steps: int) -> list[tuple[int, int]]:
    return [(rank, step) for step in steps for rank in range(dist.get_world_size())]


@engines()
@pytest.mark.parametrize("pair", ["none ring", "none native", "topk:ratio=1.0,value_dtype=fp32 allgather"])
def test_what_sends_all_trains_as_one_process_with_all_batches(rank: int, engine: str, pair: str) -> None:
    with ENGINES[engine](*pair.split()) as made:
        after = made.train(range(3))
    torch.testing.assert_close(after, alone(map(of_every_rank, range(3))), rtol=1e-6, atol=1e-6)
    assert_same_on_all_ranks(after)


@engines("ddp", "fsdp", "local")
def test_ranks_start_with_the_weights_of_the_first(rank: int, engine: str) -> None:
    seed = rank // SHARDS if engine == "fsdp" else rank
    with ENGINES[engine](model=network(seed=seed)) as made:
        assert torch.equal(made.weights(), weights(network(seed=0)))


@engines()
def test_one_percent_of_the_entries_sends_50_times_fewer_bytes(rank: int, engine: str) -> None:
    sent = []
    for pair in (("none", "ring"), GROUPS):
        with ENGINES[engine](*pair, model=network(width=400)) as made:
            after = made.train(range(2))
            sent.append(made.hook.traffic["gradient"].nbytes)
            kept = made.hook.residual_norms().values()
    assert_same_on_all_ranks(after)
    assert all(norm > 0 for norm in kept) or engine == "reduce_scatter"  # some of whose pieces have no elements
    assert any(kept)
    assert sent[0] >= 50 * sent[1] > 0


@engines(*OF_GRADIENTS)
def test_micro_steps_are_sent_once_and_equal_one_large_batch(rank: int, engine: str) -> None:
    for way in ENGINES[engine].pauses:
        with ENGINES[engine]() as made:
            sent = []
            for step in range(6):
                with made.pause(way, ends=step % 3 == 2):
                    made.backward(step)
                if step % 3 == 2:
                    for parameter in made.network.parameters():
                        parameter.grad /= 3
                    made.update()
                sent.append(made.hook.traffic["gradient"].messages)
            torch.testing.assert_close(
                made.weights(), alone([of_every_rank(0, 1, 2), of_every_rank(3, 4, 5)]), rtol=1e-5, atol=1e-6
            )
        assert sent == [0, 0, sent[2], sent[2], sent[2], 2 * sent[2]]
        assert sent[2] > 0


@engines(*OF_GRADIENTS)
def test_what_arrived_and_what_waits_are_all_gradients_that_accumulated(rank: int, engine: str) -> None:
    way = ENGINES[engine].pauses[0]
    with ENGINES[engine](*SPARSE) as made, ENGINES[engine]() as dense:
        for each in (made, dense):
            each.sum = 0
            for step in range(0, 6, 2):
                for micro in range(2):
                    with each.pause(way, ends=bool(micro)):
                        each.backward(step + micro)
                assert each.hook.step_ok()
                each.sum += each.gradients()
                each.network.zero_grad()
        waiting = made.waiting()
        assert waiting.norm() > 0.1 * dense.sum.norm()
        torch.testing.assert_close(made.sum + waiting, dense.sum, rtol=1e-5, atol=1e-6)


RESUMED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("group_topk:ratio=0.05,group_size=64,warmup_epochs=0 ring", {}, OF_GRADIENTS),
    ("topk:ratio=0.1,momentum_correction=true allgather", {"momentum": 0.9}, OF_GRADIENTS),
    ("powersgd:rank=1,error_feedback=true native", {}, ("ddp", "ddp with optimizer", "fsdp")),
    ("qsgd:bits=4 allgather", {}, OF_GRADIENTS),
    ("topk:ratio=0.1,warmup_epochs=0 allgather", {"outer_momentum": 0.9}, ("local",)),
]


@engines()
def test_a_saved_state_goes_on_bit_for_bit(rank: int, engine: str) -> None:
    for pair, options, serves in RESUMED:
        if engine in serves:
            with ENGINES[engine](*pair.split(), **options) as made:
                made.train(range(2))
                state = made.state()
                whole = made.train(range(2, 4))
            with ENGINES[engine](*pair.split(), model=network(seed=rank), resumes=state, **options) as made:
                assert torch.equal(made.train(range(2, 4)), whole), pair
                assert engine == "local" or made.hook.state_dict()["step"] == 4


@engines("ddp", *SHARDED)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_an_element_of_one_rank_that_is_not_finite_skips_the_step_on_all_and_leaves_no_trace(
    rank: int, engine: str, poison: float
) -> None:
    with ENGINES[engine](*SPARSE) as made:
        made.train(range(2))
        before = copy.deepcopy(made.residuals())
        made.network.poison = poison if rank == 1 else 1.0
        made.backward(2)
        assert not made.hook.step_ok()
        after = made.residuals()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        made.network.poison = 1.0
        made.network.zero_grad()
        made.train(range(3, 4))


@engines(*OF_GRADIENTS)
def test_or_it_raises_on_all_ranks(rank: int, engine: str) -> None:
    with ENGINES[engine](nonfinite="raise") as made:
        made.network.poison = float("inf") if rank == 1 else 1.0
        made.backward(0)
        with pytest.raises(NonFiniteGradient, match=r"^a gradient was not finite at step 0$"):
            made.update()


@engines(*OF_GRADIENTS)
def test_or_only_its_elements_are_left_out(rank: int, engine: str) -> None:
    with ENGINES[engine](nonfinite="zero") as made, ENGINES[engine]() as healthy:
        made.network.poison = float("nan") if rank == 1 else 1.0
        for each in (made, healthy):
            each.backward(0)
            assert each.hook.step_ok()
        found, expected = made.gradients(), healthy.gradients()
        is_same = torch.isclose(found, expected, rtol=1e-6, atol=1e-7)
        is_same[: made.local(made.network.scale.grad).numel()] = True  # which comes first
        assert found.isfinite().all()
        assert is_same.all()
        kept = torch.tensor([float(torch.equal(found, expected))])
        dist.all_reduce(kept)
        assert kept < dist.get_world_size()


AGAIN = {
    "ddp": "step_ok() was not called after the last backward(); call it after each",
    "ddp with optimizer": "the last backward() was not followed by optimizer.step(); accumulate gradients inside",
    "fsdp": "blocks.1 was reduced twice since the last step_ok(); call step_ok() once per step, and hook.set_requires_",
    "reduce_scatter": "blocks.1 was reduced twice since the last step_ok(); call step_ok() once per step, and model.se",
}
NOTHING_CAME = {
    "ddp": "no gradient came through DDP since the last step_ok(); call ddp(x), not model(x), leave the last "
    "backward() of a step outside no_sync(), and call step_ok() once per step; if the network is trained without "
    "this hook now, call its close()",
    "ddp with optimizer": "no gradient came through DDP since the last optimizer.step()",
    "fsdp": "no gradient was exchanged since the last step_ok(); call it once per step, after a backward() that sends",
}
NOTHING_CAME["reduce_scatter"] = NOTHING_CAME["fsdp"]
CLOSED = "the communication hook of this model is closed; wrap the model in DDP again"


@engines(*OF_GRADIENTS)
def test_a_missing_step_and_a_closed_hook_are_told(rank: int, engine: str) -> None:
    with ENGINES[engine]() as made:
        made.train(range(1))
        with pytest.raises(RuntimeError, match=re.escape(NOTHING_CAME[engine])):
            made.update()
        made.backward(0)
        with pytest.raises(RuntimeError, match=re.escape(AGAIN[engine])):
            made.backward(1)
    with ENGINES[engine]() as made:
        made.hook.close()
        with pytest.raises(
            RuntimeError,
            match="the hook of this model is closed; attach one again" if engine in SHARDED else CLOSED,
        ):
            made.backward(0)


@engines()
def test_a_density_that_waits_for_its_epoch_warns_once_on_one_rank_and_follows_it(rank: int, engine: str) -> None:
    sent, said = [], []
    for epoch in (None, 0, 9):
        made = ENGINES[engine]("topk:ratio=0.01", "allgather", model=network(width=200))
        with made, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if epoch is not None:
                made.hook.set_epoch(epoch)
            made.train(range(1))
            sent.append(made.hook.traffic["gradient"].nbytes)
            made.train(range(1, 3))
        said.append([str(each.message) for each in caught if each.category is UserWarning])
    warning = (
        "topk sends more in its first 3 epochs only if hook.set_epoch(epoch) is called before each; "
        "call it, or set warmup_epochs=0 or warmup_steps=N"
    )
    is_first = rank < SHARDS if engine == "fsdp" else rank == 0  # of the ranks that exchange
    assert said == [[warning] if is_first else [], [], []]
    assert sent[0] == sent[2] < sent[1] / 3


Change = Callable[[Any, torch.optim.Optimizer], object]
"""(network, optimizer): what happens to them between two steps"""


def with_a_bias_at_rest() -> Any:
    model: Any = network()
    model.blocks[1][1].bias.requires_grad_(False)
    return model


def swap_frozen(net: Any, _: torch.optim.Optimizer) -> None:
    net.blocks[1][0].bias.requires_grad_(False)
    net.blocks[1][1].bias.requires_grad_(True)  # of the same size


def added(name: str, fsdp: str = "") -> dict[str, str]:
    """Return what is said of a parameter that was added, replaced or unfrozen, by engine."""
    return {
        "ddp with optimizer": f"{name} was added, replaced or unfrozen after the model was wrapped; do that first, "
        "then wrap the model in DDP",
        "local": f"{name} was added, replaced or unfrozen after attach_local was called; call close() before, and "
        "attach_local after such a change",
        "fsdp": fsdp,
    }


NOT_SHARDED = " is not sharded, so FSDP2 does not reduce its gradient; call"
OF_UNITS = " was added, removed, replaced, frozen or unfrozen after the hook was attached; do that first, or close()"
OTHER_SIZE = (
    "because a parameter got no gradient, or was frozen or unfrozen after the hook was attached; call model.set"
)
CHANGES: dict[str, tuple[Change, dict[str, str]]] = {
    "unfrozen": (
        lambda net, _: net.blocks[1][1].bias.requires_grad_(True),
        added("blocks.1.1.bias", f"FSDP2 reduced 544 elements of blocks.1 instead of 528, {OTHER_SIZE}"),
    ),
    "frozen and unfrozen": (swap_frozen, added("blocks.1.1.bias", f"blocks.1.0.bias{OF_UNITS}")),
    "appended": (
        lambda net, _: net.blocks.append(nn.Linear(31, 31)),
        added("blocks.2.weight", f"blocks.2.weight{NOT_SHARDED}"),
    ),
    "replaced": (
        lambda net, _: setattr(net, "head", nn.Linear(31, 5)),
        added("head.weight", f"FSDP2 reduced 3 elements of the model instead of 99, {OTHER_SIZE}"),
    ),
    "a parameter replaced": (  # FSDP2 puts its own back
        lambda net, _: setattr(net.head, "bias", nn.Parameter(torch.zeros(5))),
        added("head.bias"),
    ),
    "assigned": (  # FSDP2 puts the new ones to the place of the old ones
        lambda net, _: net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True),
        added("scale"),
    ),
    "added to the optimizer": (
        lambda _, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 4))]}),
        {
            "ddp with optimizer": "a parameter of shape [3, 4] that DDP does not exchange was added to an optimizer",
            "local": "an optimizer updates a parameter of shape [3, 4] that is not in the model, so it would not be "
            "exchanged; put",
        },
    ),
    "frozen": (
        lambda net, _: net.head.bias.requires_grad_(False),
        {"fsdp": f"FSDP2 reduced 96 elements of the model instead of 99, {OTHER_SIZE}"},
    ),
    "a layer without parameters": (lambda net, _: net.blocks.append(nn.ReLU()), {}),
    "a group of known parameters": (
        lambda _, optimizer: optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()]}),
        {},
    ),
    "the optimizer's state loaded": (lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()), {}),
    "other data": (lambda net, _: setattr(net.head.weight, "data", net.head.weight.data.clone()), {}),
    "an optimizer of something else": (lambda *_: torch.optim.SGD([nn.Parameter(torch.ones(2))]).step(), {}),
}
PARAMETRIZED: dict[str, tuple[Change, dict[str, str]]] = {  # which PyTorch refuses in FSDP2
    "a new parameter": (
        lambda net, _: nn.utils.parametrizations.weight_norm(net.head),
        added("head.parametrizations.weight.original0"),
    ),
    "renamed": (
        lambda net, _: nn.utils.parametrize.register_parametrization(net.head, "weight", nn.Identity()),
        {},
    ),
}


@engines("ddp with optimizer", "fsdp", "local")
def test_a_change_that_would_not_be_exchanged_is_refused_before_the_next_update(rank: int, engine: str) -> None:
    surprises = {}
    for name, (change, sentences) in (CHANGES if engine == "fsdp" else CHANGES | PARAMETRIZED).items():
        wrapping = {"find_unused_parameters": True} if engine.startswith("ddp") else {}
        with ENGINES[engine](model=with_a_bias_at_rest(), wrapping=wrapping) as made:
            made.train(range(2))
            change(made.network, made.optimizer)
            said = message_of(lambda: made.train(range(2, 4)))
            expected = sentences.get(engine)
            if not said.startswith(f"RuntimeError: {expected}" if expected else "no error") or "\n" in said:
                surprises[name] = said
    assert not surprises, surprises
