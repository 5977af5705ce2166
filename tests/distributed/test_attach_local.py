"""Behaviour that only `attach_local` has, on gloo ranks; test_engines.py tests what all attach functions share."""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import attach_local
from gradwire.step_guard import NonFiniteGradient
from tests.testing.engines import assert_same_on_all_ranks


def network(seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 6, generator=generator)
    nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()


def flat(model: nn.Module) -> torch.Tensor:
    """Return all parameters and buffers."""
    return torch.cat([tensor.flatten().float() for tensor in model.state_dict().values()])


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def train(rank: int, stops: int | None) -> list[torch.Tensor]:
    model = network(rank)  # rank 0's weights count
    optimizers = [torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[1:].parameters(), lr=0.1)]
    options: dict[str, Any] = {"steps": 4, "fragments": 2, "delay": 1, "start_after": 1, "outer_optimizer": adam}
    pair = ("topk:ratio=0.2,warmup_epochs=0", "allgather")
    local = attach_local(model, optimizers, *pair, **options)
    seen = []
    for step in range(10):
        if step == stops:
            parts = [model, *optimizers, local]
            states = copy.deepcopy([part.state_dict() for part in parts])
            local.close()
            backward(model, rank, 99)
            model.zero_grad()
            local = attach_local(model, optimizers, *pair, **options)
            for part, state in zip([model, *optimizers, local], states, strict=True):
                part.load_state_dict(state)
        backward(model, rank, step)
        if (rank, step) == (1, 5):
            model[0].weight.grad.fill_(float("nan"))
        before = flat(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(flat(model), before) == ((rank, step) == (1, 5))
        own = flat(model)
        with local.outer():
            seen.append(flat(model))
            assert_same_on_all_ranks(seen[-1])
        assert torch.equal(flat(model), own)
    assert local.traffic["gradient"].nbytes > 0
    local.close()
    assert torch.equal(flat(model), seen[-1])
    assert not torch.equal(flat(model), own)
    return [*seen, own]


@pytest.mark.ranks(2)
def test_ranks_share_an_outer_copy_and_go_on_bit_for_bit(rank: int) -> None:
    whole = train(rank, None)
    for stops in (4, 7):  # an exchange is under way before step 4, none before step 7
        assert all(map(torch.equal, train(rank, stops), whole))


@pytest.mark.ranks(1)
def test_any_optimizer_moves_the_outer_copy_also_after_steps_with_a_closure(rank: int) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    twin, outer = copy.deepcopy(model), [nn.Parameter(each.detach().clone()) for each in model.parameters()]
    reference, pairs = adam(outer), [(each, sgd(each)) for each in (model, twin)]
    local = attach_local(model, pairs[0][1], preset="diloco", steps=2, outer_optimizer=adam)
    for step in range(6):
        for each, optimizer in pairs:
            gradients = functools.partial(backward, each, 0, step)
            optimizer.step(gradients if each is model else gradients())
            optimizer.zero_grad()
        if step % 2 == 1:
            for place, inner in zip(outer, twin.parameters(), strict=True):
                place.grad = place.detach() - inner.detach()
            reference.step()
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(outer), twin.parameters())
        assert torch.equal(flat(model), flat(twin))
    assert local.nbytes["outer"] == 3 * 4 * flat(model).numel() + 4 * len(outer)  # with moments, and counts of steps
    local.close()


@pytest.mark.ranks(2)
def test_optimizers_that_each_have_a_backward_average_their_own_gradients(rank: int) -> None:
    parts = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    optimizers = [sgd(part) for part in parts]
    local = attach_local(parts, optimizers, steps=2, start_after=3)
    seen = []
    for step in range(5):
        for part, optimizer in zip(parts, optimizers, strict=True):
            backward(part, rank, step)
            if (rank, step) == (1, 1) and part is parts[1]:
                part.weight.grad.fill_(float("nan"))
            optimizer.step()
            optimizer.zero_grad()
        with local.outer():
            seen.append(flat(parts))
            assert_same_on_all_ranks(seen[-1])
    local.close()
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(each[21:] for each in seen)]
    assert changed == [False, True, False, True]  # the NaN of one rank, then an update, then a step before an exchange


@pytest.mark.ranks(1)
def test_a_gradient_that_is_not_finite_raises_or_loses_its_elements(rank: int) -> None:
    model = network()
    for nonfinite in ("raise", "zero"):
        optimizer = sgd(model)
        local = attach_local(model, optimizer, steps=2, nonfinite=nonfinite)
        backward(model, 0, 0)
        model[2].bias.grad[0] = float("nan")
        before = model[2].bias.clone()
        if nonfinite == "raise":
            with pytest.raises(NonFiniteGradient, match="in step 1"):
                optimizer.step()
        else:
            optimizer.step()
        assert (model[2].bias == before).tolist() == [True, *[nonfinite == "raise"] * 2]
        local.close()
        optimizer.zero_grad()


@pytest.mark.ranks(1)
def test_what_cannot_work_is_refused(rank: int) -> None:
    model, embedding = network(), nn.Embedding(4, 3, sparse=True)
    optimizer = sgd(model)
    of_model = functools.partial(attach_local, model, optimizer)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("needs the network itself", lambda: attach_local(DistributedDataParallel(network()), optimizer)),
        ("needs the model's optimizer", lambda: attach_local(model, [])),
        ("local has no option 'step' (did you mean 'steps'?)", lambda: of_model(step=4)),
        ("has no trainable parameters", lambda: attach_local(nn.ReLU(), optimizer)),
        ("has no trainable parameters", lambda: attach_local(network().requires_grad_(False), optimizer)),
        ("none of the model's trainable parameters", lambda: attach_local(network(), optimizer)),
        ('nonfinite="ignore" is not possible; use skip', lambda: of_model(nonfinite="ignore")),
        ("fragments=3 does not divide steps=10", lambda: of_model(fragments=3, steps=10)),
        ("at an exchange; give steps a number", lambda: of_model(steps="auto")),
        ("local has no option 'quorum'", lambda: of_model(quorum=1)),
        ("native adds", lambda: of_model("topk", "native")),
        ("dgc applies the optimizer's momentum", lambda: of_model("dgc", "allgather")),
        ("sparse=False", lambda: attach_local(embedding, sgd(embedding))),
        ("0.weight is fp64", lambda: attach_local(network().double(), optimizer)),
        ("outer_lr belongs to the default outer optimizer", lambda: of_model(outer_optimizer=adam, outer_lr=0.5)),
        ("outer_optimizer must return a", lambda: of_model(outer_optimizer=optimizer)),
        ("of all parameters that it is given", lambda: of_model(outer_optimizer=lambda _: optimizer)),
        ("needs a model of as many blocks", lambda: of_model(fragments=5, steps=10)),
        ("of WithoutHooks does not call the hooks of", lambda: attach_local(model, WithoutHooks(optimizer))),
    ]
    for sentence, call in cases:
        with pytest.raises(ValueError, match=re.escape(sentence)) as raised:
            call()
        assert "\n" not in str(raised.value)
    states = []
    for options in ({"fragments": 2, "outer_momentum": 0.5}, {}):
        local = of_model(steps=4, **options)
        states.append(local.state_dict())
    with pytest.raises(ValueError, match=r"saved with fragments=2, outer_momentum=0\.5; give"):
        local.load_state_dict(states[0])
    local = of_model(steps=4, outer_optimizer=adam)
    with pytest.raises(ValueError, match="saved with outer_optimizer=SGD; give"):
        local.load_state_dict(states[1])
    both = [sgd(part) for part in (model[0], model[2])]
    local = attach_local(model, both, steps=2)
    both[0].step()
    with pytest.raises(RuntimeError, match="call step\\(\\) of each once"):
        both[0].step()
    lbfgs = torch.optim.LBFGS(model.parameters())
    local = attach_local(model, lbfgs, steps=2)
    with pytest.raises(RuntimeError, match="computes several gradients per step"):
        lbfgs.step(lambda: [backward(model, 0, 0), torch.ones(1)][1])
    local.close()


Change = Callable[[Any], object]
"""network: what happens to it between two steps"""


def unfrozen_in_a_new_optimizer(net: Any) -> None:
    sgd(net[2].requires_grad_(True)).step()


BUFFER = "a buffer of the model was added, removed or given another shape after local steps began"
CHANGES: dict[str, tuple[Change, str]] = {
    "appended buffers": (
        lambda net: net.append(nn.BatchNorm1d(3, affine=False)),
        f"{BUFFER}; call close() before, and attach_local after such a change",
    ),
    "converted": (
        lambda net: net.bfloat16(),
        "0.weight was torch.float32 [8, 6] on cpu when attach_local was called and is torch.bfloat16 [8, 6] on cpu",
    ),
    "of another shape": (
        lambda net: setattr(net[0].bias, "data", torch.zeros(9)),
        "0.bias was torch.float32 [8] on cpu when attach_local was called and is torch.float32 [9] on cpu",
    ),
    "a new optimizer": (
        lambda net: torch.optim.AdamW(net[0].parameters()).step(),
        "attach_local does not know this AdamW, so its steps would not be counted and nothing would be exchanged; call",
    ),
    "a new optimizer of the unfrozen": (unfrozen_in_a_new_optimizer, "2.weight was added, replaced or unfrozen after"),
    "another buffer": (lambda net: setattr(net[1], "running_mean", torch.full((8,), 3.0)), ""),
}


def half_trained() -> tuple[Any, Any, torch.optim.Optimizer]:
    """Return a network whose last layer is frozen, its hook and its optimizer, after a step."""
    model = network()
    model[2].requires_grad_(False)
    optimizer = sgd(model[:2])
    local = attach_local(model, optimizer, steps=2)
    optimizer.step()
    return model, local, optimizer


@pytest.mark.ranks(1)
def test_a_change_that_would_not_be_exchanged_is_refused_before_the_next_update(rank: int) -> None:
    for change, sentence in CHANGES.values():
        model, local, optimizer = half_trained()
        if sentence:
            with pytest.raises(RuntimeError, match=re.escape(sentence)) as raised:
                change(model), optimizer.step(), optimizer.step()
            assert "\n" not in str(raised.value)
        else:
            change(model), optimizer.step(), optimizer.step()
        if model[0].bias.numel() == 8:
            local.close()
        else:
            with pytest.raises(RuntimeError, match=r"0\.bias has another shape than its outer copy, so the model k"):
                local.close()


@pytest.mark.ranks(1)
def test_closing_says_that_weights_which_were_changed_by_hand_are_lost(rank: int) -> None:
    model, local, optimizer = half_trained()
    optimizer.step()
    model.load_state_dict({name: 0 * value + 7 for name, value in model.state_dict().items()})
    with pytest.warns(UserWarning, match="weights were changed after the last step that attach_local counted"):
        local.close()
    assert not bool((model[0].weight == 7).any())


class WithoutHooks(torch.optim.Optimizer):
    """An optimizer that makes the steps of another one, and is not initialised."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Wrapper(WithoutHooks):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        torch.optim.Optimizer.__init__(self, inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.ranks(2)
def test_the_outer_copy_is_held_until_the_outermost_block_ends_and_never_trained(rank: int) -> None:
    model = network(rank)
    for optimizer in (sgd(model), Wrapper(torch.optim.AdamW(model.parameters()))):
        local = attach_local(model, optimizer, steps=2)
        for step in range(3):
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        own, buffers = flat(model), model[1].running_mean.clone()
        with local.outer():
            with local.outer():
                outer = flat(model)
                assert_same_on_all_ranks(outer)
                local.state_dict()
            assert torch.equal(flat(model), outer)
            with pytest.raises(RuntimeError, match=re.escape("inside outer() an optimizer's step would be lost")):
                optimizer.step()
            with pytest.raises(RuntimeError, match="load it outside of the block"):
                local.load_state_dict(local.state_dict())
        assert torch.equal(flat(model), own)
        assert not torch.equal(own, outer)
        with pytest.raises(RuntimeError, match=r"2\.bias was changed inside outer\(\), which"), local.outer():
            model[2].bias.data += 1
        with pytest.raises(ZeroDivisionError), local.outer():
            _ = 1 / 0
        assert torch.equal(flat(model), own)
        assert torch.equal(model[1].running_mean, buffers)
        with local.outer():
            local.close()
        assert torch.equal(flat(model), outer)
        local.state_dict()
        with pytest.raises(RuntimeError, match="leave out outer"), local.outer():
            pass
        backward(model, rank, 9)
        optimizer.step()  # counts no longer, and is not taken back
        optimizer.zero_grad()
        after = flat(model)
        local.close()
        assert torch.equal(flat(model), after)
    first = attach_local(model, optimizer, steps=2)
    second = attach_local(model, optimizer, steps=2)
    with pytest.raises(RuntimeError, match="local steps are closed"), first.outer():
        pass
    second.close()
