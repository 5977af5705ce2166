"""Triton kernel that adds packed codes to a dense tensor.

Only Triton's interpreter has run these kernels, no GPU.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import launch

TILE = 2048


def add_codes_to_floats_(
    dense: torch.Tensor,
    terms: Sequence[tuple[torch.Tensor, torch.Tensor]],
    table: torch.Tensor,
    block_numel: int,
    divisor: float,
) -> None:
    """Add all terms in one pass over `dense`."""
    codes, scales = (
        torch.tensor([part.data_ptr() for part in kind], device=dense.device) for kind in zip(*terms, strict=True)
    )
    launch(
        _add_codes, triton.cdiv(dense.numel(), TILE),
        codes, scales, len(terms), table, dense, dense.numel(), block_numel, float(divisor),
        PER_BYTE=table.shape[1], IS_ALONE=len(terms) == 1, TILE=TILE,
    )  # fmt: skip


@triton.jit
def _add_codes(
    codes, scales, num_terms, table, dense, numel, block_numel, divisor,
    PER_BYTE: tl.constexpr, IS_ALONE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * TILE
    places = first + tl.arange(0, TILE)
    inside = places < numel
    block = places // block_numel
    total = _decoded(codes, scales, 0, table, places, block, inside, PER_BYTE)
    if not IS_ALONE:
        total += 0.0  # turns -0.0 into +0.0, as adding to zeros does; a single term keeps its sign
        for term in range(1, num_terms):
            total += _decoded(codes, scales, term, table, places, block, inside, PER_BYTE)
    before = tl.load(dense + places, mask=inside)
    tl.store(dense + places, before + tl.div_rn(total, tl.zeros_like(total) + divisor), mask=inside)


@triton.jit
def _decoded(codes, scales, term, table, places, block, inside, PER_BYTE: tl.constexpr):
    """Return the values of a term's codes: fp32 [TILE]."""
    packed = tl.load(codes + term).to(tl.pointer_type(tl.uint8))
    of_blocks = tl.load(scales + term).to(tl.pointer_type(tl.float32))
    byte = tl.load(packed + places // PER_BYTE, mask=inside, other=0).to(tl.int32)
    value = tl.load(table + byte * PER_BYTE + (places % PER_BYTE).to(tl.int32), mask=inside, other=0.0)
    return value * tl.load(of_blocks + block, mask=inside, other=0.0)
