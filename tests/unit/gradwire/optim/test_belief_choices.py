"""All combinations of Max-AdaBelief's options: against scalar computations, and equal on all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bench.optimizers.gradwire_optimizers import UseMaxAdaBelief
from tests.testing.belief_ranks import LR, Network, Rank, noisy, trained
from tests.testing.memory_transport import MemoryTransport

VARIANTS = [
    {"reduce": reduce, "recursion": recursion, "max_over": max_over, "max_of": max_of}
    for reduce in ("mean", "sum", "s_max")
    for recursion in ("local", "merged")
    for max_over in ("raw", "corrected")
    for max_of in ("running", "previous")
    if recursion == "local" or (reduce != "sum" and max_of != "previous")
]


def by_hand(theta: float, gradients: list[list[float]], *, eps_mode: str = "paper", **options: str) -> float:
    """Return one parameter after these steps (per step, one gradient per rank), computed with scalars."""
    n, eps = len(gradients[0]), 1e-2
    m, s, kept = [0.0] * n, [0.0] * n, [0.0] * n
    for t, of_ranks in enumerate(gradients, 1):
        bias1, bias2 = 1 - 0.9**t, 1 - 0.999**t
        largest = []
        for i, g in enumerate(of_ranks):
            m[i] = 0.9 * m[i] + 0.1 * g
            s[i] = 0.999 * s[i] + 0.001 * (g - m[i]) ** 2 + (eps if eps_mode == "paper" else 0)
            compared = s[i] / bias2 if options["max_over"] == "corrected" else s[i]
            largest.append(max(compared, kept[i]))
            kept[i] = largest[i] if options["max_of"] == "running" else compared
        mean = sum(m) / bias1 / (1 if options["reduce"] == "sum" else n)
        merged = {"mean": sum(largest) / n, "sum": sum(largest), "s_max": max(largest)}[options["reduce"]]
        if options["recursion"] == "merged":
            kept = [merged] * n
        corrected = merged if options["max_over"] == "corrected" else merged / bias2
        theta -= LR * mean / (math.sqrt(corrected) + eps)
    return theta


@pytest.mark.parametrize("eps_mode", ["paper", "outside"])
@pytest.mark.parametrize("options", VARIANTS, ids=["-".join(options.values()) for options in VARIANTS])
def test_every_choice_is_what_it_says(options: dict[str, str], eps_mode: str) -> None:
    def make(transport: MemoryTransport) -> Rank:
        return Rank(transport, UseMaxAdaBelief(eps=1e-2, eps_mode=eps_mode, **options))  # type: ignore[arg-type]

    start = Network().weights[0].detach().flatten()
    last = trained(make, noisy, 8, 3)[0][-1][0].flatten()
    for index in (0, 33, 69):
        gradients = [[float(noisy(rank, step)[0].flatten()[index]) for rank in range(3)] for step in range(8)]
        expected = by_hand(float(start[index]), gradients, eps_mode=eps_mode, **options)
        moved = expected - float(start[index])
        assert float(last[index]) - float(start[index]) == pytest.approx(moved, rel=1e-3, abs=1e-6)
        assert abs(moved) > 1e-5


@pytest.mark.parametrize("options", VARIANTS, ids=["-".join(options.values()) for options in VARIANTS])
def test_parameters_are_equal_on_all_ranks_bit_for_bit(options: dict[str, Any]) -> None:
    first, *others = trained(lambda transport: Rank(transport, UseMaxAdaBelief(**options)), noisy, 8, 3)
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(first[0][0], first[-1][0])


@pytest.mark.parametrize(("reduce", "factor"), [("mean", 1.0), ("sum", 2.0)])
def test_the_first_step_in_closed_form(reduce: str, factor: float) -> None:
    def make(transport: MemoryTransport) -> Rank:
        return Rank(transport, UseMaxAdaBelief(reduce=reduce, eps_mode="outside"))  # type: ignore[arg-type]

    start = [parameter.detach().double() for parameter in Network().parameters()]
    for (theta,) in trained(make, noisy, 1, 4):
        for number, (before, after) in enumerate(zip(start, theta, strict=True)):
            gradients = torch.stack([noisy(rank, 0)[number] for rank in range(4)])
            expected = -LR * factor * gradients.mean(0) / (0.9 * gradients.square().mean(0).sqrt())
            torch.testing.assert_close(after.double() - before, expected, rtol=1e-3, atol=1e-7)
