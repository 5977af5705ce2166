"""All optimizers in a script without `bench`, in a single process: shared behaviour, and refused arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from collectives.options import OptionError
from gradwire.optim import KFAC, AdaBelief, DeMo, Dion, MaxAdaBelief, Muon, OneBitAdam, ZeroOneAdam
from tests.testing.ddp_scenes import weights
from tests.testing.optimizers import ALL, Make, backward, network, train


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
        (
            lambda model: DeMo(model, collective="ring"),
            OptionError,
            "ring adds them; use collective allgather",
        ),
        (lambda model: OneBitAdam(model, collective="rink"), OptionError, "did you mean 'ring'"),
        (lambda model: Muon([{"params": model.parameters()}]), ValueError, "groups of parameters with options of"),
        (lambda model: KFAC(model, DeMo(model)), ValueError, "K-FAC does not precondition for DeMo"),
        (lambda model: KFAC(model, Muon(model), transfer="cholesky"), OptionError, "; use collective=ring"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(make: Make, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make(network())
