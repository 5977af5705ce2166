"""Every compressor, and every collective, trains a small transformer: embeddings, attention, norms, tied weights."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from bench.core import registry
from collectives.options import incompatibility
from compressors.layer import layers_of
from gradwire.exchange.reducer import reducer_for
from tests.testing.compressor_cases import NAMES, Case, case, on_ranks, reduce_once, step_at
from tests.testing.small_transformer import SmallTransformer, loss_of
from tests.testing.thinned import every_second

RANKS, STEPS, LR, MOMENTUM = 2, 20, 0.3, 0.9
COLLECTIVES = list(registry.entries("collectives"))
# By default, these two send layers as small as those of this model in fp32.
CASES = [case(name, min_numel=100) if name in ("algc", "hylo") else case(name) for name in NAMES]


def fits(each: Case, collective: str) -> bool:
    return incompatibility(each.make().check_compatible, registry.load("collectives", collective)()) is None


def pairs() -> list[tuple[Case, str]]:
    """Return every compressor with `ring`, or else `allgather`, and every collective with three kinds of payload."""
    found = [(each, "ring" if fits(each, "ring") else "allgather") for each in CASES]
    few = [each for each in CASES if each.name in ("bf16", "topk", "row_sparse")]
    return found + [(each, name) for each in few for name in COLLECTIVES if name != "ring" and fits(each, name)]


@functools.cache
def untrained() -> SmallTransformer:
    torch.manual_seed(0)
    return SmallTransformer()


def trained(each: Case, collective: str) -> list[SmallTransformer]:
    """Return the model of every rank after all steps."""
    compressor = each.make()
    owns_momentum = compressor.traits.owns_momentum
    lr = LR * (1 - MOMENTUM) if owns_momentum else LR
    start = untrained()

    def rank_of(transport, bound):
        model = copy.deepcopy(start)
        layers, parameters = layers_of(model), list(model.parameters())
        reducer = reducer_for(compressor, momentum=MOMENTUM if owns_momentum else 0.0)
        for index in range(STEPS):
            gradients = torch.autograd.grad(loss_of(model, index, transport.rank), parameters)
            flat = [gradient.flatten() for gradient in gradients]
            updates, _ = reduce_once(reducer, bound, layers, flat, step_at(index, transport.rank, RANKS))
            with torch.no_grad():
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.sub_(update.view_as(parameter), alpha=lr)
        return model

    return on_ranks(RANKS, collective, rank_of)


@pytest.mark.parametrize(("each", "collective"), every_second(pairs()), ids=str)
def test_ranks_stay_in_sync_and_the_loss_falls(each: Case, collective: str) -> None:
    first, *others = trained(each, collective)
    for other in others:
        assert all(map(torch.equal, first.parameters(), other.parameters()))
    unseen = STEPS + 1
    with torch.no_grad():
        assert float(loss_of(first, unseen, 0)) < 0.9 * float(loss_of(untrained(), unseen, 0))


def test_every_kind_of_layer_is_in_the_model() -> None:
    kinds = {layer.name: layer.kind for layer in layers_of(untrained())}
    assert set(kinds.values()) == {"embedding", "attention", "linear", "norm", "bias"}
    assert kinds["tokens.weight"] == "embedding"
    assert "head.weight" not in kinds
