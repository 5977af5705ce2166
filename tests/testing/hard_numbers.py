"""Difficult fp32 tensors: special values, ties, awkward lengths and offsets in memory."""

from __future__ import annotations

import torch

SPECIAL = torch.tensor([0.0, -0.0, torch.nan, -torch.nan, torch.inf, -torch.inf, 1e-45, -1e-40, 1.18e-38, 3.4e38, -1.0])
MOST = 5000


def hard_numbers(seed: int, most: int = MOST, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return fp32 [0..most], a view at any offset in its memory; its kind and length are drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    numel = draw(most + 1) if draw(4) else draw(20)
    offset = draw(17)
    kind = draw(6)
    x = torch.empty(offset + numel)
    if kind == 0:  # random bits
        x = torch.randint(-(2**31), 2**31, x.shape, generator=generator).to(torch.int32).view(torch.float32)
    elif kind == 1:  # many ties
        x = torch.randint(-2, 3, x.shape, generator=generator).float()
    elif kind == 2:  # mostly zeros
        x = torch.randn(x.shape, generator=generator) * (torch.rand(x.shape, generator=generator) < 0.01)
    else:
        x = torch.randn(x.shape, generator=generator) * 10.0 ** draw(60) / 1e30
    if kind in (1, 3) and numel:
        places = torch.randint(len(x), (1 + draw(numel),), generator=generator)
        x[places] = SPECIAL[torch.randint(len(SPECIAL), places.shape, generator=generator)]
    if kind == 4:  # with a negated copy, so that every magnitude occurs twice
        x[len(x) // 2 :] = -x[: len(x) - len(x) // 2]
    return x.to(device)[offset:]
