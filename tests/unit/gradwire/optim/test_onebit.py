"""1-bit Adam and 0/1 Adam: means with one bit per element, both phases of each, and the bytes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch

from bench.optimizers.base import Optimizer
from bench.optimizers.gradwire_optimizers import UseOneBitAdam, UseZeroOneAdam
from collectives.payloads import Bundle, Codes
from gradwire.optim.onebit import OneBitAdam, OneBitAdamOptions, OneBitOptimizer
from gradwire.optim.zero_one import ZeroOneAdamOptions
from tests.testing.belief_ranks import LR, Network, Rank, Tensors, noisy
from tests.testing.memory_transport import MemoryTransport, run_threads

NUMELS = (70, 33, 1)
# Where the 104 elements are cut for 3 ranks: at the whole bytes of a layer that are nearest to 35 and 70.
CUTS = (0, 32, 70, 104)


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def gradient(rank: int, step: int) -> torch.Tensor:
    """Return the gradients of `noisy`, as they reach the optimizer."""
    return flat(noisy(rank, step)).float()


class PlainMean:
    """The two stages among `num_ranks` ranks, in one process."""

    def __init__(self, num_ranks: int, scale: str = "l1") -> None:
        self.residuals = [torch.zeros(sum(NUMELS)) for _ in range(num_ranks)]
        self.owner_residual = torch.zeros(sum(NUMELS))
        self.scale = scale

    def __call__(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        sums = [x + residual for x, residual in zip(xs, self.residuals, strict=True)]
        layers = [0, *itertools.accumulate(NUMELS)]
        sent = [self.signs(y, layers) for y in sums]
        self.residuals = [y - s for y, s in zip(sums, sent, strict=True)]
        means = torch.stack(sent).mean(0) + self.owner_residual
        answer = self.signs(means, sorted({*layers, *CUTS}))
        self.owner_residual = means - answer
        return answer

    def signs(self, y: torch.Tensor, borders: Sequence[int]) -> torch.Tensor:
        parts = [y[start:stop] for start, stop in itertools.pairwise(borders)]
        scales = [part.abs().mean() if self.scale == "l1" else part.square().mean().sqrt() for part in parts]
        return torch.cat([a * torch.where(part >= 0, 1.0, -1.0) for a, part in zip(scales, parts, strict=True)])


Mean = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def exact(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(xs)).mean(0)


def plain_onebit_adam(options: OneBitAdamOptions, mean_of: Mean, num_ranks: int) -> Iterator[torch.Tensor]:
    """Yield the weights after each step of the published method, without bias correction."""
    x = flat(list(Network().parameters()))
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for step in itertools.count():
        gradients = [gradient(rank, step) for rank in range(num_ranks)]
        if step < options.warmup_steps:
            g = exact(gradients)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        else:
            m = mean_of([0.9 * m + 0.1 * g for g in gradients])
        x = x - LR * (m / (v.sqrt() + 1e-8) + options.weight_decay * x)
        yield x


def plain_zero_one_adam(
    options: ZeroOneAdamOptions, mean_of: Mean, again: Mean, num_ranks: int
) -> Iterator[torch.Tensor]:
    """Yield the mean over ranks of the weights; `again` are the bits of the second phase, without old residuals."""
    x = flat(list(Network().parameters()))
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    interval, updates = 1, 0
    for t in range(1, options.var_freeze_step + 1):
        gradients = [gradient(rank, t - 1) for rank in range(num_ranks)]
        if t % interval == 0:
            g = exact(gradients)
            v = 0.999 * v + 0.001 * g**2
            updates += 1
            interval *= 2 if updates % options.var_update_scaler == 0 else 1
        else:
            g = mean_of(gradients)
        m = 0.9 * m + 0.1 * g
        x = x - LR * (m / (v.sqrt() + 1e-8) + options.weight_decay * x)
        yield x
    divisor, interval, lrs = v.sqrt() + 1e-8, 1, 0.0
    ms, xs, buffers = ([each] * num_ranks for each in (m, x, torch.zeros_like(x)))
    for t in itertools.count(options.var_freeze_step + 1):
        ms = [0.9 * m + 0.1 * gradient(rank, t - 1) for rank, m in enumerate(ms)]
        steps = [-LR * (m / divisor + options.weight_decay * x) for m, x in zip(ms, xs, strict=True)]
        xs = [x + u for x, u in zip(xs, steps, strict=True)]
        buffers = [b + u for b, u in zip(buffers, steps, strict=True)]
        lrs += LR
        if t % interval == 0:
            w = again([b * divisor for b in buffers])
            xs = [x - b + w / divisor for x, b in zip(xs, buffers, strict=True)]
            ms, buffers, lrs = [-w / lrs] * num_ranks, [torch.zeros_like(x)] * num_ranks, 0.0
        if (t - options.var_freeze_step) % options.local_step_scaler == 0:
            interval = min(2 * interval, options.local_step_clipper)
        yield exact(xs)


def with_exact_means(rank: Rank) -> Rank:
    optimizer = cast(OneBitOptimizer, rank.optimizer)
    optimizer.average_bits_ = lambda x, frozen: optimizer.average_whole_(x)  # type: ignore[method-assign]
    return rank


def histories(options: Optimizer, steps: int, num_ranks: int, *, is_exact: bool = False) -> list[list[Tensors]]:
    def train(transport: MemoryTransport) -> list[Tensors]:
        rank = Rank(transport, options)
        return list((with_exact_means(rank) if is_exact else rank).train(noisy, steps))

    return run_threads(train, num_ranks)


def check_close(ours: list[list[Tensors]], expected: Iterator[torch.Tensor]) -> None:
    """Compare each step's mean over ranks; an update is about LR long."""
    for of_ranks, weights in zip(zip(*ours, strict=True), expected, strict=False):
        torch.testing.assert_close(exact([flat(each) for each in of_ranks]), weights, rtol=0, atol=LR / 50)


def test_a_warm_up_of_all_steps_is_adam_without_bias_correction() -> None:
    options = UseOneBitAdam(warmup_steps=100, weight_decay=0.1)
    check_close(histories(options, 100, 2), plain_onebit_adam(options, exact, 2))


@pytest.mark.parametrize("scale", ["l1", "l2"])
def test_100_steps_of_onebit_adam_are_those_of_a_plain_process(scale: Any) -> None:
    options = UseOneBitAdam(warmup_steps=20, weight_decay=0.1, scale=scale)
    check_close(histories(options, 100, 3), plain_onebit_adam(options, PlainMean(3, scale), 3))


def test_with_exact_means_onebit_adam_is_preconditioned_momentum() -> None:
    options = UseOneBitAdam(warmup_steps=20)
    check_close(histories(options, 100, 3, is_exact=True), plain_onebit_adam(options, exact, 3))


ZERO_ONE = UseZeroOneAdam(
    var_freeze_step=40, var_update_scaler=4, local_step_scaler=16, local_step_clipper=4, weight_decay=0.1
)


def test_100_steps_of_zero_one_adam_are_those_of_a_plain_process() -> None:
    check_close(histories(ZERO_ONE, 100, 3), plain_zero_one_adam(ZERO_ONE, PlainMean(3), PlainMean(3), 3))


def test_with_exact_means_and_equal_gradients_many_ranks_are_one() -> None:
    options = dataclasses.replace(ZERO_ONE, weight_decay=0.0)

    def train(transport: MemoryTransport) -> list[Tensors]:
        return list(with_exact_means(Rank(transport, options)).train(lambda _, step: noisy(0, step), 100))

    ((*_, alone),) = run_threads(train, 1)
    for *_, together in run_threads(train, 4):
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scale", ["l1", "l2"])
@pytest.mark.parametrize("num_ranks", [1, 3, *(pytest.param(more, marks=pytest.mark.long) for more in (2, 5))])
def test_residuals_hold_what_was_not_sent(num_ranks: int, scale: Any) -> None:
    def train(transport: MemoryTransport) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        optimizer = cast(OneBitOptimizer, Rank(transport, UseOneBitAdam(scale=scale)).optimizer)
        given, received = torch.zeros(sum(NUMELS)), torch.zeros(sum(NUMELS))
        for step in range(100):
            x = gradient(transport.rank, step)
            given += x
            optimizer.average_bits_(x, torch.zeros_like(x, dtype=torch.bool))
            received += x
        state = optimizer.state_dict()
        return given, received, state["memory"]["residual"], torch.cat([*state["bits"]["residuals"].values()])

    of_ranks = run_threads(train, num_ranks)
    given, waiting = (exact([each[index] for each in of_ranks]) for index in (0, 2))
    owned = torch.cat([of_owner for *_, of_owner in of_ranks])
    for _, received, *_ in of_ranks:
        assert torch.equal(received, of_ranks[0][1])
        difference = received - (given - waiting - owned)
        assert float(difference.norm()) < 1e-6 * float(given.norm() + waiting.norm() + owned.norm())
    assert float(waiting.norm()) > 0.1


def packed(*numels: int) -> int:
    parts = [Codes.packed_nbytes(numel, 1) for numel in numels]
    return parts[0] if len(parts) == 1 else Bundle.packed_nbytes(parts)


def test_bytes_are_those_of_the_formula() -> None:
    def train(transport: MemoryTransport) -> tuple[int, int]:
        rank, sent = Rank(transport, UseOneBitAdam(warmup_steps=2)), transport.traffic["gradient"]
        nbytes = []
        for _ in rank.train(noisy, 5):
            nbytes.append(sent.nbytes)
        return nbytes[1], nbytes[4] - nbytes[1]

    parts = [packed(32), packed(38), packed(33, 1)]
    for rank, (whole, bits) in enumerate(run_threads(train, 3)):
        assert bits == 3 * (sum(parts) + parts[rank])  # to two owners, then the own part to two ranks
        assert whole == pytest.approx(2 * 2 * 2 / 3 * 4 * 104, rel=0.02)


@pytest.mark.parametrize(
    "options", [UseOneBitAdam(warmup_steps=10), UseZeroOneAdam(var_freeze_step=10, local_step_scaler=20)]
)
def test_times_can_be_measured_of_any_part_of_a_training(options: Optimizer) -> None:
    def train(transport: MemoryTransport) -> list[int]:
        rank, sent, nbytes = Rank(transport, options), transport.traffic["gradient"], []
        for step in (15, 0, 15):
            cast(OneBitOptimizer, rank.optimizer).go_to(step)
            before = sent.nbytes
            next(rank.train(noisy, 1))
            nbytes.append(sent.nbytes - before)
        return nbytes

    bits = packed(48) + packed(22, 33, 1)
    for nbytes in run_threads(train, 2):
        assert nbytes == [bits, 4 * 104, bits]


def test_steps_without_exchange_send_nothing() -> None:
    def train(transport: MemoryTransport) -> list[int]:
        options = UseZeroOneAdam(var_freeze_step=1, local_step_scaler=1, local_step_clipper=4)
        rank, sent = Rank(transport, options), transport.traffic["gradient"]
        return [sent.nbytes for _ in rank.train(noisy, 12)]

    for nbytes in run_threads(train, 2):
        sends = [after > before for before, after in itertools.pairwise([0, *nbytes])]
        assert [step for step, sent in enumerate(sends, start=1) if sent] == [1, 2, 4, 8, 12]


def test_elements_without_a_second_moment_do_not_move() -> None:
    """Their signs would move them by 1 / eps, and they would take part in the scale of the others."""

    def some(rank: int, step: int) -> Tensors:
        first, second, third = noisy(rank, step)
        if step < 10:
            first[2:] = 0
            third = torch.zeros_like(third)
        return [first, second, third]

    def train(transport: MemoryTransport) -> Tensors:
        rank = Rank(transport, UseOneBitAdam(warmup_steps=5))
        for weights in rank.train(some, 30):
            assert all(bool((weight.abs() < 10).all()) for weight in weights)
        assert not bool(cast(OneBitOptimizer, rank.optimizer).memory["residual"][20:70].any())
        return weights

    before = list(Network().parameters())
    for first, _, third in run_threads(train, 2):
        assert torch.equal(first[2:], before[0][2:])
        assert torch.equal(third, before[2])
        assert bool((first[:2] != before[0][:2]).all())


@pytest.mark.parametrize(
    "options",
    [
        UseOneBitAdam(warmup_steps=5, weight_decay=0.5),
        UseZeroOneAdam(var_freeze_step=5, local_step_scaler=3, local_step_clipper=2, weight_decay=0.5),
    ],
)
def test_weight_decay_moves_them_all_the_same(options: Optimizer) -> None:
    def train(transport: MemoryTransport) -> torch.Tensor:
        *_, weights = Rank(transport, options).train(lambda *at: [*noisy(*at)[:2], torch.zeros(())], 30)
        return weights[2]

    expected = list(Network().parameters())[2] * (1 - LR * 0.5) ** 30
    for weight in run_threads(train, 2):
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0)


def test_elements_that_do_not_move_are_no_part_of_a_scale() -> None:
    frozen = torch.arange(104) % 3 == 0

    def train(transport: MemoryTransport) -> list[float]:
        x = torch.where(frozen, 100.0, -2.0)
        cast(OneBitOptimizer, Rank(transport, UseOneBitAdam()).optimizer).average_bits_(x, frozen)
        return x.tolist()

    for x in run_threads(train, 2):
        assert x == pytest.approx(torch.where(frozen, 0.0, -2.0).tolist())


def test_a_layer_of_zeros_is_a_header_and_stays_zero() -> None:
    def train(transport: MemoryTransport) -> tuple[torch.Tensor, int]:
        optimizer = cast(OneBitOptimizer, Rank(transport, UseOneBitAdam()).optimizer)
        x = torch.cat([torch.zeros(70), torch.ones(34)])
        optimizer.average_bits_(x, torch.zeros(104, dtype=torch.bool))
        return x, transport.traffic["gradient"].nbytes

    for x, nbytes in run_threads(train, 2):
        assert x.tolist() == [0] * 70 + [1] * 34
        assert nbytes < packed(48) + packed(22, 33, 1)


def test_the_default_scale_leaves_less_of_sparse_values_than_there_was() -> None:
    def left(scale: Any) -> float:
        weight = torch.nn.Parameter(torch.zeros(10_000))
        optimizer = OneBitAdam([weight], LR, scale=scale)
        x = torch.where(torch.arange(10_000) % 100 == 0, 1.0, 0.0)
        optimizer.average_bits_(x.clone(), torch.zeros(10_000, dtype=torch.bool))
        return float(optimizer.memory["residual"].square().sum() / x.square().sum())

    assert left("l1") == pytest.approx(0.99, abs=0.001)
    assert left("l2") == pytest.approx(1.8, abs=0.001)
