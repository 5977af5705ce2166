"""Arithmetic per block of consecutive elements; the last block may be shorter."""

from __future__ import annotations

import torch


def per_block(x: torch.Tensor, block_numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of `x`: the whole blocks [num_blocks, block_numel], and the short last one [1, rest] or [0, 0]."""
    whole = x.numel() // block_numel * block_numel
    rest = x[whole:]
    return x[:whole].view(-1, block_numel), rest.view(1, -1) if rest.numel() else rest.view(0, 0)


def block_maxima(x: torch.Tensor, block_numel: int) -> torch.Tensor:
    """Largest magnitude of every block: fp32 [ceil(numel / block_numel)]."""
    return torch.cat([part.abs().amax(1) if part.numel() else part.new_empty(0) for part in per_block(x, block_numel)])


def block_norms(x: torch.Tensor, block_numel: int) -> torch.Tensor:
    """L2 norm of every block: fp32 [ceil(numel / block_numel)]; squares neither overflow nor vanish."""
    maxima = block_maxima(x, block_numel)
    relative = divided_by_block(x, maxima, block_numel)
    norms = maxima * torch.cat([part.norm(dim=1) for part in per_block(relative, block_numel)])
    return norms.clamp_(max=torch.finfo(norms.dtype).max)


def divided_by_block(x: torch.Tensor, scales: torch.Tensor, block_numel: int) -> torch.Tensor:
    """Every element over its block's scale, freshly made: fp32 [numel]; as it is where the scale is 0."""
    divisors = torch.where(scales > 0, scales, 1)
    out = torch.empty_like(x)
    num_whole = x.numel() // block_numel
    for part, quotient, divisor in zip(
        per_block(x, block_numel),
        per_block(out, block_numel),
        (divisors[:num_whole], divisors[num_whole:]),
        strict=True,
    ):
        torch.div(part, divisor.unsqueeze(1), out=quotient)
    return out
