"""LrScaling, the dependence of the learning rate on the number of ranks: ``none``, ``linear`` or ``linear:base=4``.

Source: linear scaling as in Goyal et al. 2017 (arXiv:1706.02677); part of the Group-TopK ring-sharing patent.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Self

from bench.core.errors import UsageError

_FORM = re.compile(r"\s*linear\s*(?::\s*base\s*=\s*([0-9]{1,9})\s*)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LrScaling:
    """Linear scaling of the learning rate with the number of ranks, or no scaling.

    Attributes:
        base: number of ranks that the learning rate was chosen for; None: it is not scaled.
    """

    base: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``none``, ``linear`` or ``linear:base=4``.

        Raises:
            UsageError: the text has another form, or the base is 0.
        """
        if text.strip() == "none":
            return cls()
        match = _FORM.fullmatch(text)
        base = int(match[1] or 1) if match else 0
        if base < 1:
            raise UsageError(
                f"--lr-scaling {text} is not possible; write none, linear or linear:base=N, where N is the number of "
                "ranks that --lr was chosen for"
            )
        return cls(base=base)

    def factor(self, world_size: int) -> float:
        """Return the factor by which the learning rate is multiplied."""
        return 1.0 if self.base is None else world_size / self.base

    def __str__(self) -> str:
        return "none" if self.base is None else "linear" if self.base == 1 else f"linear:base={self.base}"
