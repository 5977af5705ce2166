"""Encoding of all layers of a bucket in one native call.

The payloads are the same, bit for bit, as if each layer were encoded on its own. They are returned as a bundle, unless
there is a single layer. Arguments of the functions:
    gradients: fp32, one contiguous tensor per layer.
    residual: fp32 [numel of all layers]. If it is not None, gradients + residual is encoded; if it is None, the
        contents of `left` are encoded.
    left: fp32 [numel of all layers], the layers end to end; overwritten with what is not sent.
    numels: number of elements of each layer; at least one layer.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from collectives.kernels.loop import (
    ByteArray,
    Double,
    Float,
    FloatArray,
    Int,
    IntArray,
    LongArray,
    Longs,
    Loop,
    addresses,
    array,
    longs,
)
from collectives.payloads import Payload, Sparse
from collectives.payloads.codec.bits import packed_nbytes
from collectives.payloads.codec.values import value_limit
from collectives.payloads.packed_bundle import CodedBundle, MakeCoded, SparseBundle, sign, ternary, two_means
from compressors.kernels.selection import SPARE, TYPES

_TOP_K = Loop(
    "top_k_of_layers", Longs, FloatArray, Longs, Longs, Int, LongArray, IntArray, Int, LongArray, IntArray, FloatArray
)
_SEND = {
    dtype: Loop(
        "send_from_layers", Longs, Longs, Int, Int, Float, Int, LongArray, array(dtype), Longs, FloatArray, returns=Int
    )
    for dtype in TYPES
}
_SIGN = Loop("sign_layers", Longs, FloatArray, Longs, Int, Int, ByteArray, FloatArray, FloatArray)
_TWO_MEANS = Loop("two_means_of_layers", Longs, FloatArray, Longs, Int, ByteArray, FloatArray, FloatArray)
_TERNARY = Loop("random_ternary_of_layers", Longs, Longs, Int, Double, Longs, FloatArray, ByteArray)


def serves(*tensors: torch.Tensor) -> bool:
    """Return True if the functions of this module can be called with these tensors."""
    return _TOP_K.serves(*tensors)


def top_k_of_layers(
    gradients: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    left: torch.Tensor,
    numels: Sequence[int],
    ks: Sequence[int],
) -> torch.Tensor:
    """Return the positions of the ks[i] largest entries of each layer i, counted from its start: int64 [sum of ks].

    Each of `ks` is at least 1. The selected entries are not subtracted from `left`.
    """
    most = min(max(numels), 2 * max(ks) + SPARE)
    positions, values = torch.empty(sum(ks), dtype=torch.int64), torch.empty(max(ks), dtype=torch.int32)
    candidates = torch.empty(most, dtype=torch.int64)
    scratch = torch.empty(max(most, max(numels) // 64), dtype=torch.int32)
    _TOP_K(
        *_summands(gradients, residual, left), _borders(numels), longs(ks), len(ks), positions, values, most,
        candidates, scratch, left,
    )  # fmt: skip
    return positions


def send_from_layers(
    left: torch.Tensor,
    numels: Sequence[int],
    counts: Sequence[int],
    positions: torch.Tensor,
    dtype: torch.dtype,
    world_size: int,
    *,
    finite: bool,
) -> Payload | None:
    """Return the payloads of entries of `left`, and subtract them from `left`; entries that round to zero are left out.

    Args:
        left: the layers end to end, fp32 [numel of all layers], mutated.
        numels: number of elements of each layer.
        counts: number of positions in each layer.
        positions: positions of the entries, int64, ascending within each layer and counted from its start; overwritten.
        dtype: type of the values: fp32, fp16 or bf16.
        world_size: number of ranks over which the values are summed; fp16 values are limited so that no sum overflows.
        finite: True to return None, with `left` undefined, if an entry is not finite.
    """
    values, sent = torch.empty(len(positions), dtype=dtype), longs(counts)
    limit = value_limit(dtype, world_size)
    total = _SEND[dtype](
        _borders(numels), sent, len(counts), TYPES.index(dtype), limit, finite, positions, values, sent, left
    )
    if total < 0:
        return None
    positions, values = positions[:total], values[:total]
    return SparseBundle(numels, [*sent], positions, values) if len(numels) > 1 else Sparse(numels[0], positions, values)


def sign_layers(
    gradients: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    left: torch.Tensor,
    numels: Sequence[int],
    *,
    by_mean: bool,
) -> Payload:
    """Return payloads of sign bits, 1 if an element is >= 0; the scale is the mean magnitude if `by_mean`, else 1."""
    packed, scales = _room_for_codes(numels, 1), torch.empty(len(numels), 1, dtype=torch.float32)
    summands = _summands(gradients, residual, left)
    _SIGN(*summands, _borders(numels), len(numels), by_mean, packed, scales, left)
    return _coded(sign, 1, numels, packed, scales)


def two_means_of_layers(
    gradients: Sequence[torch.Tensor], residual: torch.Tensor | None, left: torch.Tensor, numels: Sequence[int]
) -> Payload:
    """Return payloads of sign bits, 1 if an element is >= 0, and of each layer's means of elements with bit 0 and 1."""
    packed, means = _room_for_codes(numels, 1), torch.empty(len(numels), 2, dtype=torch.float32)
    summands = _summands(gradients, residual, left)
    _TWO_MEANS(*summands, _borders(numels), len(numels), packed, means, left)
    return _coded(two_means, 1, numels, packed, means)


def random_ternary_of_layers(gradients: Sequence[torch.Tensor], clip_sigmas: float, keys: Sequence[int]) -> Payload:
    """Return payloads of the codes of `random_ternary`; a layer's scale is its largest magnitude after clipping.

    Args:
        gradients: the tensors to encode, fp32, one contiguous tensor per layer.
        clip_sigmas: elements are clipped at this multiple of their layer's root mean square; 0 to clip none.
        keys: seed of each layer's random numbers.
    """
    numels = [gradient.numel() for gradient in gradients]
    packed, scales = _room_for_codes(numels, 2), torch.empty(len(numels), 1, dtype=torch.float32)
    _TERNARY(addresses(gradients), _borders(numels), len(numels), clip_sigmas, longs(keys), scales, packed)
    return _coded(ternary, 2, numels, packed, scales)


def _coded(make: MakeCoded, bits: int, numels: Sequence[int], packed: torch.Tensor, scalars: torch.Tensor) -> Payload:
    return CodedBundle(make, bits, numels, packed, scalars) if len(numels) > 1 else make(numels[0], packed, scalars[0])


def _summands(
    gradients: Sequence[torch.Tensor], residual: torch.Tensor | None, left: torch.Tensor
) -> tuple[Any, torch.Tensor]:
    # a null pointer for the gradients if there is nothing to add; the loops then do not read the residual
    return (addresses(gradients), residual) if residual is not None else (None, left)


def _borders(numels: Sequence[int]) -> Any:
    return longs([0, *itertools.accumulate(numels)])


def _room_for_codes(numels: Sequence[int], bits: int) -> torch.Tensor:
    return torch.empty(sum(packed_nbytes(numel, bits) for numel in numels), dtype=torch.uint8)
