"""The parameters at the server: the weight of one of several workers' pushes, and layers without a push."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.core import spec
from bench.extensions.async_server.server import ClockEnd, Push
from bench.extensions.async_server.strategy import ServerParameters
from collectives.payloads import Dense
from collectives.payloads.base import Payload, unpack
from compressors.layer import layers_of

LR = 0.4


def parameters_of(
    model: nn.Module, optimizer: str, world_size: int, compressor: str = "none", clip_norm: float | None = None
) -> ServerParameters:
    return ServerParameters(
        layers_of(model),
        spec.build("compressors", compressor),
        spec.build("optimizers", optimizer),
        lr=1.0,
        world_size=world_size,
        seed=1,
        clip_norm=clip_norm,
    )


def push(rank: int, payloads: dict[int, Payload]) -> Push:
    return Push(rank=rank, payloads=payloads, clock_end=ClockEnd(index=0, epoch=0, lr=LR))


def values(parameters: ServerParameters) -> list[torch.Tensor]:
    return [unpack(packed).to_dense() for packed in parameters.packed()]


def pair() -> nn.ModuleList:
    """Return two layers of three elements, all ones."""
    return nn.ModuleList([nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)]).apply(
        lambda module: nn.init.ones_(module.weight) if isinstance(module, nn.Linear) else None
    )


def test_all_pushes_of_a_clock_make_one_step_with_their_mean() -> None:
    parameters = parameters_of(pair(), "sgd:momentum=0", world_size=2)
    parameters.apply(
        [push(rank, {0: Dense(torch.full((3,), g)), 1: Dense(torch.zeros(3))}) for rank, g in [(0, 1.0), (1, 2.0)]], 2
    )
    torch.testing.assert_close(values(parameters)[0], torch.full((3,), 1 - LR * 1.5))


@pytest.mark.parametrize("optimizer", ["sgd:momentum=0", "adam"])
def test_a_push_alone_is_the_nth_part_of_a_step(optimizer: str) -> None:
    alone, among_four = (parameters_of(pair(), optimizer, world_size) for world_size in (1, 4))
    for parameters in (alone, among_four):
        parameters.apply([push(0, {0: Dense(torch.full((3,), 2.0)), 1: Dense(torch.ones(3))})], 1)
    for whole, part in zip(values(alone), values(among_four), strict=True):
        torch.testing.assert_close(1 - part, (1 - whole) / 4)  # also adam, which ignores a gradient's scale


def test_a_layer_that_nobody_pushed_stays_as_it_is() -> None:
    parameters = parameters_of(pair(), "sgd:weight_decay=0.5", world_size=2)
    for _ in range(2):
        parameters.apply([push(1, {0: Dense(torch.ones(3))})], 1)
    pushed, left = values(parameters)
    assert left.tolist() == [1.0] * 3
    assert (pushed < 1).all()


def test_a_vote_is_counted_at_the_server() -> None:
    compressor = spec.build("compressors", "sign:mode=vote,error_feedback=false")
    parameters = parameters_of(pair(), "sgd:momentum=0", 3, "sign:mode=vote,error_feedback=false")
    layer = layers_of(pair())[0]
    votes = [torch.tensor([1.0, -5.0, 3.0]), torch.tensor([2.0, 4.0, -1.0]), torch.tensor([0.5, -1.0, -2.0])]
    parameters.apply([push(rank, {0: compressor.encode(x, layer, None)}) for rank, x in enumerate(votes)], 3)  # type: ignore[attr-defined]
    torch.testing.assert_close(values(parameters)[0], 1 - LR * torch.tensor([1.0, -1.0, -1.0]))


def test_the_model_itself_is_not_touched() -> None:
    model = pair()
    parameters = parameters_of(model, "sgd", world_size=1)
    parameters.apply([push(0, {0: Dense(torch.ones(3)), 1: Dense(torch.ones(3))})], 1)
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())


def test_the_gradient_of_an_update_is_clipped_to_a_norm_over_all_layers() -> None:
    parameters = parameters_of(pair(), "sgd:momentum=0", world_size=2, clip_norm=1.0)
    gradients = [(0, 3.0, 0.0), (1, 5.0, 6.0)]  # their mean is 4 and 3: the norm is 5 sqrt(3)
    parameters.apply(
        [push(rank, {0: Dense(torch.full((3,), a)), 1: Dense(torch.full((3,), b))}) for rank, a, b in gradients], 2
    )
    scale = 1 / (5 * 3**0.5)
    first, second = values(parameters)
    torch.testing.assert_close(first, torch.full((3,), 1 - LR * 4 * scale))
    torch.testing.assert_close(second, torch.full((3,), 1 - LR * 3 * scale))
