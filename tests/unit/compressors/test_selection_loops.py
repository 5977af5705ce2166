"""The native loops of selection agree with the reference path bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from collectives.kernels.library import serving
from collectives.payloads.codec.values import to_value_dtype
from compressors.kernels import batches, selection
from compressors.kernels.residuals import accelerate, add, add_and_find, add_and_measure
from compressors.sparse import num_kept
from tests.testing.hard_numbers import hard_numbers
from tests.testing.loops import assert_gives_what_the_reference_gives, needs_loops, same

pytestmark = needs_loops

Loop = Callable[[torch.Tensor, int], torch.Tensor | float]


def groups(x: torch.Tensor, seed: int) -> torch.Tensor:
    size = [1, 2, 7, 64, 100, 256, 1024, 4096][seed % 8]
    ratio = [0.001, 0.01, 0.0625, 0.25, 1.0][seed % 5]
    return selection.select_groups(x, size, num_kept(ratio, size), num_kept(ratio, x.numel() % size))


def level_in(x: torch.Tensor, seed: int) -> float:
    """Return a number that separates some entries from others, or an extreme one."""
    special = [0.0, -1.0, 1e-45, 3e38, 1e300, math.inf, math.nan]
    return abs(float(x[seed % x.numel()])) if seed % 3 and x.numel() else special[seed % 7]


def sent(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Return values as numbers, indices and remainders, concatenated; the gradients are in several tensors."""
    numel = x.numel()
    residual = hard_numbers(seed + 1, numel, device=x.device) if seed % 2 else x.flip(0)
    left = torch.empty_like(x)
    residual = torch.cat([residual, x])[:numel]
    borders = sorted(seed * factor % (numel + 1) for factor in (7919, 104_729, 0))
    gradients = x.tensor_split(borders)
    size = [1, 2, 7, 64, 100, 256, 1024, 4096][seed % 8]
    groups = size, num_kept(0.01 if seed % 3 else 0.25, size), num_kept(0.01 if seed % 3 else 0.25, numel % size)
    dtype, world_size = selection.TYPES[seed % 3], 1 + seed % 5
    if selection.sends_groups(size, left):
        sent = selection.send_groups(gradients, residual, left, groups, dtype, world_size)
        values, indices, positions, is_finite = sent
    else:
        positions = selection.select_groups(torch.add(x, residual, out=left), *groups)
        values = to_value_dtype(left[positions], dtype, world_size) + 0
        indices, is_finite = positions.remainder(size), bool(left[positions].isfinite().all())
        left.scatter_add_(0, positions, values.float().neg())
    found = values, indices, positions, left, torch.tensor([is_finite], device=x.device)
    return torch.cat([part.double() for part in found])


def added(x: torch.Tensor, seed: int) -> torch.Tensor:
    out = torch.empty_like(x)
    add(x, x.flip(0), factor=[1.0, 0.9, -0.5][seed % 3], out=out)
    return out


def accelerated(x: torch.Tensor, seed: int) -> torch.Tensor:
    start = seed % 4  # like parts of a bucket, which begin at any element, with equal or different alignments
    now, out = (
        torch.empty(x.numel() + 16, device=x.device)[first : first + x.numel()] for first in (start, start + seed % 3)
    )
    gradients = x.tensor_split([seed * 7919 % (x.numel() + 1)])
    accelerate(gradients, x.flip(0), x.roll(1), [0.9, 0.5, 0.0][seed % 3], nesterov=seed % 2 == 1, now=now, out=out)
    return torch.cat([now, out])


def summed_and_measured(x: torch.Tensor, seed: int) -> torch.Tensor:
    out = torch.empty_like(x)
    return torch.cat(
        [torch.tensor(add_and_measure(x, x.flip(0), out), dtype=torch.float64, device=x.device), out.double()]
    )


def summed_and_found(x: torch.Tensor, seed: int) -> torch.Tensor:
    out = torch.empty_like(x)
    squares, positions, values = add_and_find(x, x.flip(0), level_in(x, seed), out)
    return torch.cat(
        [
            torch.tensor([squares], dtype=torch.float64, device=x.device),
            positions.double(),
            values.double(),
            out.double(),
        ]
    )


LOOPS: dict[str, Loop] = {
    "select_groups": groups,
    "send_groups": sent,
    "add_scaled": added,
    "accelerate": accelerated,
    "add_and_measure": summed_and_measured,
    "add_and_find": summed_and_found,
    "top_k": lambda x, seed: selection.top_k(
        x, [0, min(1, x.numel()), x.numel() // 100, x.numel() // 3, x.numel()][seed % 5]
    ),
    "reaching": lambda x, seed: selection.reaching(x, level_in(x, seed)),
    "largest_magnitude": lambda x, seed: selection.largest_magnitude(x),
    "magnitude_range": lambda x, seed: torch.tensor(selection.magnitude_range(x) if x.numel() else (0.0, 0.0)),
    "sum_of_squares": lambda x, seed: selection.sum_of_squares(x),
    "magnitudes_and_largest": lambda x, seed: torch.tensor(selection.magnitudes_and_largest(x), dtype=torch.float64),
    "squares_and_largest": lambda x, seed: torch.tensor(selection.squares_and_largest(x), dtype=torch.float64),
    "limited magnitudes": lambda x, seed: selection.sum_of_magnitudes(x, max(0, level_in(x, seed))),
    "limited squares": lambda x, seed: selection.sum_of_squares(x, max(0, level_in(x, seed))),
    "sum_of_magnitudes": lambda x, seed: selection.sum_of_magnitudes(x),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_gives_what_the_reference_gives(name: str, cases: range) -> None:
    assert_gives_what_the_reference_gives(lambda x, seed: [LOOPS[name](x, seed)], cases)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(300_000, generator=torch.Generator().manual_seed(1)),
        torch.randn(300_000, generator=torch.Generator().manual_seed(2)).round(),
        torch.randn(300_000, generator=torch.Generator().manual_seed(3)) * (torch.arange(300_000) % 1000 == 3),
        torch.randn(300_000, generator=torch.Generator().manual_seed(4)) * (torch.arange(300_000) % 1024 < 16),
        torch.zeros(300_000),
    ],
    ids=["normal", "tied", "sample of zeros", "sample of all", "zeros"],
)
def test_a_sample_that_misleads_changes_nothing(x: torch.Tensor) -> None:
    with serving("reference"):
        expected = selection.top_k(x, 3000), selection.sum_of_squares(x)
    half, total = x / 2, torch.empty_like(x)
    assert torch.equal(selection.top_k(x, 3000), expected[0])
    assert torch.equal(batches.top_k_of_layers([half], half, total, [len(x)], [3000]), expected[0])
    assert torch.equal(total, x)
    assert selection.sum_of_squares(x) == expected[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["add_and_measure", "add_scaled", "accelerate"])
@pytest.mark.parametrize("skipped", [0, 3])
def test_what_is_written_past_the_caches_is_the_same(name: str, skipped: int) -> None:
    x = torch.randn(2**22 + 1029, generator=torch.Generator().manual_seed(1))[skipped:]
    for seed in (0, 1, 3, 6):
        with serving("reference"):
            expected = LOOPS[name](x, seed)
        assert same(LOOPS[name](x, seed), expected)
