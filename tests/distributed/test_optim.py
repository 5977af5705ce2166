"""`gradwire.optim` in scripts without `bench`: what the constructors take, equal ranks, resumed and skipped steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives.options import OptionError
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.optim import KFAC, AdaBelief, DeMo, Dion, MaxAdaBelief, Muon, OneBitAdam, ZeroOneAdam
from gradwire.optim.base import BoundOptimizer
from tests.testing.ranks import run_ranks

Make = Callable[[nn.Module], BoundOptimizer]

# Those that exchange what they need themselves, and those that need averaged gradients.
OWN_GRADIENTS: dict[str, Make] = {
    "dion": lambda model: Dion(model, lr=0.01, collective="ring"),
    "dion_bf16": lambda model: Dion(model, lr=0.01, compressor="bf16"),
    "demo": lambda model: DeMo(model, lr=0.01, k=4),
    "onebit_adam": lambda model: OneBitAdam(model, lr=0.01, warmup_steps=2),
    "zero_one_adam": lambda model: ZeroOneAdam(
        model, lr=0.01, var_freeze_step=3, local_step_scaler=1, local_step_clipper=2
    ),
    "max_adabelief": lambda model: MaxAdaBelief(model, lr=0.01, compressor="topk:ratio=0.5", collective="allgather"),
    "kfac": lambda model: KFAC(model, MaxAdaBelief(model, lr=0.01), collective="ring", update_every=2),
}
MEAN_GRADIENTS: dict[str, Make] = {
    "muon": lambda model: Muon(model, lr=0.01),
    "muon_shard": lambda model: Muon(model, lr=0.01, shard=True),
    "adabelief": lambda model: AdaBelief(model, lr=0.01),
    "kfac_sgd": lambda model: KFAC(model, torch.optim.SGD(model.parameters(), lr=0.01), update_every=2),
}
ALL = OWN_GRADIENTS | MEAN_GRADIENTS


def network(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 3))


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, y = torch.randn(16, 8, generator=generator), torch.randint(3, (16,), generator=generator)
    nn.functional.cross_entropy(model(x), y).backward()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(model: nn.Module, optimizer: BoundOptimizer, rank: int, steps: range, bad: int | None = None) -> torch.Tensor:
    """Train, and return the parameters that ranks share; in step `bad` rank 1 has a gradient that is not finite."""
    for step in steps:
        backward(model, rank, step)
        if step == bad and rank == 1:
            next(model.parameters()).grad[0] = torch.nan  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.show_shared()
    found = weights(model)
    optimizer.show_own()
    return found


def trained(rank: int) -> dict[str, list[torch.Tensor]]:
    """Return, for each optimizer, the weights after a whole, a resumed and a run with a skipped step."""
    torch.set_num_threads(1)
    found = {}
    for name, make in ALL.items():
        own = network(1 + rank) if name in OWN_GRADIENTS else DistributedDataParallel(network())
        optimizer = make(own)
        train(own, optimizer, rank, range(4))
        saved = copy.deepcopy([own.state_dict(), optimizer.state_dict()])
        whole = train(own, optimizer, rank, range(4, 7))
        if name == "max_adabelief":  # what topk has not sent waits
            assert sum(cast(CompressedCommunicator, optimizer.communicator).residual_norms().values()) > 0
        optimizer.close()
        again = network(5) if name in OWN_GRADIENTS else DistributedDataParallel(network(5))
        optimizer = make(again)
        again.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        resumed = train(again, optimizer, rank, range(4, 7))
        optimizer.close()
        found[name] = [whole, resumed]
        if name in OWN_GRADIENTS:
            last = network()
            optimizer = make(last)
            before = train(last, optimizer, rank, range(4))
            found[name] += [before, train(last, optimizer, rank, range(4, 5), bad=4)]
            found[name].append(train(last, optimizer, rank, range(5, 7)))
            optimizer.close()
    return found


def test_ranks_agree_resume_and_skip_together(tmp_path: Path) -> None:
    first, second = run_ranks(trained, 2, tmp_path)
    for name, found in first.items():
        for one, two in zip(found, second[name], strict=True):
            assert torch.equal(one, two), name
        whole, resumed, *of_skipped = found
        assert torch.equal(whole, resumed), name
        assert not torch.equal(whole, weights(network())), name
        if of_skipped:
            before, skipped, after = of_skipped
            assert torch.equal(before, skipped), name
            assert after.isfinite().all(), name
            assert not torch.equal(skipped, after), name


def in_groups(rank: int) -> torch.Tensor:
    """Return the weights of one of two pairs of ranks that train apart, and what DDP says to Dion."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    model = network(1 + rank)
    optimizer = Dion(model, group=pairs[rank // 2])
    found = train(model, optimizer, rank, range(3))
    optimizer.close()
    return found


def test_a_group_of_ranks_trains_apart(tmp_path: Path) -> None:
    first, second, third, fourth = run_ranks(in_groups, 4, tmp_path)
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not torch.equal(first, third)


@pytest.mark.parametrize("name", ALL)
def test_a_single_process_trains_without_a_process_group(name: str) -> None:
    model = network()
    before, optimizer = weights(model), ALL[name](model)
    after = train(model, optimizer, 0, range(8))
    optimizer.close()
    assert after.isfinite().all()
    assert not torch.equal(after, before)


@pytest.mark.parametrize("cls", [Muon, Dion, DeMo, OneBitAdam, ZeroOneAdam, MaxAdaBelief, AdaBelief])
def test_parameters_with_or_without_names_do_as_well(cls: Any) -> None:
    found = []
    for given in (nn.Module.parameters, nn.Module.named_parameters):
        model = network()
        found.append(train(model, cls(given(model)), 0, range(3)))
    assert torch.equal(*found)


def test_without_the_model_the_output_layer_is_a_hidden_matrix() -> None:
    model = network()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_model, of_parameters = (
        [names[id(parameter)] for parameter in optimizer.param_groups[0]["params"]]
        for optimizer in (Muon(model), Muon(model.parameters()))
    )
    assert of_model == ["0.weight", "2.weight"]
    assert of_parameters == ["0.weight", "2.weight", "4.weight"]


def test_a_closure_is_called_and_a_schedule_followed() -> None:
    model = network()
    optimizer = Dion(model, lr=1.0, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)

    def closure() -> float:
        backward(model, 0, 0)
        return 3.0

    before = weights(model)
    assert optimizer.step(closure) == 3.0
    assert torch.equal(weights(model), before)
    assert schedule.get_last_lr() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda model: Dion(model, rank_fracton=0.1), OptionError, "did you mean 'rank_fraction'"),
        (lambda model: Dion(model, rank_fraction=2), OptionError, "dion: rank_fraction=2 is not possible"),
        (lambda model: Dion(model, compressor="topk"), OptionError, "which topk does not encode; use compressor none"),
        (lambda model: Dion(nn.Linear(2, 2)), OptionError, "dion updates hidden matrices, and this model has none"),
        (lambda model: DeMo(model, collective="ring"), OptionError, "it needs all messages; use collective allgather"),
        (lambda model: OneBitAdam(model, collective="rink"), OptionError, "did you mean 'ring'"),
        (lambda model: Muon([{"params": model.parameters()}]), ValueError, "groups of parameters with options of"),
        (lambda model: KFAC(model, DeMo(model)), ValueError, "K-FAC does not precondition for DeMo"),
        (lambda model: KFAC(model, Muon(model), transfer="cholesky"), OptionError, "add collective=ring to it"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(make: Make, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make(network())


def wrapped(rank: int) -> None:
    ddp = DistributedDataParallel(network())
    with pytest.raises(ValueError, match="Dion takes each rank's own gradients, and DDP averages them; give it the"):
        Dion(ddp)
    for compressor in ("dgc", "torch_fp16"):
        with pytest.raises(ValueError, match=rf"^{compressor} .* which only gradwire\.attach offers"):
            MaxAdaBelief(ddp.module, compressor=compressor, collective="allgather")


def test_ddp_and_components_that_need_it_are_refused(tmp_path: Path) -> None:
    run_ranks(wrapped, 2, tmp_path)
