"""The native loops of quantisation agree with the reference path bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from collectives.kernels.library import serving
from collectives.kernels.loop import Parts
from collectives.payloads.codec.philox import seeded_positions
from collectives.payloads.codec.values import to_value_dtype
from collectives.payloads.sparse import SparseLevels
from compressors import randomk
from compressors.kernels import batches, quantisation, selection
from compressors.kernels.quantisation import pack_nearest_levels
from tests.testing.loops import assert_gives_what_the_reference_gives, needs_loops

pytestmark = needs_loops

Result = Sequence[torch.Tensor | float]


def parts_of(x: torch.Tensor, seed: int) -> Parts:
    """Return up to four parts, some of them empty, that do not end at block borders."""
    borders = sorted((seed * factor) % (x.numel() + 1) for factor in (7, 31, 1009)[: seed % 4])
    return Parts(x.tensor_split(borders))


BLOCKS = [1, 3, 8, 64, 100, 512, 2048, 1 << 20]


def block_of(seed: int) -> int:
    return BLOCKS[seed % len(BLOCKS)]


def packed_levels(x: torch.Tensor, seed: int) -> Result:
    bits = [2, 4, 8][seed % 3]
    norms = (quantisation.block_norms if seed % 2 else quantisation.block_maxima)(parts_of(x, seed), block_of(seed))
    key = None if seed % 5 == 0 else 2**62 + seed
    packed = torch.empty(-(-x.numel() * bits // 8), dtype=torch.uint8, device=x.device)
    multiplier = (1 << (bits - 1)) - 1
    quantisation.pack_levels(
        parts_of(x, seed), norms, block_of(seed), bits=bits, multiplier=multiplier, key=key, out=packed
    )
    return [packed]


def packed_powers(x: torch.Tensor, seed: int) -> Result:
    maxima = quantisation.block_maxima(parts_of(x, seed), block_of(seed))
    scales = torch.where(maxima.isfinite(), 2.0 ** torch.frexp(maxima).exponent.clamp(-126, 127).float(), 0.0)
    bits = [4, 8][seed % 2]
    packed = torch.empty(-(-x.numel() * bits // 8), dtype=torch.uint8, device=x.device)
    quantisation.pack_powers(parts_of(x, seed), scales, block_of(seed), bits=bits, key=seed, out=packed)
    return [packed]


def with_bits(write: Callable[[torch.Tensor, torch.Tensor], float | tuple[float, ...]], x: torch.Tensor) -> Result:
    packed = torch.empty(-(-x.numel() // 8), dtype=torch.uint8, device=x.device)
    said = write(x, packed)
    return [packed, *(said if isinstance(said, tuple) else (said,))]


def level_of(x: torch.Tensor, seed: int) -> float:
    """Return a magnitude that occurs, or an extreme one."""
    return abs(float(x[seed % x.numel()])) if seed % 3 and x.numel() else [1e-45, 0.5, 3e38, torch.inf][seed % 4]


def randomly_ternary(x: torch.Tensor, seed: int) -> Result:
    limit = torch.inf if seed % 2 else level_of(x, seed + 1)
    bits = (quantisation.LEVELS, quantisation.CODES)[seed % 2]
    return [quantisation.random_ternary(x, level_of(x, seed), seed, bits, limit=limit)]


def drawn(x: torch.Tensor, seed: int) -> Result:
    """Draw between a 300th of the elements, for which no bitmap of marks is used, and all of them."""
    count, left = [x.numel() // 300, x.numel() // 9, x.numel() * 2 // 3, x.numel()][seed % 4], torch.empty_like(x)
    values = torch.empty(count, dtype=selection.TYPES[seed % 3], device=x.device)
    if batches.serves(x):
        positions = randomk.send_drawn(x, x.flip(0), left, seed, 1 + seed % 4, values)
    else:
        positions = seeded_positions(x.numel(), count, seed).to(x.device)
        values = to_value_dtype(torch.add(x, x.flip(0), out=left)[positions], values.dtype, 1 + seed % 4)
        left.scatter_add_(0, positions, values.float().neg())
    return [positions, values, left]


def ternary_of_sum(x: torch.Tensor, seed: int) -> Result:
    left, level = torch.empty_like(x), float(torch.tensor(level_of(x, seed)))
    if batches.serves(x):
        return [quantisation.ternary_of_sum(x, x.flip(0), level, left), left]
    codes = quantisation.ternary(torch.add(x, x.flip(0), out=left), level, quantisation.CODES)
    levels = quantisation.ternary(left, level, quantisation.LEVELS)
    return [codes, left.sub_((levels.float() * level).masked_fill_(levels == 0, 0.0))]


def nearest_levels(x: torch.Tensor, seed: int) -> Result:
    """Return the codes and their values; the levels start at any magnitude, and some exceed the largest number."""
    level = level_of(x, seed)
    low = float(torch.tensor(level if 0 < level < torch.inf else 1e-45))
    ratio = float(torch.tensor([1.0, 1.01, 1.5, 8e11][seed % 4]))
    packed = pack_nearest_levels(x, low, ratio)
    indices = torch.arange(x.numel(), device=x.device)
    return [packed, SparseLevels(x.numel(), indices, low, ratio, packed).values]


LOOPS: dict[str, Callable[[torch.Tensor, int], Result]] = {
    "block_maxima": lambda x, seed: [quantisation.block_maxima(parts_of(x, seed), block_of(seed))],
    "block_norms": lambda x, seed: [quantisation.block_norms(parts_of(x, seed), block_of(seed))],
    "pack_levels": packed_levels,
    "pack_powers": packed_powers,
    "nearest_levels": nearest_levels,
    "send_drawn": drawn,
    "ternary": lambda x, seed: [
        quantisation.ternary(x, level_of(x, seed), (quantisation.LEVELS, quantisation.CODES)[seed % 2])
    ],
    "ternary_of_sum": ternary_of_sum,
    "ternary_and_mean": lambda x, seed: quantisation.ternary_and_mean(x, level_of(x, seed)),
    "random_ternary": randomly_ternary,
    "signs_and_magnitude": lambda x, _: with_bits(quantisation.signs_and_magnitude, x),
    "signs_and_sums": lambda x, _: with_bits(quantisation.signs_and_sums, x),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_gives_what_the_reference_gives(name: str, cases: range) -> None:
    assert_gives_what_the_reference_gives(LOOPS[name], cases)


def test_long_sums_are_folded_over_several_levels() -> None:
    x = torch.randn(1024 * 1024 * 2 + 5, generator=torch.Generator().manual_seed(1))
    with serving("reference"):
        expected = with_bits(quantisation.signs_and_magnitude, x)[1:], with_bits(quantisation.signs_and_sums, x)[1:]
    assert (
        with_bits(quantisation.signs_and_magnitude, x)[1:],
        with_bits(quantisation.signs_and_sums, x)[1:],
    ) == expected
