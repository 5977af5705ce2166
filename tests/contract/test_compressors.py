"""The contract of compressors, checked for each of them under several options."""

from __future__ import annotations

import ast
import importlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.core import registry
from bench.launch.layer_plan import expected_bucket_nbytes, planned_layers
from collectives.options import incompatibility, options_of
from collectives.payloads.base import Dense
from compressors.base import Compressor
from gradwire.exchange.reducer import Reducer, reducer_for
from gradwire.exchange.report import Bucket
from tests.testing.compressor_cases import (
    CASES,
    LAYERS,
    NAMES,
    Case,
    alone,
    class_of,
    gradient,
    layers_of_shapes,
    on_ranks,
    reduce_once,
    step_at,
)
from tests.testing.thinned import every_second


def cases_where(holds: Callable[[Case], bool]) -> pytest.MarkDecorator:
    """Return a mark that runs a test for every case for which this holds; others are not collected."""
    return pytest.mark.parametrize("case", [case for case in CASES if holds(case)], ids=str)


def pairs_of(cases: Sequence[Case], collectives: Sequence[str]) -> list[tuple[Case, str]]:
    """Return the compatible pairs."""
    return [
        (case, collective)
        for collective in collectives
        for case in cases
        if incompatibility(case.make().check_compatible, registry.load("collectives", collective)()) is None
    ]


def deterministic(compressor: Compressor) -> bool:
    """Return whether `encode` draws no random numbers that depend on the rank."""
    randomised = {"qsgd", "natural", "terngrad", "dgc"}
    options = compressor.option_texts()
    return not (
        compressor.component_name in randomised
        or options.get("rounding") == "stochastic"
        or options.get("importance") == "random"
    )


# Under a constant gradient, what these deliver is far from the gradient, for a known reason.
NOT_FAITHFUL = {
    "twobit": "a threshold in units of the gradient fits one scale only",
    "sign,mode=vote,error_feedback=False": "a vote forgets magnitudes",
    "topk,error_feedback=False": "drops what it does not send",
    "group_topk,values=two_magnitudes,group_size=100,ratio=0.03,error_feedback=False": "drops what it does not send",
    "group_topk,preset=patent": "drops what it does not send",
    "group_topk,values=sigma,min_numel=100": "one range for a bucket starves its small layers",
    "powersgd,rank=4,warm_start=False,error_feedback=False": "drops what it does not send",
    "dgc,ratio=0.01,clip_norm=1.0,sample_ratio=0.1": "clips the gradient",
}

each_case = cases_where(lambda case: True)
each_that_is_faithful = cases_where(lambda case: str(case) not in NOT_FAITHFUL)
each_that_conserves = cases_where(
    lambda case: case.make().traits.keeps_residual and not case.make().traits.owns_momentum
)

# Selection sends values unchanged and keeps the rest; rounding to 16 bits leaves a difference that fp32 can represent.
# Both conserve bit for bit.
EXACT = {"topk", "group_topk", "randomk", "threshold", "fp16", "bf16", "dgc", "adaptive_topk", "algc"}


def gradients_at(step: int, rank: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [gradient(layer, step, rank, dtype=dtype) for layer in LAYERS]


def residuals(reducer: Reducer) -> dict[int, torch.Tensor]:
    kept: dict[int, torch.Tensor] = reducer.state_dict()["residuals"]
    return kept


@each_that_conserves
def test_what_is_sent_and_what_is_kept_make_the_compensated_gradient(case: Case) -> None:
    """60 steps are enough for every compressor to update its thresholds, ages and factors several times."""
    reducer, collective = case.reducer(), alone()
    before = {layer.id: torch.zeros(layer.numel) for layer in LAYERS}
    for index in range(60):
        gradients = gradients_at(index)
        updates, _ = reduce_once(reducer, collective, LAYERS, gradients, step_at(index))
        after = {layer.id: torch.zeros(layer.numel) for layer in LAYERS} | residuals(reducer)
        for layer, g, sent in zip(LAYERS, gradients, updates, strict=True):
            x, total = g + before[layer.id], sent + after[layer.id]
            if case.name in EXACT and "values" not in dict(case.options):
                assert torch.equal(total, x)
            else:
                torch.testing.assert_close(total, x, rtol=1e-6, atol=1e-6 * float(x.abs().max()))
        before = {layer_id: residual.clone() for layer_id, residual in after.items()}


@pytest.mark.parametrize(
    "name", [name for name in NAMES if {"ratio", "value_dtype"} <= set(class_of(name).option_names())]
)
def test_a_ratio_of_1_sends_every_bit(name: str) -> None:
    reducer = reducer_for(class_of(name)(ratio=1.0, value_dtype="fp32"))  # type: ignore[call-arg]
    for index in range(3):
        gradients = gradients_at(index)
        updates, _ = reduce_once(reducer, alone(), LAYERS, gradients, step_at(index))
        assert all(torch.equal(update, g) for update, g in zip(updates, gradients, strict=True))
    assert all(norm == 0 for norm in reducer.residual_norms().values())


@cases_where(lambda case: case.make().option_texts().get("mode") != "vote")  # a vote cannot express zero
def test_zeros_send_zeros_and_keep_nothing(case: Case) -> None:
    reducer = case.reducer()
    gradients = [torch.zeros(layer.numel) for layer in LAYERS]
    updates, bucket = reduce_once(reducer, alone(), LAYERS, gradients, step_at(0))
    assert all(not update.any() for update in updates)
    assert all(norm == 0 for norm in reducer.residual_norms().values())
    assert len(bucket.encoded) == len(LAYERS)


@each_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_gradients_of_other_types_keep_their_type(case: Case, dtype: torch.dtype) -> None:
    reducer, reference = case.reducer(), case.reducer()
    gradients = gradients_at(0, dtype=dtype)
    updates, _ = reduce_once(reducer, alone(), LAYERS, gradients, step_at(0))
    expected, _ = reduce_once(reference, alone(), LAYERS, [g.float() for g in gradients], step_at(0))
    for update, wanted in zip(updates, expected, strict=True):
        assert update.dtype == dtype
        torch.testing.assert_close(update, wanted.to(dtype))


@each_case
def test_tiny_and_empty_layers(case: Case) -> None:
    for shapes in ([(1,)], [(0,), (3,)], [(0,)], [(1, 1), ()]):
        layers = layers_of_shapes(*shapes)
        reducer = case.reducer()
        for index in range(2):
            gradients = [gradient(layer, index, 0) for layer in layers]
            updates, bucket = reduce_once(reducer, alone(), layers, gradients, step_at(index))
            assert all(bool(torch.isfinite(update).all()) for update in updates)
            assert {encoded.layer.id for encoded in bucket.encoded} == {layer.id for layer in layers if layer.numel}


@each_that_is_faithful
def test_equal_entries_are_sent_in_the_end(case: Case) -> None:
    """A flat gradient has no largest entry: rank-based rules must break ties, and thresholds must not wait for ever."""
    reducer, layers = dense_enough(case), layers_of_shapes((30, 20))
    total = torch.zeros(600, dtype=torch.float64)
    for index in range(150):
        (update,), _ = reduce_once(reducer, alone(), layers, [torch.full((600,), 0.1)], step_at(index))
        total += update
    assert float(total.mean()) / 150 / 0.1 == pytest.approx(1.0, abs=0.55)


@pytest.mark.parametrize("case", every_second(case for case in CASES if str(case) not in NOT_FAITHFUL), ids=str)
def test_layers_of_one_shape_and_unlike_scales_all_arrive(case: Case) -> None:
    """Normalising a batch of layers together would starve the small ones."""
    layers, scales = layers_of_shapes((64, 50), (64, 50), (64, 50)), (1.0, 10.0, 1000.0)
    reducer, collective = dense_enough(case), alone()
    constant = [gradient(layer, 0, 0, scale=scale) for layer, scale in zip(layers, scales, strict=True)]
    totals = [torch.zeros(layer.numel, dtype=torch.float64) for layer in layers]
    num_steps = 300
    for index in range(num_steps):
        updates, _ = reduce_once(reducer, collective, layers, constant, step_at(index))
        for total, update in zip(totals, updates, strict=True):
            total += update
    for total, wanted in zip(totals, constant, strict=True):
        mean = total / num_steps
        assert float((mean - wanted).norm() / wanted.norm()) < 0.8


@each_case
def test_a_saved_state_goes_on_bit_for_bit_and_in_other_buckets(case: Case) -> None:
    whole, resumed = (reducer_for(case.make(), momentum=0.9) for _ in range(2))
    collective = alone()
    for index in range(3):
        reduce_once(whole, collective, LAYERS, gradients_at(index), step_at(index))
    resumed.load_state_dict(whole.state_dict())
    state, loaded = flat_state(whole), flat_state(resumed)
    assert state.keys() == loaded.keys()
    assert all(torch.equal(state[name], loaded[name]) for name in state)
    gradients = gradients_at(3)
    expected, _ = reduce_once(whole, collective, LAYERS, gradients, step_at(3))
    updates, _ = reduce_once(resumed, collective, LAYERS, gradients, step_at(3))
    assert all(torch.equal(a, b) for a, b in zip(expected, updates, strict=True))
    for part in (slice(0, 2), slice(2, 7)):  # DDP forms new buckets after the first step
        reduce_once(resumed, collective, LAYERS[part], gradients_at(4)[part], step_at(4))
    assert {layer.id for layer in LAYERS} >= residuals(resumed).keys() == residuals(whole).keys()


@each_case
def test_a_dropped_step_leaves_no_trace(case: Case) -> None:
    reducer, undisturbed = (reducer_for(case.make(), momentum=0.9) for _ in range(2))
    collective = alone()
    for index in range(2):
        for each in (reducer, undisturbed):
            reduce_once(each, collective, LAYERS, gradients_at(index), step_at(index))
    reduce_once(reducer, collective, LAYERS, gradients_at(50), step_at(2), commit=False)
    reducer.drop()
    state, expected = flat_state(reducer), flat_state(undisturbed)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    updates = [reduce_once(each, collective, LAYERS, gradients_at(2), step_at(2))[0] for each in (reducer, undisturbed)]
    assert all(torch.equal(a, b) for a, b in zip(*updates, strict=True))


@cases_where(lambda case: not case.make().traits.needs_all_ranks)
def test_the_input_stays_and_the_payload_owns_its_memory(case: Case) -> None:
    compressor = case.make()
    layer = LAYERS[3]
    x = gradient(layer, 0, 0)
    original = x.clone()
    payload = compressor.encode(x, layer, step_at(0))
    assert torch.equal(x, original)
    before = payload.to_dense()
    x.fill_(12345.0)
    assert torch.equal(payload.to_dense(), before)
    assert payload.nbytes == payload.pack().numel()


@each_case
def test_gradients_that_lie_elsewhere_than_their_updates_stay_and_give_the_same(case: Case) -> None:
    reducer, apart, one = case.reducer(), case.reducer(), alone()
    for index in range(3):
        gradients = gradients_at(index)
        expected, _ = reduce_once(reducer, one, LAYERS[::-1], gradients[::-1], step_at(index))
        given, updates = [g.clone() for g in gradients], [torch.full_like(g, 7) for g in gradients]
        bucket = Bucket(layers=LAYERS, gradients=list(given), updates=updates, step=step_at(index))
        apart.reduce(bucket, one.sum, one.transport)
        apart.commit()
        assert all(map(torch.equal, given, gradients))
        assert all(map(torch.equal, updates[::-1], expected))


@each_case
def test_global_random_generators_are_not_touched(case: Case) -> None:
    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    reducer = case.reducer()
    for index in range(2):
        reduce_once(reducer, alone(), LAYERS, gradients_at(index), step_at(index))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


OFTEN = ["allgather", "ring", "native"]
RARELY = sorted(registry.entries("collectives").keys() - set(OFTEN))


@pytest.mark.parametrize(
    ("case", "collective"),
    every_second([*pairs_of(CASES, OFTEN), *pairs_of([Case(name) for name in NAMES], RARELY)]),
    ids=str,
)
def test_all_ranks_get_the_same_bits(case: Case, collective: str) -> None:
    def rank_of(transport, bound):
        reducer = case.reducer()
        updates = []
        for index in range(2):
            gradients = gradients_at(index, transport.rank)
            update, _ = reduce_once(
                reducer, bound, LAYERS, gradients, step_at(index, transport.rank, transport.world_size)
            )
            updates.append(torch.cat(update))
        return torch.cat(updates)

    results = on_ranks(3, collective, rank_of)
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert bool(torch.isfinite(results[0]).all())
    assert results[0].any()


@cases_where(lambda case: deterministic(case.make()))
def test_the_mean_over_ranks_is_what_arrives(case: Case) -> None:
    """The mean is taken exactly once: ranks with the same gradient get the same update as a single rank."""
    expected, _ = reduce_once(case.reducer(), alone(), LAYERS, gradients_at(0), step_at(0))

    def rank_of(transport, bound):
        return reduce_once(case.reducer(), bound, LAYERS, gradients_at(0), step_at(0, transport.rank, 2))[0]

    for updates in on_ranks(2, "allgather", rank_of):
        for update, wanted in zip(updates, expected, strict=True):
            torch.testing.assert_close(update, wanted, rtol=1e-5, atol=1e-5)


@cases_where(lambda case: expected_bucket_nbytes(case.make(), LAYERS) is not None)
def test_the_bytes_that_travel_are_those_of_the_formula(case: Case) -> None:
    compressor = case.make()
    expected = expected_bucket_nbytes(compressor, LAYERS)
    steps = 3  # after dense_steps

    def rank_of(transport, bound):
        own = case.reducer()
        for index in range(steps):
            before = transport.traffic["gradient"].nbytes
            reduce_once(own, bound, LAYERS, gradients_at(index, transport.rank), step_at(index, transport.rank, 2))
        return transport.traffic["gradient"].nbytes - before

    gathers = incompatibility(compressor.check_compatible, registry.load("collectives", "allgather")()) is None
    collective = "allgather" if gathers else "native"
    assert on_ranks(2, collective, rank_of) == [expected, expected]


@each_case
def test_sent_is_accounted_for_every_layer(case: Case) -> None:
    compressor = case.make()
    _, bucket = reduce_once(reducer_for(compressor), alone(), LAYERS, gradients_at(0), step_at(9))
    assert sorted(encoded.layer.id for encoded in bucket.encoded) == [layer.id for layer in LAYERS]
    assert all(encoded.seconds >= 0 and 0 <= encoded.num_entries <= encoded.layer.numel for encoded in bucket.encoded)
    assert bucket.encode_s > 0
    emitted = {kind.__name__ for kind in compressor.traits.emits}
    assert {encoded.payload for encoded in bucket.encoded} <= emitted
    for encoded in bucket.encoded:
        if encoded.density_wanted is not None:
            assert 0 < encoded.density_wanted <= 1
            assert compressor.granularity == "layer"
            assert encoded.payload in ("Sparse", "SparseCodes", "SparseLevels", "Seeded")
    expected = expected_bucket_nbytes(compressor, LAYERS)
    if expected is not None:
        overhead = 16 + 8 * (2 + len(LAYERS)) + 8 * len(LAYERS)  # overhead of a bundle
        assert expected - overhead <= sum(encoded.nbytes for encoded in bucket.encoded) <= expected + 1e-6


@each_case
def test_the_plan_names_every_layer(case: Case) -> None:
    compressor = case.make()
    rows = planned_layers(compressor, LAYERS)
    assert [row.name for row in rows] == [layer.name for layer in LAYERS]
    assert {row.payload for row in rows} <= {kind.__name__ for kind in compressor.traits.emits}
    assert all(row.dense_nbytes == 4 * layer.numel for row, layer in zip(rows, LAYERS, strict=True))
    for row, layer in zip(rows, LAYERS, strict=True):
        if compressor.leaves_dense(layer):
            assert (row.payload, row.sent_nbytes) == ("Dense", 16 + 4 * layer.numel)


@pytest.mark.parametrize("name", [name for name in NAMES if "skip" in class_of(name).option_names()])
def test_policy_leaves_chosen_layers_alone(name: str) -> None:
    compressor = class_of(name)(skip=("norm", "bias"), dense_ends=True, min_numel=0)  # type: ignore[call-arg]
    gradients = gradients_at(0)
    reducer = reducer_for(compressor)
    updates, _ = reduce_once(reducer, alone(), LAYERS, gradients, step_at(0))
    for layer, update, g in zip(LAYERS, updates, gradients, strict=True):
        if layer.kind in ("norm", "bias") or layer.position in (0.0, 1.0):
            assert torch.equal(update, g)
            assert layer.id not in reducer.residual_norms()
    assert Dense in compressor.traits.emits


@pytest.mark.parametrize("name", list(registry.entries("compressors")))
def test_every_compressor_says_what_it_is_and_what_it_sends(name: str) -> None:
    cls = class_of(name)
    module = ast.get_docstring(ast.parse(Path(str(importlib.import_module(cls.__module__).__file__)).read_text()))
    assert module
    assert len(module.splitlines()[0]) <= 120
    if name not in ("none", "fp16", "bf16"):
        assert "Source:" in f"{module}\n{cls.__doc__}"
    assert "Bytes:" in (cls.__doc__ or "")
    for option in options_of(cls):
        assert option.meaning, f"{name}: {option.name} has no meaning"


def test_buckets_without_elements_send_nothing() -> None:
    bucket = Bucket(layers=layers_of_shapes((0,)), gradients=[torch.empty(0)], step=step_at(0))
    one = alone()
    reducer_for(class_of("topk")()).reduce(bucket, one.sum, one.transport)  # type: ignore[call-arg]
    assert bucket.encoded == []


def dense_enough(case: Case) -> Reducer:
    """Return a reducer with a ratio that reaches every element within a few hundred steps."""
    return case.reducer(**({"ratio": 0.1} if "ratio" in class_of(case.name).option_names() else {}))


def flat_state(reducer: Reducer) -> dict[str, torch.Tensor]:
    state = reducer.state_dict()
    named = {**state.pop("memory"), **state}
    return {f"{name}/{layer_id}": tensor for name, tensors in named.items() for layer_id, tensor in tensors.items()}


@each_case
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_what_torch_makes_by_default_changes_nothing(case: Case, default: torch.dtype) -> None:
    given = [gradients_at(index) for index in range(3)]

    def three_steps() -> list[torch.Tensor]:
        reducer, collective = case.reducer(), alone()
        for index, gradients in enumerate(given):
            mine = [gradient.clone() for gradient in gradients]
            updates, _ = reduce_once(reducer, collective, LAYERS, mine, step_at(index))
        return [*updates, *residuals(reducer).values()]

    wanted = three_steps()
    torch.set_default_dtype(default)
    try:
        found = three_steps()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, wanted))
    assert {tensor.dtype for tensor in found} == {torch.float32}
