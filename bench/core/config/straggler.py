"""Straggler, a rank that is slow on purpose, written ``rank=1,slowdown=3``."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Self

from bench.core.errors import UsageError

_FORM = re.compile(r"\s*rank\s*=\s*([0-9]{1,9})\s*,\s*slowdown\s*=\s*([0-9.eE+]+)\s*")
MAX_SLOWDOWN = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Straggler:
    """One rank that computes more slowly than it could.

    Attributes:
        rank: number of the rank, from 0.
        slowdown: factor by which forward and backward take longer, at least 1.
    """

    rank: int
    slowdown: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``rank=1,slowdown=3``.

        Raises:
            UsageError: the text has another form, or the slowdown is out of range.
        """
        match = _FORM.fullmatch(text)
        slowdown = _number(match[2]) if match else math.nan
        if not match or not 1 <= slowdown <= MAX_SLOWDOWN:
            raise UsageError(
                f"--straggler {text} is not possible; write rank=1,slowdown=3, with a slowdown of 1 to {MAX_SLOWDOWN:g}"
            )
        return cls(rank=int(match[1]), slowdown=slowdown)

    def check_among(self, world_size: int) -> None:
        """Check that the rank exists.

        Raises:
            UsageError: its number is `world_size` or more.
        """
        if self.rank >= world_size:
            raise UsageError(f"--straggler {self} names none of the {world_size} ranks; they count from 0")

    def __str__(self) -> str:
        return f"rank={self.rank},slowdown={self.slowdown:g}"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
