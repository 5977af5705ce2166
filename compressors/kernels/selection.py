"""Selection of entries by magnitude, and sums and maxima of magnitudes.

Results are bit-identical on every device, with and without native loops. Of equal magnitudes, the first are selected.
NaN counts as infinite. Positions are in ascending order.
"""

import ctypes
import math
import struct
from collections.abc import Sequence

import torch

from collectives.kernels.loop import (
    Double,
    Float,
    FloatArray,
    Int,
    IntArray,
    LongArray,
    Longs,
    Loop,
    Parts,
    also_on_gpus,
    array,
)
from collectives.payloads.codec.values import value_limit

STRETCH = 1024  # number of terms that `folded_sum` sums as a unit

INFINITE = 0x7F800000  # the bits of infinity in fp32

_SUM_OF_SQUARES = Loop("sum_of_squares", FloatArray, Int, Float, returns=Double)
_SUM_OF_LIMITED = Loop("sum_of_limited", FloatArray, Int, Float, returns=Double)
_LARGEST = Loop("largest_magnitude", FloatArray, Int, returns=Float)
_RANGE = Loop("magnitude_range", FloatArray, Int, FloatArray)
_MAGNITUDES_AND_LARGEST = Loop("magnitudes_and_largest", FloatArray, Int, FloatArray, returns=Double)
_SQUARES_AND_LARGEST = Loop("squares_and_largest", FloatArray, Int, FloatArray, returns=Double)


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Return a new tensor of |x|, with infinity for NaN: fp32 of the same shape."""
    return x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def level_bits(level: float) -> int:
    """Return the bits of `level` in fp32 as an integer; a larger level gives a larger integer.

    A negative level counts as zero, and NaN as infinity.
    """
    if math.isnan(level):
        return INFINITE
    nearest = ctypes.c_float(max(level, 0.0)).value  # infinity if the level is out of the range of fp32
    return int(struct.unpack("<i", struct.pack("<f", abs(nearest)))[0])


@also_on_gpus
def largest_magnitude(x: torch.Tensor) -> float:
    """Return the largest |x| of fp32 [numel], 0 if numel is 0; NaN counts as infinite."""
    if _LARGEST.serves(x):
        return float(_LARGEST(x, x.numel()))
    return float(magnitudes(x).amax()) if x.numel() else 0.0


def magnitude_range(x: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest |x| of fp32 [numel], numel >= 1; NaN counts as infinite."""
    if _RANGE.serves(x):
        extremes = torch.empty(2, dtype=torch.float32)
        _RANGE(x, x.numel(), extremes)
    else:
        extremes = torch.stack(magnitudes(x).aminmax())
    smallest, largest = extremes.tolist()
    return smallest, largest


def limited(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Return a new tensor of min(|x|, limit), limit >= 0; NaN stays NaN: fp32 of the same shape."""
    most = x.new_tensor(limit)
    return torch.where(x.abs() > most, most, x.abs())


@also_on_gpus
def sum_of_squares(x: torch.Tensor, limit: float = math.inf) -> float:
    """Return the sum of min(|x|, limit)^2 over fp32 [numel], in fp64, without overflow or underflow."""
    if _SUM_OF_SQUARES.serves(x):
        return float(_SUM_OF_SQUARES(x, x.numel(), limit))
    return float(folded_sum(limited(x, limit).double().square()))


@also_on_gpus
def sum_of_magnitudes(x: torch.Tensor, limit: float = math.inf) -> float:
    """Return the sum of min(|x|, limit) over fp32 [numel], in fp64."""
    if _SUM_OF_LIMITED.serves(x):
        return float(_SUM_OF_LIMITED(x, x.numel(), limit))
    return float(folded_sum(limited(x, limit).double()))


def magnitudes_and_largest(x: torch.Tensor) -> tuple[float, float]:
    """Return the sum of |x|, in fp64, and the largest |x|, computed in one pass; x is fp32 [numel]."""
    if _MAGNITUDES_AND_LARGEST.serves(x):
        largest = torch.empty(1, dtype=torch.float32)
        return float(_MAGNITUDES_AND_LARGEST(x, x.numel(), largest)), float(largest)
    return sum_of_magnitudes(x), largest_magnitude(x)


def squares_and_largest(x: torch.Tensor) -> tuple[float, float]:
    """Return the sum of x^2, in fp64, and the largest |x|, computed in one pass; x is fp32 [numel]."""
    if _SQUARES_AND_LARGEST.serves(x):
        largest = torch.empty(1, dtype=torch.float32)
        return float(_SQUARES_AND_LARGEST(x, x.numel(), largest)), float(largest)
    return sum_of_squares(x), largest_magnitude(x)


def folded_sum(terms: torch.Tensor) -> torch.Tensor:
    """Return the sums of `terms`, fp64 [..., n], over the last dimension, in a fixed order of additions: fp64 [...].

    Terms are summed in blocks of 1024; the last block is padded with zeros. A block is halved by adding its upper half
    to its lower half, until one term is left. The sums of the blocks are then summed in the same way. No term may be
    -0.0.
    """
    while terms.shape[-1] > 1:
        terms = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % STRETCH)).unflatten(-1, (-1, STRETCH))
        while terms.shape[-1] > 1:
            lower, upper = terms.chunk(2, dim=-1)
            terms = lower + upper
        terms = terms.squeeze(-1)
    return terms.sum(-1)  # at most one term


LONGEST_GROUP = 16384  # the largest group size that the native loops for groups support
TYPES = (torch.float32, torch.float16, torch.bfloat16)  # types of values on the wire, in the order of the native loops
KEPT = len(TYPES)  # number for fp32 values that are not subtracted
# While the number of entries is unknown, memory for numel // FEW + SPARE entries is allocated.
FEW, SPARE = 16, 4096

_SELECT_GROUPS = Loop("select_groups", FloatArray, Int, Int, Int, Int, LongArray)
_TOP_K = Loop("top_k", FloatArray, Int, Int, LongArray, Int, LongArray, IntArray)
_SEND_GROUPS = {
    dtype: Loop(
        "send_groups",
        Longs,
        Longs,
        *[FloatArray, Int, Int, Int, Int, Int, Float],
        array(dtype),
        LongArray,
        LongArray,
        FloatArray,
        returns=Int,
    )
    for dtype in TYPES
}
_FIND_REACHING = Loop("find_reaching", FloatArray, Int, Int, Int, LongArray, returns=Int)


def select_groups(x: torch.Tensor, group_size: int, k: int, k_last: int) -> torch.Tensor:
    """Return the positions of the k largest |x| in each group of `group_size` consecutive entries, ascending.

    Args:
        x: fp32 [numel], contiguous.
        group_size: entries per group; the last group may be shorter.
        k: entries to select per whole group, 1 <= k <= group_size.
        k_last: entries to select in a shorter last group.

    Returns:
        int64 [k * (numel // group_size) + k_last].
    """
    if group_size <= LONGEST_GROUP:
        return select_short_groups(x, group_size, k, k_last)
    parts = [
        top_k(group, k if len(group) == group_size else k_last) + number * group_size
        for number, group in enumerate(x.split(group_size))
    ]
    return torch.cat(parts)


@also_on_gpus
def select_short_groups(x: torch.Tensor, group_size: int, k: int, k_last: int) -> torch.Tensor:
    """Return the positions of the k largest |x| in each group of consecutive entries, ascending, int64.

    A group has at most LONGEST_GROUP entries. If the last group is shorter, `k_last` of its entries are selected.
    """
    num_groups, rest = divmod(x.numel(), group_size)
    if _SELECT_GROUPS.serves(x):
        selected = torch.empty(num_groups * k + (k_last if rest else 0), dtype=torch.int64)
        _SELECT_GROUPS(x, x.numel(), group_size, k, k_last, selected)
        return selected
    whole = x.numel() - rest
    parts = [_top_of_rows(x[:whole].view(num_groups, group_size), k)] if num_groups else []
    if rest:
        parts.append(_top_of_rows(x[whole:].view(1, rest), k_last) + whole)
    return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.int64)


def sends_groups(group_size: int, left: torch.Tensor) -> bool:
    """Return True if `send_groups` can be called for groups of this size and the tensor `left`."""
    return group_size <= LONGEST_GROUP and _SEND_GROUPS[torch.float32].serves(left)


def send_groups(
    gradients: Sequence[torch.Tensor],
    residual: torch.Tensor,
    left: torch.Tensor,
    groups: tuple[int, int, int],
    dtype: torch.dtype | None,
    world_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """Take the k entries of largest magnitude per group of x = gradients + residual, and write the rest of x to `left`.

    Args:
        gradients: fp32, contiguous; they have `numel` elements in total.
        residual: fp32 [numel].
        left: fp32 [numel], overwritten with x minus the values; must not share memory with the other tensors.
        groups: group_size, k and k_last of `select_groups`.
        dtype: type of the values: fp32, fp16 or bf16. None: values are fp32, and `left` becomes x, without subtraction.
        world_size: number of ranks over which the values are summed; fp16 values are limited so that no sum overflows.

    Returns:
        The values, in the order of `select_groups`, with +0.0 for -0.0; their indices within their groups, int64; their
        positions, int64; and True if all of x is finite. If that is False, the other results are invalid.
    """
    (group_size, k, k_last), kind = groups, KEPT if dtype is None else TYPES.index(dtype)
    limit, dtype = math.inf if dtype is None else value_limit(dtype, world_size), dtype or torch.float32
    x, (num_groups, rest) = Parts(gradients), divmod(len(left), group_size)
    num_sent = num_groups * k + (k_last if rest else 0)
    values = torch.empty(num_sent, dtype=dtype)
    indices, positions = (torch.empty(num_sent, dtype=torch.int64) for _ in range(2))
    is_finite = _SEND_GROUPS[dtype](
        x.starts, x.borders, residual, len(left), *groups, kind, limit, values, indices, positions, left
    )
    return values, indices, positions, bool(is_finite)


@also_on_gpus
def top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the positions of the k largest |x|, ascending: int64 [k].

    Args:
        x: fp32 [numel], contiguous.
        k: 0 <= k <= numel.
    """
    if k == 0:
        return x.new_empty(0, dtype=torch.int64)
    if _TOP_K.serves(x):
        selected = torch.empty(k, dtype=torch.int64)
        _TOP_K(x, x.numel(), k, selected, *candidates_room(x.numel(), k))
        return selected
    return _top_of_rows(x.view(1, -1), k)


def candidates_room(numel: int, k: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Allocate work memory for the native top-k loops, which keep candidates for the k largest entries.

    Returns:
        The largest number of candidates; memory for their positions, int64; memory for the bits of their magnitudes,
        int32.
    """
    most = min(numel, 2 * k + SPARE)
    return most, torch.empty(most, dtype=torch.int64), torch.empty(max(most, numel // 64), dtype=torch.int32)


def kth_largest(x: torch.Tensor, k: int) -> float:
    """Return the k-th largest |x| of fp32 [numel], 1 <= k <= numel."""
    return float(magnitudes(x.index_select(0, top_k(x, k))).amin())


@also_on_gpus
def reaching(x: torch.Tensor, level: float) -> torch.Tensor:
    """Return the positions of all |x| >= level, ascending, int64.

    Args:
        x: fp32 [numel], contiguous.
        level: rounded to fp32; NaN counts as infinite.
    """
    if _FIND_REACHING.serves(x):
        bound, capacity = level_bits(level), x.numel() // FEW + SPARE
        positions = torch.empty(capacity, dtype=torch.int64)
        count = _FIND_REACHING(x, x.numel(), bound, capacity, positions)
        if count > capacity:
            positions = torch.empty(count, dtype=torch.int64)
            _FIND_REACHING(x, x.numel(), bound, count, positions)
        return positions[:count]
    return (magnitudes(x).view(torch.int32) >= level_bits(level)).nonzero().view(-1)


def _top_of_rows(rows: torch.Tensor, k: int) -> torch.Tensor:
    """Return the positions of the k largest |x| in every row, ascending, as indices of the flattened `rows` (fp32)."""
    sizes = magnitudes(rows)
    smallest = sizes.topk(k, dim=1).values[:, -1:]
    above, tied = sizes > smallest, sizes == smallest
    num_tied = k - above.sum(dim=1, keepdim=True)
    return (above | (tied & (tied.cumsum(dim=1) <= num_tied))).view(-1).nonzero().view(-1)
