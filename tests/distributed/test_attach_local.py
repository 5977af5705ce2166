"""`attach_local` in a script of its own, on two ranks."""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import attach_local
from gradwire.step_guard import NonFiniteGradient
from tests.testing.ranks import run_ranks


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 6, generator=generator)
    nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()


def flat(model: nn.Module) -> torch.Tensor:
    """Return all parameters and buffers."""
    return torch.cat([tensor.flatten().float() for tensor in model.state_dict().values()])


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
            again = attach_local(model, optimizers, *pair, **options)
            for part, state in zip([model, *optimizers, again], states, strict=True):
                part.load_state_dict(state)
            local = again
        backward(model, rank, step)
        if (rank, step) == (1, 5):
            next(model.parameters()).grad.fill_(float("nan"))
        before = flat(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (rank, step) == (1, 5):
            assert torch.equal(flat(model), before)
        own = flat(model)
        with local.outer():
            seen.append(flat(model))
        assert torch.equal(flat(model), own)
    assert local.traffic["gradient"].nbytes > 0
    local.close()
    assert torch.equal(flat(model), seen[-1])
    return [*seen, own]


def test_ranks_share_an_outer_copy_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    one, two = run_ranks(train, 2, tmp_path, args=(None,))
    assert all(torch.equal(a, b) for a, b in zip(one[:-1], two[:-1], strict=True))
    assert not torch.equal(one[-1], two[-1])
    for stops in (4, 7):  # an exchange is under way before step 4, none before step 7
        again, _ = run_ranks(train, 2, tmp_path, args=(stops,))
        assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))


def move_outer(_: int) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    twin, outer = copy.deepcopy(model), [nn.Parameter(each.detach().clone()) for each in model.parameters()]
    reference, pairs = adam(outer), [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, twin)]
    local = attach_local(model, pairs[0][1], preset="diloco", steps=2, outer_optimizer=adam)
    for step in range(6):
        for each, sgd in pairs:
            gradients = functools.partial(backward, each, 0, step)
            sgd.step(gradients if each is model else gradients())
            sgd.zero_grad()
        if step % 2 == 1:
            for place, inner in zip(outer, twin.parameters(), strict=True):
                place.grad = place.detach() - inner.detach()
            reference.step()
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(outer), twin.parameters())
        assert torch.equal(flat(model), flat(twin))
    assert local.nbytes["outer"] == 3 * 4 * flat(model).numel() + 4 * len(outer)  # with moments, and counts of steps
    local.close()


def test_any_optimizer_moves_the_outer_copy_also_after_steps_with_a_closure(tmp_path: Path) -> None:
    run_ranks(move_outer, 1, tmp_path)


def train_in_turn(rank: int) -> list[torch.Tensor]:
    parts = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
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
    local.close()
    return seen


def test_optimizers_that_each_have_a_backward_average_their_own_gradients(tmp_path: Path) -> None:
    one, two = run_ranks(train_in_turn, 2, tmp_path)
    assert all(map(torch.equal, one, two))
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(each[21:] for each in one)]
    assert changed == [False, True, False, True]  # the NaN of one rank, then an update, then a step before an exchange


def meet_nan(_: int) -> None:
    model = network(1)
    for nonfinite in ("raise", "zero"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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


def test_a_gradient_that_is_not_finite_raises_or_loses_its_elements(tmp_path: Path) -> None:
    run_ranks(meet_nan, 1, tmp_path)


def warm_up(_: int) -> None:
    model = network(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def entries(epoch: int | None) -> int:
        local = attach_local(model, optimizer, "topk:ratio=0.02,warmup_epochs=2", "allgather", steps=1)
        if epoch is not None:
            local.set_epoch(epoch)
        backward(model, 0, 0)
        optimizer.step()
        local.close()
        return sum(layer.num_entries for layer in local.finish_step().encoded)

    with pytest.warns(UserWarning, match="set_epoch"):
        assert entries(None) == entries(2)
    assert entries(0) > entries(1) > entries(2)


def test_the_epoch_controls_the_density(tmp_path: Path) -> None:
    run_ranks(warm_up, 1, tmp_path)


def refuse(_: int) -> None:
    model, embedding = network(1), nn.Embedding(4, 3, sparse=True)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    cases: list[tuple[str, Any]] = [
        ("needs the network itself", lambda: attach_local(DistributedDataParallel(network(1)), sgd)),
        ("needs the model's optimizer", lambda: attach_local(model, [])),
        ("local has no option 'step' (did you mean 'steps'?)", lambda: attach_local(model, sgd, step=4)),
        ("has no trainable parameters", lambda: attach_local(nn.ReLU(), sgd)),
        ("has no trainable parameters", lambda: attach_local(network(1).requires_grad_(False), sgd)),
        ("none of the model's trainable parameters", lambda: attach_local(network(1), sgd)),
        ('nonfinite="ignore" is not possible; use skip', lambda: attach_local(model, sgd, nonfinite="ignore")),
        ("fragments=3 does not divide steps=10", lambda: attach_local(model, sgd, fragments=3, steps=10)),
        ("at an exchange; give steps a number", lambda: attach_local(model, sgd, steps="auto")),
        ("local has no option 'quorum'", lambda: attach_local(model, sgd, quorum=1)),
        ("native adds", lambda: attach_local(model, sgd, "topk", "native")),
        ("dgc applies the optimizer's momentum", lambda: attach_local(model, sgd, "dgc", "allgather")),
        ("sparse=False", lambda: attach_local(embedding, torch.optim.SGD(embedding.parameters()))),
        ("0.weight is fp64", lambda: attach_local(network(1).double(), sgd)),
        ("outer_lr is for the SGD that", lambda: attach_local(model, sgd, outer_optimizer=adam, outer_lr=0.5)),
        ("outer_optimizer must return a", lambda: attach_local(model, sgd, outer_optimizer=sgd)),
        ("of all parameters that it is given", lambda: attach_local(model, sgd, outer_optimizer=lambda _: sgd)),
        ("needs a model of as many blocks", lambda: attach_local(model, sgd, fragments=5, steps=10)),
    ]
    for sentence, call in cases:
        with pytest.raises(ValueError, match=re.escape(sentence)) as raised:
            call()
        assert "\n" not in str(raised.value)
    one = attach_local(model, sgd, steps=4, fragments=2, outer_momentum=0.5)
    two = attach_local(model, sgd, steps=4)
    with pytest.raises(ValueError, match=r"saved with fragments=2, outer_momentum=0\.5; give"):
        two.load_state_dict(one.state_dict())
    one.close()
    two.close()
    moved = attach_local(model, sgd, steps=4, outer_optimizer=adam)
    with pytest.raises(ValueError, match="saved with outer_optimizer=SGD; give"):
        moved.load_state_dict(two.state_dict())
    moved.close()
    both = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    local = attach_local(model, both, steps=2)
    both[0].step()
    with pytest.raises(RuntimeError, match="call step\\(\\) of each once"):
        both[0].step()
    lbfgs = torch.optim.LBFGS(model.parameters())
    local = attach_local(model, lbfgs, steps=2)
    with pytest.raises(RuntimeError, match="computes several gradients per step"):
        lbfgs.step(lambda: [backward(model, 0, 0), torch.ones(1)][1])
    local.close()


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    run_ranks(refuse, 1, tmp_path)


Change = Callable[[Any, torch.optim.Optimizer], object]
"""(network, optimizer): what happens to them between two steps"""


def step_of_the_unfrozen(net: Any, _: torch.optim.Optimizer) -> None:
    torch.optim.SGD(net[2].requires_grad_(True).parameters(), lr=0.1).step()


BEFORE = "; call close() before, and attach_local after such a change"
REFUSED_LATER: dict[str, tuple[Change, str]] = {
    "unfrozen": (
        lambda net, _: net[2].requires_grad_(True),
        "2.weight was added, replaced or unfrozen after attach_local was called" + BEFORE,
    ),
    "appended": (lambda net, _: net.append(nn.Linear(3, 3)), "3.weight was added, replaced or unfrozen after"),
    "appended buffers": (
        lambda net, _: net.append(nn.BatchNorm1d(3, affine=False)),
        "a buffer of the model was added, removed or given another shape after local steps began" + BEFORE,
    ),
    "a layer replaced": (lambda net, _: net.__setitem__(0, nn.Linear(6, 8)), "0.weight was added, replaced or unfroz"),
    "a parameter replaced": (
        lambda net, _: setattr(net[0], "bias", nn.Parameter(torch.zeros(8))),
        "0.bias was added, replaced or unfrozen",
    ),
    "converted": (
        lambda net, _: net.bfloat16(),
        "0.weight was torch.float32 [8, 6] on cpu when attach_local was called and is torch.bfloat16 [8, 6] on cpu",
    ),
    "of another shape": (
        lambda net, _: setattr(net[0].bias, "data", torch.zeros(9)),
        "0.bias was torch.float32 [8] on cpu when attach_local was called and is torch.float32 [9] on cpu",
    ),
    "added to the optimizer": (
        lambda _, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 4))]}),
        "an optimizer updates a parameter of shape [3, 4] that is not in the model, so it would not be exchanged; put",
    ),
    "a new optimizer": (
        lambda net, _: torch.optim.AdamW(net[0].parameters()).step(),
        "attach_local does not know this AdamW, so its steps would not be counted and nothing would be exchanged; call",
    ),
    "a new optimizer of the unfrozen": (step_of_the_unfrozen, "2.weight was added, replaced or unfrozen after"),
}
FOLLOWED: dict[str, Change] = {
    "frozen": lambda net, _: net[0].requires_grad_(False),
    "renamed by a parametrization": lambda net, _: nn.utils.parametrize.register_parametrization(
        net[0], "weight", nn.Identity()
    ),
    "a layer without parameters": lambda net, _: net.append(nn.ReLU()),
    "other data": lambda net, _: setattr(net[0].weight, "data", net[0].weight.data.clone()),
    "another buffer": lambda net, _: setattr(net[1], "running_mean", torch.full((8,), 3.0)),
    "the optimizer's state loaded": lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "an optimizer of something else": lambda *_: torch.optim.SGD([nn.Parameter(torch.ones(2))]).step(),
}


def half_trained() -> tuple[Any, torch.optim.Optimizer]:
    """Return a network whose last layer is frozen, and its optimizer."""
    model: Any = network(1)
    model[2].requires_grad_(False)
    return model, torch.optim.SGD(model[:2].parameters(), lr=0.1)


def change_later(_: int) -> None:
    def two_steps(change: Change, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        change(model, optimizer)
        for _ in range(2):
            optimizer.step()

    for change, sentence in REFUSED_LATER.values():
        model, optimizer = half_trained()
        local = attach_local(model, optimizer, steps=2)
        optimizer.step()
        with pytest.raises(RuntimeError, match=re.escape(sentence)) as raised:
            two_steps(change, model, optimizer)
        assert "\n" not in str(raised.value)
        if model[0].bias.numel() == 8:
            local.close()
        else:
            with pytest.raises(
                RuntimeError, match=r"0\.bias has another shape than its outer copy, so the model keeps"
            ):
                local.close()
    for change in FOLLOWED.values():
        model, optimizer = half_trained()
        local = attach_local(model, optimizer, steps=2)
        optimizer.step()
        two_steps(change, model, optimizer)
        own = model[1].running_mean.clone()
        model[1].running_mean.add_(1)
        with local.outer():
            assert torch.equal(model[1].running_mean, own)  # what was exchanged
        local.close()


def test_a_change_that_would_not_be_exchanged_is_refused_before_the_next_update(tmp_path: Path) -> None:
    run_ranks(change_later, 1, tmp_path)


def change_weights(_: int) -> None:
    model, optimizer = half_trained()
    local = attach_local(model, optimizer, steps=1)
    optimizer.step()
    optimizer.step()
    model.load_state_dict({name: 0 * value + 7 for name, value in model.state_dict().items()})
    with pytest.warns(UserWarning, match="weights were changed after the last step that attach_local counted"):
        local.close()
    assert not bool((model[0].weight == 7).any())


def test_closing_says_that_weights_which_were_changed_by_hand_are_lost(tmp_path: Path) -> None:
    run_ranks(change_weights, 1, tmp_path)


class Wrapper(torch.optim.Optimizer):
    """An optimizer that makes the steps of another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class WithoutHooks(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def take_turns(rank: int) -> list[torch.Tensor]:
    """Return the weights after two phases, each with an optimizer and a hook of its own."""
    model = network(rank)
    seen = []
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), Wrapper(torch.optim.AdamW(model.parameters()))):
        local = attach_local(model, optimizer, steps=2)
        for step in range(3):
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        own, buffers = flat(model), model[1].running_mean.clone()
        with local.outer():
            with local.outer():
                outer = flat(model)
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
        seen.append(outer)
    with pytest.raises(ValueError, match="of WithoutHooks does not call the hooks of"):
        attach_local(model, WithoutHooks(optimizer), steps=2)
    first = attach_local(model, optimizer, steps=2)
    second = attach_local(model, optimizer, steps=2)
    with pytest.raises(RuntimeError, match="local steps are closed"), first.outer():
        pass
    second.close()
    return seen


def test_the_outer_copy_is_held_until_the_outermost_block_ends_and_never_trained(tmp_path: Path) -> None:
    one, two = run_ranks(take_turns, 2, tmp_path)
    assert all(map(torch.equal, one, two))
